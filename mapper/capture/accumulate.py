"""The streaming pass of a calibration: documents and stored pages into moments, resumable."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mapper.capture.model import CapturedModel
from mapper.capture.pairs import capture
from mapper.capture.stored import StoredPairs
from mapper.capture.texts import Document
from mapper.moments import Moments, PairShape
from mapper.spec import ModelSpec

_CHECKPOINT_SECONDS = 60

console = Console(stderr=True)


def accumulate(
    models: Sequence[CapturedModel],
    documents: Sequence[Document],
    shape: PairShape,
    checkpoint: Path,
    stride: int,
    *,
    head_local: bool,
    both: bool,
) -> Moments:
    """One pass; continues from `checkpoint` when a run of the same pair left one with these sums or
    more. One that has all documents is left as it is: more sums may be in it than are asked for."""
    name = pair_name([model.spec for model in models], stride)
    layout = {"head_local": head_local, "both": both}
    moments = Moments.empty(shape, name, **layout)
    if checkpoint.exists():
        saved = Moments.load(checkpoint)
        same = saved.pair == name and saved.holds(shape, **layout)
        if same and saved.documents.keys() <= {d.digest for d in documents}:
            moments = saved.reduced(shape, **layout)
            console.print(f"resumed after {len(moments.documents)} documents")
        else:
            console.print(f"{checkpoint} is of another pair, method or text and is started again")
    left = [document for document in documents if document.digest not in moments.documents]
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    saved_at = time.monotonic()
    with progress() as bar:
        task = bar.add_task("tokens", total=sum(len(document.ids) for document in documents))
        bar.advance(task, sum(moments.documents.values()))
        for pair in capture(*models, left):
            rows = pair.rows(stride, wide=shape.wide)
            moments.add(pair.digest, *rows, tokens=len(pair.positions))
            bar.advance(task, len(pair.positions))
            if time.monotonic() - saved_at > _CHECKPOINT_SECONDS:
                moments.save(checkpoint)
                saved_at = time.monotonic()
    if left:
        moments.save(checkpoint)
    return moments


def pair_name(specs: Sequence[ModelSpec], stride: int) -> str:
    """Of the specs that the models run with."""
    return "->".join(spec.fingerprint for spec in specs) + f"/{stride}"


def add_stored(
    moments: Moments, models: Sequence[CapturedModel], stored: StoredPairs, stride: int
) -> None:
    before = moments.rows
    for one in stored:
        paired = one.pair((models[0].rotary, models[1].rotary))
        rows = paired.rows(stride, wide=moments.shape.wide)
        moments.add(paired.digest, *rows, tokens=len(paired.positions))
    console.print(
        f"{moments.rows - before} rows from the store; pages left out: {dict(stored.skipped)}"
    )


def checkpoint_path(out: Path) -> Path:
    return Path(out).with_name(Path(out).name + ".moments")


def progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )
