"""A finished turn's answer scored under two kinds of KV, and exact KV left behind.

An answer was generated on a lossy lineage. Its tokens are scored twice by the same worker and
in the same way: on that lineage, whose KV is still there, and in the exact namespace. The mean
difference is the turn's drift. Scoring the lineage once more, rather than asking for
log-probabilities with the answer itself, leaves the client's stream alone, costs a prefill of
the answer only, and compares like with like: SGLang's log-probabilities of generated tokens
depend on the request's temperature, those of a prompt do not. The second pass leaves exact KV
of the whole turn behind, on which the session goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from router.drift import probe
from router.drift.probe import Namespace, ProbeFailed, Scored
from router.drift.spare import SpareTime
from router.sessions.base import TurnRecord
from router.sessions.lineage import extra_key
from router.sessions.record import Measurement
from router.settings import Drift, direction
from router.transfer.outcome import Outcome
from router.workers.worker import Worker

T = TypeVar("T")
# Tokens that a template may put after an answer: its end, and a line end.
_CLOSING = 4


@dataclass(frozen=True)
class Audit:
    """One answered turn. `body` and `answer` hold the user's words and are never logged."""

    tenant: str
    session: str
    born: str
    turn: TurnRecord
    outcome: Outcome
    worker: Worker
    body: dict[str, Any]
    answer: dict[str, Any]

    @property
    def direction(self) -> str:
        return direction(self.worker.tier)

    @property
    def lineage(self) -> tuple[str, str, str]:
        """Whose KV is scored: the session's on one model."""
        return self.tenant, self.session, self.turn.model


@dataclass(frozen=True)
class Finding:
    """What was measured, if anything could be, and how many tokens' exact KV is there now.

    `computed` of them were not there before, and took `seconds` of the worker's time.
    """

    measured: Measurement | None
    exact: int
    computed: int
    seconds: float


class Scoring:
    """Both passes over one turn, piece by piece in its worker's spare time."""

    def __init__(
        self, audit: Audit, settings: Drift, spare: SpareTime, tokenize_seconds: float
    ) -> None:
        self._audit = audit
        self._settings = settings
        self._spare = spare
        self._tokenize_seconds = tokenize_seconds

    async def run(self) -> Finding:
        """Raises ProbeFailed."""
        audit, seconds = self._audit, self._tokenize_seconds
        prompt, whole = await self._spared(
            partial(probe.conversation_ids, audit.worker, audit.body, audit.answer, seconds)
        )
        mapped = await self._on_lineage(prompt, whole)
        pieces = await self._exactly(whole, len(whole) if mapped is None else len(prompt))
        measured = None
        if mapped is not None:
            native = [value for scored, _ in pieces for value in scored.logprobs]
            pairs = zip(mapped, native, strict=False)
            measured = Measurement(tuple(one - other for one, other in pairs))
        return Finding(
            measured,
            len(whole),
            sum(end - scored.cached_tokens for scored, end in pieces),
            sum(scored.seconds for scored, _ in pieces),
        )

    async def _on_lineage(self, prompt: list[int], whole: list[int]) -> list[float] | None:
        """Scores the answer on the KV that it was generated on, if both are known for sure."""
        turn, start = self._audit.turn, len(prompt)
        length = turn.completion_tokens
        # The answer's own tokens are not known, only its text: they are taken for those of the
        # conversation if there are as many, and if it is cut where the answer was begun.
        closing = len(whole) - start - length
        if whole[:start] != prompt or not length or not 0 <= closing <= _CLOSING:
            return None
        lineage = Namespace(self._audit.tenant, extra_key(self._audit.session, turn.epoch))
        found: list[float] = []
        for begin, end in self._pieces(start + length, start):
            try:
                scored = await self._score(whole[:end], begin, lineage, again=False)
            except ProbeFailed as failure:
                # An aborted piece may have computed anew what was gone, and a second would
                # take that for the answer's own.
                if failure.reason != "interrupted":
                    raise
                return None
            if scored.cached_tokens < turn.cached_tokens:
                # Less than the turn found has been computed anew since: another answer's KV.
                return None
            found += scored.logprobs
        return found

    async def _exactly(self, whole: list[int], start: int) -> list[tuple[Scored, int]]:
        """Leaves exact KV of `whole` behind, and scores its tokens from `start` on.

        Each piece's result, and up to which token it went.
        """
        exact, done = Namespace(self._audit.tenant), []
        for begin, end in self._pieces(len(whole)):
            if end > start:
                scored = await self._score(whole[:end], max(begin, start), exact)
            else:
                scored = await self._prefill(whole[:end], exact)
            done.append((scored, end))
        return done

    def _pieces(self, length: int, start: int = 0) -> Iterator[tuple[int, int]]:
        size = self._settings.audit_piece_tokens
        return ((at, min(at + size, length)) for at in range(start, length, size))

    async def _score(
        self, ids: list[int], start: int, where: Namespace, again: bool = True
    ) -> Scored:
        worker, priority = self._audit.worker, self._settings.audit_priority
        return await self._spared(partial(probe.score, worker, ids, start, where, priority), again)

    async def _prefill(self, ids: list[int], where: Namespace) -> Scored:
        worker, priority = self._audit.worker, self._settings.audit_priority
        return await self._spared(partial(probe.prefill, worker, ids, where, priority))

    async def _spared(self, piece: Callable[[], Awaitable[T]], again: bool = True) -> T:
        return await self._spare.run(self._audit.worker, piece, again)
