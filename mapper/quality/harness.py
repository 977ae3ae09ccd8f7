"""lm-evaluation-harness on mapped KV: its own tasks and prompts, answered on top of a map.

Optional: `pip install lm-eval` brings in `datasets` and what it needs (pyarrow, pandas and
more), so it is no requirement of Baton's own. Tasks whose data is local need no hub: give
their YAML files' folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mapper.errors import BadTask, MissingExtra
from mapper.quality.reader import Reader
from mapper.quality.scoring import Continuation, Likelihood, score, speak

# Documents are scored in pieces of this many tokens, each with the piece before it as context.
ROLLING_TOKENS = 512
_ANSWER_TOKENS = 256


class Prompted:
    """Scores and answers on top of the only arm of `reader`, or (`source`) of the source alone.

    The last `tail` tokens of a context are the model's own, and so is all that follows it. A
    context that is too long for the caches loses its beginning.
    """

    def __init__(
        self,
        reader: Reader,
        tokenizer: PreTrainedTokenizerBase,
        tail: int,
        *,
        source: bool = False,
    ) -> None:
        self.reader, self.tokenizer, self.tail = reader, tokenizer, tail
        self.batch = reader.source if source else reader.batch
        self.requests = self.unmapped = 0

    def likelihood(self, context: str, continuation: str) -> Likelihood:
        """Of the continuation's tokens; blanks between the two belong to the continuation."""
        blanks = len(context) - len(context.rstrip())
        if blanks:
            context, continuation = context[:-blanks], context[-blanks:] + continuation
        ids = self.tokenizer.encode(context) if context else []
        whole = self.tokenizer.encode(context + continuation)
        return self._score(ids or self._first(), whole[len(ids) :])

    def rolling(self, text: str) -> float:
        """Log-likelihood of a whole text: each piece on top of the mapped KV of the one before."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        pieces = [ids[at : at + ROLLING_TOKENS] for at in range(0, len(ids), ROLLING_TOKENS)]
        contexts = [self._first(), *pieces[:-1]]
        return sum(
            self._score(context, piece).logprob
            for context, piece in zip(contexts, pieces, strict=False)
        )

    def answer(self, context: str, until: Sequence[str], limit: int) -> str:
        """The greedy answer up to the first of `until`, of at most half of the caches' tokens."""
        limit = min(limit, self.batch.capacity // 2)
        ids = self.tokenizer.encode(context) or self._first()
        start, tail = self._load(ids, limit)
        (spoken,) = speak(self.batch, self.tokenizer, tail, start, limit=limit, stops=tuple(until))
        self.reader.keep(start)
        return spoken.text

    def _score(self, context: list[int], continuation: list[int]) -> Likelihood:
        start, tail = self._load(context, len(continuation))
        one = Continuation(torch.tensor(continuation, dtype=torch.long))
        found = score(self.batch, tail, start, [one])[0][0]
        self.reader.keep(start)
        return found

    def _load(self, context: list[int], more: int) -> tuple[int, torch.Tensor]:
        """Loads all of the context but its tail; where the tail starts, and the tail."""
        ids = torch.tensor(context[-(self.batch.capacity - more) :])
        start = max(len(ids) - self.tail, min(1, len(ids) - 1))
        if start:
            self.reader.load(ids[:start])
        # Position 0 is never mapped.
        self.requests, self.unmapped = self.requests + 1, self.unmapped + (start <= 1)
        return start, ids[start:]

    def _first(self) -> list[int]:
        """What stands before a text that has no context."""
        first = self.tokenizer.bos_token_id
        return [self.tokenizer.eos_token_id if first is None else first]


def as_lm(prompted: Prompted) -> Any:
    """`prompted` as a model of the harness, for `lm_eval.simple_evaluate(model=...)`.

    Raises:
        MissingExtra: lm-evaluation-harness is not installed.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError as error:
        raise _missing(error) from error

    class MappedLM(LM):
        def loglikelihood(self, requests, disable_tqdm: bool = False):
            found = [prompted.likelihood(*request.args) for request in requests]
            return [(one.logprob, one.greedy) for one in found]

        def loglikelihood_rolling(self, requests, disable_tqdm: bool = False):
            return [prompted.rolling(*request.args) for request in requests]

        def generate_until(self, requests, disable_tqdm: bool = False):
            found = []
            for context, options in (request.args for request in requests):
                found.append(prompted.answer(context, *_limits(options)))
            return found

    return MappedLM()


def manager(tasks: Sequence[str], folder: Path | None) -> Any:
    """The harness's task manager; None where no tasks are wanted.

    Args:
        tasks: names that the harness knows, or that YAML files in `folder` define.

    Raises:
        MissingExtra: lm-evaluation-harness or what it needs is not installed.
        BadTask: the harness does not know a task.
    """
    if not tasks:
        return None
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise _missing(error) from error
    found = TaskManager(include_path=None if folder is None else str(folder))
    unknown = [task for task in tasks if task not in found.all_tasks]
    if unknown:
        raise BadTask(f"lm-evaluation-harness has no task {unknown}")
    return found


def evaluate(
    models: Mapping[str, Prompted], tasks: Sequence[str], manager: Any, limit: int
) -> dict[str, dict[str, Any]]:
    """Results of the harness by model and task, on the first `limit` items of each task.

    Beside the tasks stands the share of requests whose contexts were so short that nothing was mapped: with a native
    tail, short prompts say nothing about a map.
    """
    from lm_eval import simple_evaluate

    results = {}
    for name, prompted in models.items():
        found = simple_evaluate(
            as_lm(prompted), tasks=list(tasks), limit=limit, task_manager=manager,
            bootstrap_iters=0, log_samples=False,
        )  # fmt: skip
        results[name] = {
            task: {key: value for key, value in one.items() if isinstance(value, float)}
            for task, one in found["results"].items()
        } | {"all requests": {"nothing mapped": prompted.unmapped / max(prompted.requests, 1)}}
    return results


def _missing(error: ImportError) -> MissingExtra:
    return MissingExtra(f"lm-evaluation-harness: {error}; `pip install lm-eval`")


def _limits(options: dict[str, Any]) -> tuple[Sequence[str], int]:
    until = options.get("until") or ()
    until = (until,) if isinstance(until, str) else until
    return until, int(options.get("max_gen_toks", _ANSWER_TOKENS))
