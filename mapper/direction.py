"""One direction of a calibration: from moments to fitted maps, and from those to a judged and saved artifact."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mapper.artifact import Artifact, CalibrationRecord, LayerPlan, Manifest
from mapper.capture.accumulate import console, progress
from mapper.capture.model import CapturedModel
from mapper.capture.pairs import capture, log_spaced
from mapper.capture.texts import Document, first_documents
from mapper.methods.attended import QUERIES, Refit, attended_bytes
from mapper.methods.base import CacheMap
from mapper.methods.distill import TAILS, Classroom, between, distill, evaluate
from mapper.methods.fit import Method, fit, refit
from mapper.methods.select import HeldOut, Score
from mapper.methods.tail import choose_tail, tail_curve
from mapper.moments import KINDS, Moments
from mapper.spec import ModelSpec

HELD_OUT_QUERIES = 24
# Documents whose rows a network is trained on stay in memory.
ROWS_TOKENS = 65_536
# How far to go from a fitted map towards the distilled one. Half of the way is half of what was learned, but a quarter
# of the noise that training leaves in all that it has no gradient for.
SHARES = (1.0, 0.75, 0.5, 0.25)
# KL in nats that a kind of text may lose where the sum over all kinds falls: the few held-out documents tell no smaller
# difference from chance.
TOLERANCE = 0.002
# `auto` spends at most this share of the arithmetic of prefilling the same tokens on mapping.
BUDGET_SHARE = 0.125


@dataclass(frozen=True)
class Text:
    """Documents split into those to fit and those to choose by.

    `recall_exam` are quotes (`capture/recall.py`) of the held-out ones. For distillation alone: `lessons`, of those to
    fit and further ones like them, with quotes of them, and `exam`, more of those that are held out, with theirs.
    """

    fit: list[Document]
    held_out: list[Document]
    recall_exam: list[Document]
    skipped: dict[str, int]
    lessons: Sequence[Document] = ()
    exam: Sequence[Document] = ()


@dataclass(frozen=True)
class Options:
    method: Method
    k: int
    ridge: float
    budget: int | None
    refit: Refit | None
    distill_seconds: float
    native_tail: int | None


@dataclass(frozen=True)
class Fitted:
    """Maps, and what each layer's do to held-out attention outputs."""

    maps: CacheMap
    scores: list[Score]


def fit_maps(
    models: Sequence[CapturedModel], text: Text, moments: Moments, options: Options
) -> Fitted:
    """Fits the maps of one direction. Nothing afterwards needs the moments, which may be gigabytes."""
    held = _held_out(models, text, wide=moments.shape.wide)
    maps = _fit(models, text, moments, held, options)
    return Fitted(maps, _scores(held, maps))


def _fit(
    models: Sequence[CapturedModel], text: Text, moments: Moments, held: HeldOut, options: Options
) -> CacheMap:
    with progress() as bar:
        task = bar.add_task("layers", total=2 * moments.shape.target_layers)
        maps = fit(
            options.method,
            moments,
            held,
            k=options.k,
            ridge=options.ridge,
            budget=round(BUDGET_SHARE * models[1].layer_parameters())
            if options.budget is None
            else options.budget,
            pairs=lambda: capture(*models, first_documents(text.fit, ROWS_TOKENS)),
            report=lambda: bar.advance(task),
        )
    maps = CacheMap(maps.k, maps.v, key_norms(models[1]))
    if options.refit is None:
        return maps
    console.print(f"refit: {attended_bytes(maps) / 2**20:,.0f} MiB of further sums in memory")
    again = capture(*models, text.fit, log_spaced(QUERIES))
    return refit(maps, options.refit, moments, held, again, options.ridge)


