"""All task formats, and the tasks that a folder has files for."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from mapper.errors import BadTask
from mapper.quality.tasks import answers, choice, likelihood
from mapper.quality.tasks.base import Format, Task, read_rows

FORMATS: dict[str, Format] = {
    one.name: one for one in (*choice.FORMATS, *answers.FORMATS, *likelihood.FORMATS)
}
# Rows of a file that worked examples are taken from, at most half of them.
EXAMPLES = 60


def read_tasks(folder: Path, *, items: int, only: list[str] | None = None) -> Iterator[Task]:
    """Every task whose file is in `folder`, its rows in an order drawn with a fixed seed.

    `items` questions of each (times the format's share); examples come from the last rows, which are not asked.
    Prose may also be plain text, as `text_heldout*.txt`, with blank lines between documents.

    Raises:
        BadTask: a name in `only` is no task, nothing is there, or a line is malformed.
    """
    unknown = set(only or ()) - FORMATS.keys()
    if unknown:
        raise BadTask(f"no task {sorted(unknown)}; there are {', '.join(FORMATS)}")
    found = False
    for name in only or FORMATS:
        rows = _rows(Path(folder), FORMATS[name])
        if rows:
            found = True
            yield _task(FORMATS[name], rows, items)
        elif only:
            raise BadTask(f"{folder} has no {name}.jsonl")
    if not found:
        raise BadTask(f"{folder} has none of the task files {', '.join(FORMATS)} (.jsonl)")


def _rows(folder: Path, kind: Format) -> list:
    path = folder / f"{kind.name}.jsonl"
    rows = read_rows(path, kind.row) if path.is_file() else []
    if kind.row is likelihood.Prose:
        for text in sorted(folder.glob("text_heldout*.txt")):
            parts = re.split(r"\n{3,}", text.read_text(encoding="utf-8"))
            rows += [likelihood.Prose(text=part.strip()) for part in parts if part.strip()]
    return rows


def _task(kind: Format, rows: list, items: int) -> Task:
    random.Random(0).shuffle(rows)
    wanted = max(1, round(items * kind.share))
    # However many are asked, the examples stay the same, and some are left.
    apart = min(EXAMPLES, len(rows) // 2) if kind.examples else 0
    asked = rows[: len(rows) - apart]
    questions = (
        replace(question, group=number)
        for number, row in enumerate(asked)
        for question in kind.questions(row)
    )
    examples = [question for row in rows[len(asked) :] for question in kind.questions(row)]
    return Task(kind, list(islice(questions, wanted)), examples)
