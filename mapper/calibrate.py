"""Calibration: one streaming pass over both models, then a fit, a choice and an artifact."""

from __future__ import annotations

import hashlib
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoTokenizer

from mapper.artifact import Artifact, CalibrationRecord, LayerPlan, Manifest, check_pair
from mapper.capture.model import CapturedModel
from mapper.capture.pairs import capture
from mapper.capture.texts import Document, first_tokens, read_documents
from mapper.errors import CalibrationError, UnsupportedModel
from mapper.methods.base import CacheMap
from mapper.methods.ridge import fit_layer, rank_layers, require_rows
from mapper.methods.select import HeldOut
from mapper.moments import Moments, PairShape
from mapper.spec import ModelSpec

Method = Literal["identity", "all-head", "head-local"]

# Held-out documents stay in memory: enough to tell variants apart, a bounded few hundred MB.
HELD_OUT_TOKENS = 6144
HELD_OUT_QUERIES = 32
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
    method: Method = "head-local",
    k: int = 6,
    ridge: float = 1e-4,
    tokens: int = 60_000,
    length: int = 1024,
    stride: int = 1,
    held_out: float = 0.1,
    native_tail: int = 32,
    page_size: int = 32,
    kv_dtype: str = "float32",
) -> Path:
    """Fits a map from `source`'s cache to `target`'s and writes it to the folder `out`.

    Args:
        source, target: Hugging Face model folders with the same tokenizer and chat template.
        texts: .jsonl files of {"messages": [...]} and plain text files.
        out: the artifact's folder; `out` + ".moments" keeps the pass's checkpoint.
        method: how to fit; "identity" only for a model onto itself.
        k: source layers a target layer's map reads.
        ridge: penalty, relative to the inputs' mean variance.
        tokens: how many tokens of text to use at most.
        length: tokens of a window.
        stride: use every n-th token's row.
        held_out: share of the documents kept for choosing, never fitted.
        native_tail: tokens at the end that the target shall prefill itself.
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
    per_output = shape.head_dim if method == "head-local" else shape.layer_width
    require_rows(sum(len(document.ids) for document in text.fit) // stride, k * per_output)
    console.print(
        f"moments: {shape.bytes / 2**20:,.0f} MiB in memory, the same again on disk; "
        f"{len(text.fit)} documents to fit, {len(text.held_out)} held out"
    )
    moments = accumulate(models, text.fit, shape, checkpoint_path(out), stride)
    held = HeldOut(list(capture(*models, text.held_out, HELD_OUT_QUERIES)), models[1])

    head_local = method == "head-local"
    ranked = rank_layers(moments, head_local=head_local)
    maps, plans = {}, {}
    for kind in ("k", "v"):
        maps[kind] = [
            fit_layer(moments, kind, layers[:k], layer, head_local=head_local, ridge=ridge)
            for layer, layers in enumerate(ranked)
        ]
        plans[kind] = [
            LayerPlan(head_local=head_local, layers=list(layer.layers), ridge=ridge, method=method)
            for layer in maps[kind]
        ]
    scores = [held.score(layer, *pair) for layer, pair in enumerate(zip(maps["k"], maps["v"], strict=True))]
    cache_map = CacheMap(maps["k"], maps["v"], key_norms(models[1]))
    sink_tokens = first_tokens(tokenizer, text.fit)
    manifest = Manifest(
        source=specs[0],
        target=specs[1],
        method=method,
        k=plans["k"],
        v=plans["v"],
        parameters=cache_map.parameters,
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
        selection={
            "attention_output_error": [score.error for score in scores],
            "attention_output_cosine": [score.cosine for score in scores],
        },
    )
    Artifact(manifest, cache_map, sink_table(models[1], sink_tokens)).save(out)
    checkpoint_path(out).unlink(missing_ok=True)
    return Path(out)


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
    out: Path, model: CapturedModel, specs: list[ModelSpec], sink_tokens: list[int], native_tail: int
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