def save_direction(
    models: Sequence[CapturedModel],
    specs: Sequence[ModelSpec],
    text: Text,
    fitted: Fitted,
    options: Options,
    record: CalibrationRecord,
    out: Path,
    sink_tokens: list[int],
    started: float,
) -> None:
    """Distils and judges fitted maps, and writes the artifact. `record` still lacks time and memory."""
    steps = [options.method, *([options.refit] if options.refit else [])]
    selection: dict[str, Any] = {}
    tail = options.native_tail
    maps, scores = fitted.maps, fitted.scores
    wide = maps.wide(models[0].spec.layers)
    if options.distill_seconds or tail is None:
        classroom = Classroom(*models, wide=wide)
        if options.distill_seconds:
            maps, distilled = _distill(maps, classroom, text, options.distill_seconds)
            selection["distilled"] = distilled
            if distilled["kept"]:
                steps.append("distilled")
                # Captured again: kept meanwhile, they would take gigabytes that distillation needs.
                scores = _scores(_held_out(models, text, wide=wide), maps)
        if tail is None:
            curve = tail_curve(maps, classroom, text.held_out, models[1])
            selection["native_tail"] = [asdict(point) for point in curve]
            tail = choose_tail(curve)
    selection["attention_output_error"] = [score.error for score in scores]
    selection["attention_output_cosine"] = [score.cosine for score in scores]
    manifest = Manifest(
        source=specs[0],
        target=specs[1],
        method="+".join(steps),
        **{
            kind: [LayerPlan.of(one, options.ridge) for one in getattr(maps, kind)]
            for kind in KINDS
        },
        parameters=maps.parameters,
        native_tail=tail,
        sink_token_ids=sink_tokens,
        calibration=record.model_copy(
            update={
                "seconds": round(time.monotonic() - started, 1),
                "peak_memory_bytes": peak_memory(),
            }
        ),
        selection=selection,
    )
    Artifact(manifest, maps, sink_table(models[1], sink_tokens)).save(out)


def _held_out(models: Sequence[CapturedModel], text: Text, *, wide: bool) -> HeldOut:
    return HeldOut(*models, [*text.held_out, *text.recall_exam], HELD_OUT_QUERIES, wide=wide)


def _scores(held: HeldOut, maps: CacheMap) -> list[Score]:
    pairs = zip(maps.k, maps.v, strict=True)
    return [held.score(layer, *pair) for layer, pair in enumerate(pairs)]


def _distill(
    maps: CacheMap, classroom: Classroom, text: Text, seconds: float
) -> tuple[CacheMap, dict[str, Any]]:
    """The step from the map as it was towards the distilled one that lowers the KL of held-out text most, of those that
    raise it (by more than `TOLERANCE`) for no kind of text, with or without a native tail; if none does, the map as it
    was."""
    before = _examine(maps, classroom, text.exam)
    with progress() as bar:
        task = bar.add_task("distilling (s)", total=round(seconds))
        updated, steps = distill(
            maps,
            classroom,
            text.lessons,
            seconds=seconds,
            report=lambda at: bar.update(task, completed=at),
        )
    tried = {share: between(maps, updated, share) for share in SHARES}
    after = {share: _examine(one, classroom, text.exam) for share, one in tried.items()}
    better = [
        share
        for share, kls in after.items()
        if sum(kls.values()) < sum(before.values())
        and all(kls[kind] < before[kind] + TOLERANCE for kind in before)
    ]
    share = min(better or SHARES[:1], key=lambda one: sum(after[one].values()))
    for kind in before:
        console.print(
            f"held-out KL of {kind}: {before[kind]:.4f} -> {after[share][kind]:.4f} nats, "
            f"{share:.0%} of {steps} steps' change"
        )
    record = {
        "steps": steps,
        "share": share,
        "held_out_documents": len(text.exam),
        "held_out_kl_before": before,
        "held_out_kl_after": after[share],
        "kept": bool(better),
    }
    return (tried[share] if better else maps), record


def _examine(maps: CacheMap, classroom: Classroom, exam: Sequence[Document]) -> dict[str, float]:
    """KL by kind of text and native tail."""
    kls = evaluate(maps, classroom, exam, TAILS)
    return {f"{kind}, tail {tail}": kl for (kind, tail), kl in kls.items()}


def key_norms(model: CapturedModel) -> torch.Tensor | None:
    """Gains [layers, head_dim] of the model's k_norm, if it has one."""
    gains = [model.key_norm(layer) for layer in range(model.spec.layers)]
    return None if gains[0] is None else torch.stack(gains)


def sink_table(model: CapturedModel, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """k, v [tokens, layers, kv_heads, head_dim]: each token's cache at position 0."""
    prefills = [model.prefill(torch.tensor([token])) for token in tokens]
    return (
        torch.stack([prefill.k[:, 0] for prefill in prefills]),
        torch.stack([prefill.v[:, 0] for prefill in prefills]),
    )


def peak_memory() -> int:
    """This process's largest resident size so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
