"""Calibration: one streaming pass over both models, then a fit, a choice and an artifact."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import AutoTokenizer

from mapper.artifact import (
    Artifact,
    CalibrationRecord,
    Manifest,
    check_pair,
    file_digest,
    refuse_to_replace,
)
from mapper.capture.accumulate import (
    accumulate,
    add_stored,
    checkpoint_path,
    console,
    pair_name,
)
from mapper.capture.model import CapturedModel
from mapper.capture.recall import recall_documents
from mapper.capture.stored import StoredPairs
from mapper.capture.texts import Document, first_documents, first_tokens, read_documents
from mapper.direction import Options, Text, fit_maps, save_direction, sink_table
from mapper.errors import CalibrationError, UnsupportedModel
from mapper.methods.attended import Refit
from mapper.methods.fit import HEAD_LOCAL, WIDE, Method, columns
from mapper.methods.ridge import require_rows
from mapper.moments import Moments, PairShape
from mapper.spec import ModelSpec, read_spec

# Held-out documents stay in memory, and as many tokens of quotes of them at most: enough to tell variants apart, and
# a bounded number (of the demo's pair some 150 KB a token, half of it for maps of wide inputs alone).
HELD_OUT_TOKENS = 8192
# Text that distillation learns from, and quotes of it.
LESSON_TOKENS = 600_000
RECALL_TOKENS = 300_000
# Held-out text of each kind that a distilled map is judged by. In four documents of dialogues there may be next to no
# question that follows up on an answer, which is where a map is needed most behind a native tail.
EXAM_TOKENS = 20_480
_SEED = 0


def run(
    source: Path,
    target: Path,
    texts: Sequence[Path],
    out: Path,
    *,
    reverse: Path | None = None,
    method: Method = "auto",
    k: int = 6,
    ridge: float = 1e-4,
    budget: int | None = None,
    refit: Refit | None = None,
    narrow: bool = False,
    distill_seconds: float = 0,
    tokens: int = 60_000,
    length: int = 1024,
    stride: int = 1,
    held_out: float = 0.1,
    native_tail: int | None = None,
    merge: Sequence[Path] = (),
    from_store: Path | None = None,
    tenants: Sequence[str | None] = (None,),
    page_size: int = 16,
    kv_dtype: str = "float32",
) -> Path:
    """Fits a map from `source`'s cache to `target`'s and writes it to the folder `out`.

    Args:
        source, target: Hugging Face model folders with the same tokenizer and chat template.
        texts: .jsonl files of {"messages": [...]} or {"text": ...}, and plain text files.
        out: the artifact's folder, replaced if it holds one; `out` + ".moments" is the checkpoint
            of the pass, and stays there to be merged elsewhere.
        reverse: folder for the map from `target` to `source`, fitted from the same pass.
        method: how to fit. "auto" chooses size and form for each layer by held-out attention
            outputs; "identity" is for a model onto itself only.
        k: source layers (or blocks) that an output reads, for all methods but "auto".
        ridge: penalty, relative to the inputs' mean variance.
        budget: parameters that "auto" may spend; None: an eighth of the target's layers'.
        refit: "repair" weights rows by the attention they get, "attention" fits values to
            attention's mixtures as well; a second pass, taken layer by layer where it helps.
        narrow: keys are made of keys and values of values of the same token, by all methods; without it "auto" and
            "blocks" may read more (`wide_inputs` in `methods/base.py`), from sums that are much larger.
        distill_seconds: time to train the maps on the target's KL; the result is kept only if
            it is lower on held-out text of every kind.
        tokens: how many tokens of text to use at most.
        length: tokens of a window.
        stride: use every n-th token's row.
        held_out: share of the documents kept for choosing, never fitted; of two or more texts at
            least one.
        native_tail: tokens at the end that the target shall prefill itself; None measures what
            they are worth and chooses.
        merge: moments of other processes or machines, of other documents of the same pair.
        from_store: page store of live workers of both models: pages that both computed of the
            same tokens are added to the moments. `tenants`: the cache salts that may be read.
        page_size, kv_dtype: of the workers' caches.

    Raises:
        UnsupportedModel: the models' caches do not correspond, or one of them cannot be mapped.
        CalibrationError: too little text, values that are not finite, or options that exclude
            each other.
        BadArtifact: there is something else than an artifact in `out` or `reverse`.
    """
    source, target, out = Path(source), Path(target), Path(out)
    folders = [out] if reverse is None else [out, Path(reverse)]
    _refuse_folders(folders)
    if method == "mlp" and (refit is not None or distill_seconds):
        raise CalibrationError(
            "only linear maps can be refitted or distilled; choose another method than mlp"
        )
    if method == "identity":
        fitting = {
            "--reverse": reverse,
            "--merge": merge,
            "--refit": refit,
            "--distill-seconds": distill_seconds,
            "--from-store": from_store,
        }
        useless = [option for option, value in fitting.items() if value]
        if useless:
            raise CalibrationError(
                f"method identity copies a cache and fits nothing: leave out {', '.join(useless)}"
            )
    started = time.monotonic()
    # All that can be refused without them is, before any model's weights are loaded.
    specs = [
        read_spec(folder, name=folder.name, kv_dtype=kv_dtype, page_size=page_size)
        for folder in (source, target)
    ]
    check_pair(*specs)
    tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
    if method == "identity":
        return _save_identity(out, target, specs, first_tokens(tokenizer, []), native_tail or 0)
    text = _read_text(texts, tokenizer, tokens, length, held_out)
    if distill_seconds:
        text = _with_quotes(text, tokenizer, length)
    sources = {path.name: file_digest(path) for path in map(Path, texts)}
    options = Options(method, k, ridge, budget, refit, distill_seconds, native_tail)

    shape = PairShape(
        specs[0].layers,
        specs[1].layers,
        specs[0].kv_heads,
        specs[0].head_dim,
        wide=method in WIDE and not narrow,
    )
    # They run in fp32, whatever the workers cache in.
    fp32 = [spec.model_copy(update={"kv_dtype": "float32"}) for spec in specs]
    size = {"head_local": method in HEAD_LOCAL, "both": reverse is not None}
    others = _read_others(merge, pair_name(fp32, stride), shape, size, text.fit)
    needed = columns(method, k, shape.kv_heads, shape.head_dim)
    if from_store is None:
        # Nobody knows yet how many rows a store adds.
        rows = sum(len(d.ids) for d in text.fit) // stride
        if others is not None:
            rows += others.rows
        require_rows(rows, needed)

    models = [
        CapturedModel(folder, spec=spec)
        for folder, spec in zip((source, target), fp32, strict=True)
    ]
    stored = None
    if from_store is not None:
        stored = StoredPairs(from_store, models[0], specs, tenants)
    console.print(
        f"moments: {shape.bytes(**size) / 2**20:,.0f} MiB in memory, the same again on disk; "
        f"{len(text.fit)} documents to fit, {len(text.held_out)} held out"
    )
    moments = accumulate(models, text.fit, shape, checkpoint_path(out), stride, **size)
    if others is not None:
        moments.merge(others)
    if stored is not None:
        add_stored(moments, models, stored, stride)
        require_rows(moments.rows, needed)

    record = CalibrationRecord(
        sources=sources,
        documents=len(moments.documents),
        tokens=sum(moments.documents.values()),
        rows=moments.rows,
        held_out_documents=len(text.held_out),
        skipped=text.skipped,
    )
    fitted = [fit_maps(models, text, moments, options)]
    if reverse is not None:
        backward = moments.reverse(pair_name(fp32[::-1], stride))
        fitted.append(fit_maps(models[::-1], text, backward, options))
        del backward
    # Gigabytes that distillation needs itself.
    del moments, others

    sink_tokens = first_tokens(tokenizer, text.fit)
    for one, folder in zip(fitted, folders, strict=True):
        save_direction(models, specs, text, one, options, record, folder, sink_tokens, started)
        models, specs = models[::-1], specs[::-1]
    return out


def _refuse_folders(folders: Sequence[Path]) -> None:
    for folder in folders:
        refuse_to_replace(folder)
    whole = [folder.resolve() for folder in folders]
    for one, other in itertools.permutations(whole, 2):
        if one.is_relative_to(other):
            raise CalibrationError(
                f"the two directions' folders {one} and {other} are one, or one is in the other, "
                "and saving replaces a whole folder: choose two apart"
            )


def _read_others(
    paths: Sequence[Path],
    pair: str,
    shape: PairShape,
    size: dict[str, bool],
    documents: Sequence[Document],
) -> Moments | None:
    """All moments to merge as one, with the sums that this run takes: no more than two are in memory at a time, and
    what cannot be merged is refused before the run's own pass is begun."""
    counted, others = {document.digest for document in documents}, None
    for path in paths:
        part = Moments.load(path)
        if part.pair != pair:
            raise CalibrationError(
                f"{path} is of another pair, the other direction or another stride: it was made for "
                f"{part.pair}, this run is for {pair} (fingerprints of the models' caches)"
            )
        if not part.holds(shape, **size):
            raise CalibrationError(
                f"{path} has fewer sums than this run takes: make it with the same --method, and with "
                "--reverse and without --narrow if this run is"
            )
        twice = counted & part.documents.keys()
        if twice:
            raise CalibrationError(
                f"{path}: {len(twice)} of its documents are in this run's text or in another file to "
                "merge; give each process its own part"
            )
        counted |= part.documents.keys()
        part = part.reduced(shape, **size)
        if others is None:
            others = part
        else:
            others.merge(part)
    return others


