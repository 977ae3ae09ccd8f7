"""Calibration: one streaming pass over both models, then a fit, a choice and an artifact."""

from __future__ import annotations

import hashlib
import resource
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoTokenizer

from mapper.artifact import Artifact, CalibrationRecord, LayerPlan, Manifest, check_pair
from mapper.capture.model import CapturedModel
from mapper.capture.pairs import StoredPair, capture
from mapper.capture.texts import Document, first_tokens, read_documents
from mapper.errors import CalibrationError, UnsupportedModel
from mapper.methods.base import CacheMap
from mapper.methods.choose import choose
from mapper.methods.distill import distill, evaluate, prepare
from mapper.methods.ridge import fit_layer, rank_layers, require_rows
from mapper.methods.select import HeldOut
from mapper.moments import KINDS, Moments, PairShape
from mapper.spec import ModelSpec

Method = Literal["auto", "all-head", "head-local", "identity"]

# Held-out documents stay in memory: enough to tell variants apart, a bounded few hundred MB.
HELD_OUT_TOKENS = 4096
HELD_OUT_QUERIES = 24
# Documents that distillation rehearses are kept in memory as well.
LESSON_TOKENS = 32_768
# `auto` spends at most this share of the arithmetic of prefilling the same tokens on mapping.
BUDGET_SHARE = 0.125
_CHECKPOINT_SECONDS = 60
_SEED = 0

console = Console(stderr=True)


@dataclass(frozen=True)
class _Text:
    """Documents split into those to fit and those to choose by."""

    fit: list[Document]
    held_out: list[Document]
    skipped: dict[str, int]


def run(
    source: Path,
    target: Path,
    texts: Sequence[Path],
    out: Path,
    *,
    method: Method = "auto",
    k: int = 6,
    ridge: float = 1e-4,
    distill_seconds: float = 0,
    tokens: int = 60_000,
    length: int = 1024,
    stride: int = 1,
    held_out: float = 0.1,
    native_tail: int = 64,
    merge: Sequence[Path] = (),
    stored: Iterable[StoredPair] = (),
    page_size: int = 16,
    kv_dtype: str = "float32",
) -> Path:
    """Fits a map from `source`'s cache to `target`'s and writes it to the folder `out`.

    Args:
        source, target: Hugging Face model folders with the same tokenizer and chat template.
        texts: .jsonl files of {"messages": [...]} and plain text files.
        out: the artifact's folder; `out` + ".moments" is the checkpoint of the pass, and stays
            there to be merged elsewhere.
        method: how to fit. "auto" chooses k and all-head or head-local for each layer by
            held-out attention outputs; "identity" is for a model onto itself only.
        k: source layers a target layer's map reads ("all-head" and "head-local").
        ridge: penalty, relative to the inputs' mean variance.
        distill_seconds: time to spend on a low-rank update that lowers the target's KL; it is
            kept only if it does so on held-out documents.
        tokens: how many tokens of text to use at most.
        length: tokens of a window.
        stride: use every n-th token's row.
        held_out: share of the documents kept for choosing, never fitted.
        native_tail: tokens at the end that the target shall prefill itself.
        merge: moments of other processes or machines, of other documents of the same pair.
        stored: paired caches of live workers, added to the moments.
        page_size, kv_dtype: of the workers' caches.

    Raises:
        UnsupportedModel: the models' caches do not correspond.
        CalibrationError: too little text, or values that are not finite.
    """
    started = time.monotonic()
    models = [CapturedModel(folder, page_size=page_size) for folder in (source, target)]
    specs = [model.spec.model_copy(update={"kv_dtype": kv_dtype}) for model in models]
    check_pair(*specs)
    tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
    if method == "identity":
        return _save_identity(out, models[1], specs, first_tokens(tokenizer, []), native_tail)
    text = _read_text(texts, tokenizer, tokens, length, held_out)

    shape = PairShape(specs[0].layers, specs[1].layers, specs[0].kv_heads, specs[0].head_dim)
    others = [Moments.load(path) for path in merge]
    if method != "auto":
        rows = sum(len(d.ids) for d in text.fit) // stride + sum(part.rows for part in others)
        require_rows(rows, k * (shape.head_dim if method == "head-local" else shape.layer_width))
    console.print(
        f"moments: {shape.bytes / 2**20:,.0f} MiB in memory, the same again on disk; "
        f"{len(text.fit)} documents to fit, {len(text.held_out)} held out"
    )
    moments = accumulate(models, text.fit, shape, checkpoint_path(out), stride)
    for part in others:
        moments.merge(part)
    for one in stored:
        paired = one.pair((models[0].rotary, models[1].rotary))
        moments.add(paired.digest, *paired.rows(stride), tokens=len(paired.positions))
    held = HeldOut(list(capture(*models, text.held_out, HELD_OUT_QUERIES)), models[1])

    maps = _fit(method, moments, held, models[1], k=k, ridge=ridge)
    maps = CacheMap(maps.k, maps.v, key_norms(models[1]))
    selection = {}
    if distill_seconds:
        maps, selection["distilled"] = _distill(maps, models, text, distill_seconds)
    scores = [
        held.score(layer, *pair) for layer, pair in enumerate(zip(maps.k, maps.v, strict=True))
    ]
    selection["attention_output_error"] = [score.error for score in scores]
    selection["attention_output_cosine"] = [score.cosine for score in scores]

    sink_tokens = first_tokens(tokenizer, text.fit)
    manifest = Manifest(
        source=specs[0],
        target=specs[1],
        method=method + ("+distilled" if selection.get("distilled", {}).get("kept") else ""),
        **{
            kind: [
                LayerPlan(head_local=one.head_local, layers=list(one.layers), ridge=ridge)
                for one in getattr(maps, kind)
            ]
            for kind in KINDS
        },
        parameters=maps.parameters,
        native_tail=native_tail,
        sink_token_ids=sink_tokens,
        calibration=CalibrationRecord(
            sources={path.name: file_digest(path) for path in map(Path, texts)},
            documents=len(moments.documents),
            tokens=sum(moments.documents.values()),
            rows=moments.rows,
            held_out_documents=len(text.held_out),
            skipped=text.skipped,
            seconds=round(time.monotonic() - started, 1),
            peak_memory_bytes=peak_memory(),
        ),
        selection=selection,
    )
    Artifact(manifest, maps, sink_table(models[1], sink_tokens)).save(out)
    return Path(out)