def _read_text(texts, tokenizer, tokens: int, length: int, held_out: float) -> Text:
    documents, skipped = read_documents(texts, tokenizer, length=length, seed=_SEED)
    origins = {d.origin for d in documents}
    chosen = {d.origin for d in documents if d.held_out(held_out)}
    if not chosen and len(origins) > 1:
        # Of few texts chance may take none.
        chosen = {min(origins)}
    apart = [d for d in documents if d.origin in chosen]
    kinds = {d.kind for d in documents}
    held = _first_of_each_kind(apart, HELD_OUT_TOKENS // len(kinds))
    others = [d for d in documents if d.origin not in chosen]
    fit, lessons = (first_documents(others, limit) for limit in (tokens, LESSON_TOKENS))
    if not fit or not held:
        raise CalibrationError(
            f"{len(origins)} text(s) cannot be split into fitted and held-out ones: give more. Two "
            "blank lines separate the texts of a text file, a .jsonl has one a line; those shorter "
            f"than {length} tokens are joined"
        )
    for reason, count in skipped.items():
        if count:
            console.print(f"[yellow]{count} documents: {reason}[/]")
    recall = recall_documents(held, tokenizer, length=length, seed=_SEED)
    recall = first_documents(recall, HELD_OUT_TOKENS // len(kinds))
    left_out = {reason: count for reason, count in skipped.items() if count}
    exam = _first_of_each_kind(apart, EXAM_TOKENS)
    return Text(fit, held, recall, left_out, lessons, exam)


def _first_of_each_kind(documents: list[Document], tokens: int) -> list[Document]:
    return [
        one
        for kind in sorted({d.kind for d in documents})
        for one in first_documents([d for d in documents if d.kind == kind], tokens)
    ]


def _with_quotes(text: Text, tokenizer, length: int) -> Text:
    def quotes(documents: Sequence[Document], tokens: int) -> list[Document]:
        # A text has several times as many tokens' worth of quotes as it has tokens.
        quoted = first_documents(list(documents), tokens // 2)
        recall = recall_documents(quoted, tokenizer, length=length, seed=_SEED)
        return first_documents(recall, tokens)

    return replace(
        text,
        lessons=[*text.lessons, *quotes(text.lessons, RECALL_TOKENS)],
        exam=[*text.exam, *quotes(text.exam, EXAM_TOKENS)],
    )


def _save_identity(
    out: Path,
    target: Path,
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
    model = CapturedModel(target, spec=specs[1])
    Artifact(manifest, None, sink_table(model, sink_tokens)).save(out)
    return out