def _fit(
    method: Method, moments, held: HeldOut, target: CapturedModel, *, k: int, ridge: float
) -> CacheMap:
    layers = range(moments.shape.target_layers)
    if method == "auto":
        with progress() as bar:
            task = bar.add_task("layers", total=2 * len(layers))
            return choose(
                moments,
                held,
                budget=round(BUDGET_SHARE * target.layer_parameters()),
                ridge=ridge,
                report=lambda: bar.advance(task),
            )
    head_local = method == "head-local"
    ranked = rank_layers(moments, head_local=head_local)
    return CacheMap(
        *(
            [
                fit_layer(
                    moments, kind, ranked[layer][:k], layer, head_local=head_local, ridge=ridge
                )
                for layer in layers
            ]
            for kind in KINDS
        )
    )


def _distill(
    maps: CacheMap, models: Sequence[CapturedModel], text: _Text, seconds: float
) -> tuple[CacheMap, dict]:
    """The distilled map if it lowers the KL of held-out documents, else the map as it was."""
    lessons = prepare(*models, _first_tokens(text.fit, LESSON_TOKENS))
    exam = prepare(*models, text.held_out)
    before = evaluate(maps, models[1], exam)
    with progress() as bar:
        task = bar.add_task("distilling (s)", total=round(seconds))
        updated, steps = distill(
            maps,
            models[1],
            lessons,
            seconds=seconds,
            report=lambda at: bar.update(task, completed=at),
        )
    after = evaluate(updated, models[1], exam)
    kept = after < before
    record = {
        "steps": steps,
        "held_out_kl_before": before,
        "held_out_kl_after": after,
        "kept": kept,
    }
    console.print(f"held-out KL {before:.4f} -> {after:.4f} nats after {steps} steps")
    return (updated if kept else maps), record


def accumulate(
    models: Sequence[CapturedModel],
    documents: Sequence[Document],
    shape: PairShape,
    checkpoint: Path,
    stride: int,
) -> Moments:
    """One pass; continues from `checkpoint` when a run of the same pair left one."""
    pair_name = "->".join(model.spec.fingerprint for model in models) + f"/{stride}"
    moments = Moments.empty(shape, pair_name)
    if checkpoint.exists():
        saved = Moments.load(checkpoint)
        if saved.pair == pair_name and saved.documents.keys() <= {d.digest for d in documents}:
            moments = saved
            console.print(f"resumed after {len(moments.documents)} documents")
        else:
            console.print(f"{checkpoint} is of another pair or text and is started again")
    left = [document for document in documents if document.digest not in moments.documents]
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    saved_at = time.monotonic()
    with progress() as bar:
        task = bar.add_task("tokens", total=sum(len(document.ids) for document in documents))
        bar.advance(task, sum(moments.documents.values()))
        for pair in capture(*models, left):
            moments.add(pair.digest, *pair.rows(stride), tokens=len(pair.positions))
            bar.advance(task, len(pair.positions))
            if time.monotonic() - saved_at > _CHECKPOINT_SECONDS:
                moments.save(checkpoint)
                saved_at = time.monotonic()
    moments.save(checkpoint)
    return moments


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


def _read_text(texts, tokenizer, tokens: int, length: int, held_out: float) -> _Text:
    documents, skipped = read_documents(texts, tokenizer, length=length, seed=_SEED)
    held = _first_tokens([d for d in documents if d.held_out(held_out)], HELD_OUT_TOKENS)
    fit = _first_tokens([d for d in documents if not d.held_out(held_out)], tokens)
    if not fit or not held:
        raise CalibrationError(
            f"{len(documents)} documents cannot be split into fitted and held-out ones; give more text"
        )
    for reason, count in skipped.items():
        if count:
            console.print(f"[yellow]{count} documents: {reason}[/]")
    return _Text(fit, held, {reason: count for reason, count in skipped.items() if count})


def _first_tokens(documents: list[Document], tokens: int) -> list[Document]:
    """Documents from the start of the list until they hold `tokens` tokens."""
    chosen, total = [], 0
    for document in documents:
        if total >= tokens:
            break
        chosen.append(document)
        total += len(document.ids)
    return chosen


def _save_identity(
    out: Path,
    model: CapturedModel,
    specs: list[ModelSpec],
    sink_tokens: list[int],
    native_tail: int,
) -> Path:
    if specs[0].fingerprint != specs[1].fingerprint:
        raise UnsupportedModel("method", "'identity' maps a model onto itself only")
    manifest = Manifest(
        source=specs[0],
        target=specs[1],
        method="identity",
        k=[],
        v=[],
        parameters=0,
        native_tail=native_tail,
        sink_token_ids=sink_tokens,
        calibration=CalibrationRecord(),
    )
    Artifact(manifest, None, sink_table(model, sink_tokens)).save(out)
    return Path(out)


def checkpoint_path(out: Path) -> Path:
    return Path(out).with_name(Path(out).name + ".moments")


def file_digest(path: Path) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def peak_memory() -> int:
    """This process's largest resident size so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )
