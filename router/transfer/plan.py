"""Decides how a turn's KV is carried over, asks the mapper, and never fails the turn."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from dataclasses import replace
from typing import Any

import httpx
from pydantic import ValidationError

from policies import Decision
from router import log
from router.metrics import Metrics
from router.sessions import lineage
from router.sessions.base import Session
from router.settings import Settings, direction
from router.transfer.client import MapperClient, Namespace, TransferAnswer, TransferRequest
from router.transfer.outcome import Outcome
from router.transfer.pairs import Pairs
from router.workers.breaker import Breaker
from router.workers.worker import Worker

logger = log.get("transfer")
_WORD = re.compile(r"^[a-z][a-z0-9_]{0,39}$")
# How long past its deadline the mapper's answer is still waited for.
_GRACE_SECONDS = 0.05
# How often a source that has read the prompt is asked again for the pages that it is writing,
# and for how many tokens beyond the least that is mapped at all.
_WRITING_TRIES = 10
_WRITING_PAUSE_SECONDS = 0.05
_WORTH_WAITING_TOKENS = 64


class Transfers:
    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings = settings.transfers
        self._budget = settings.drift.budget_nats
        self._tokenize_seconds = settings.timeouts.tokenize_seconds
        self._metrics = metrics
        self._breaker = Breaker(settings.pool.breaker_failures, settings.pool.breaker_seconds)
        self.client = MapperClient(settings.mapper_url) if settings.mapper_url else None
        self.pairs = Pairs(self.client)

    async def close(self) -> None:
        if self.client is not None:
            await self.client.close()

    async def prepare(
        self,
        session: Session | None,
        tenant: str,
        body: dict[str, Any],
        target: Worker,
        decision: Decision,
    ) -> Outcome:
        """The namespace in which `target` answers this turn. Raises nothing but cancellation."""
        if session is None or session.model is None:
            return Outcome("none", "first_turn")
        if session.model == target.model:
            return self._stay(session, target, decision)
        outcome = Outcome(
            "native",
            "policy",
            pair=f"{session.tier}->{target.tier}",
            direction=direction(target.tier),
        )
        if decision.kv == "native":
            return outcome
        drift = max(session.lineage(name).drift for name in (session.model, target.model))
        if drift > self._budget:
            # Mapping again would carry on what has drifted too far already.
            return outcome.natively("drift_budget")
        if self.client is None:
            return outcome.natively("no_mapper")
        if "input_ids" in body:
            return outcome.natively("input_ids")
        if not self._breaker.allows():
            return outcome.natively("mapper_breaker_open")
        started = time.monotonic()
        try:
            outcome = await self._ask(session, tenant, body, target, decision, outcome)
        except _Failed as failure:
            outcome = outcome.natively(failure.reason)
            logger.warning("transfer_failed", reason=failure.reason, pair=outcome.pair)
        outcome = replace(outcome, seconds=time.monotonic() - started)
        self._metrics.transfer_seconds.observe(outcome.seconds)
        return outcome

    def _stay(self, session: Session, target: Worker, decision: Decision) -> Outcome:
        """The same model as before: on its lossy lineage, unless that is given up now."""
        mine = session.lineage(target.model)
        if mine.epoch is None:
            return Outcome("none", "reanchored" if mine.anchored else "same_model")
        outcome = Outcome(
            "continued",
            "same_model",
            epoch=mine.epoch,
            extra_key=lineage.extra_key(session.id, mine.epoch),
            pair=f"{target.tier}->{target.tier}",
        )
        if decision.kv == "native":
            return outcome.natively("policy")
        if mine.drift > self._budget:
            return outcome.natively("drift_budget")
        return outcome

    def possible(self, source: str, target: str) -> bool:
        """Whether a transfer between these models would be tried now."""
        return (
            self.client is not None and self._breaker.allows() and self.pairs.ready(source, target)
        )

    def count(self, outcome: Outcome) -> None:
        """What came of it in the end, once for each turn with something to carry over."""
        if outcome.status in ("none", "continued"):
            return
        self._metrics.transfers.labels(
            outcome.pair, outcome.direction, outcome.status, outcome.reason
        ).inc()

    async def _ask(
        self,
        session: Session,
        tenant: str,
        body: dict[str, Any],
        target: Worker,
        decision: Decision,
        outcome: Outcome,
    ) -> Outcome:
        token_ids = await self._tokenize(body, target)
        # A lossy lineage of the target is continued, so that what it already holds is
        # not mapped a second time; else a new one begins.
        ahead = session.lineage(target.model).lossy
        epoch = ahead.epoch if ahead else new_epoch(session)
        extra_key = lineage.extra_key(session.id, epoch)
        source = session.lineage(session.model)
        tail = self._settings.native_tail
        if decision.kv == "hybrid":
            tail = max(tail or 0, self._settings.hybrid_tail)
        request = TransferRequest(
            session=session.id,
            token_ids=token_ids,
            deadline_ms=self._settings.deadline_ms,
            native_tail=tail,
            min_mapped_tokens=self._settings.min_mapped_tokens,
            source=Namespace(
                model=session.model,
                extra_key=lineage.extra_key(session.id, source.epoch),
                cache_salt=tenant,
            ),
            target=Namespace(model=target.model, extra_key=extra_key, cache_salt=tenant),
        )
        fresh = decision.stage == "cascade"
        answer = await (self._send_once_written(request) if fresh else self._send(request))
        reason = answer.reason if _WORD.match(answer.reason) else "other"
        if answer.status == "unsupported" and answer.field:
            logger.warning("transfer_unsupported", field=answer.field, pair=answer.pair)
        outcome = replace(
            outcome,
            status=answer.status,
            reason=self._metrics.bounded_reason(reason),
            pair=self._metrics.bounded_pair(answer.pair),
        )
        if reason == "too_little":
            # The answer to our own lower limit, not a failing of the mapper's.
            return outcome.natively(reason)
        if answer.status != "applied":
            return outcome
        if answer.mapped_tokens == 0 and answer.reused_tokens == 0:
            # Nothing lossy about it: the exact namespace has it all.
            return replace(
                outcome, status="exact", tokens=answer.tokens, exact_tokens=answer.exact_tokens
            )
        return replace(
            outcome,
            epoch=epoch,
            extra_key=extra_key,
            tokens=answer.tokens,
            exact_tokens=answer.exact_tokens,
            mapped_tokens=answer.mapped_tokens,
            ahead_tokens=ahead.mapped if ahead and ahead.ahead else 0,
            inherited_drift=source.drift,
        )

    async def _tokenize(self, body: dict[str, Any], worker: Worker) -> list[int]:
        try:
            async with asyncio.timeout(self._tokenize_seconds):
                return await worker.tokenize(body, self._tokenize_seconds)
        except (httpx.HTTPError, ValueError, KeyError, TypeError, TimeoutError) as error:
            raise _Failed("tokenize_failed") from error

    async def _send_once_written(self, request: TransferRequest) -> TransferAnswer:
        """For a source that has only just read the prompt: its pages follow in a moment."""
        long_enough = len(request.token_ids) >= request.min_mapped_tokens + _WORTH_WAITING_TOKENS
        for _ in range(_WRITING_TRIES):
            answer = await self._send(request)
            if not long_enough or answer.reason != "no_source_pages":
                break
            await asyncio.sleep(_WRITING_PAUSE_SECONDS)
        return answer

    async def _send(self, request: TransferRequest) -> TransferAnswer:
        seconds = self._settings.deadline_ms / 1000 + _GRACE_SECONDS
        self._breaker.start()
        try:
            async with asyncio.timeout(seconds):
                answer = await self.client.transfer(request, seconds)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise self._failed("deadline") from error
        except httpx.HTTPStatusError as error:
            raise self._failed("mapper_error") from error
        except httpx.HTTPError as error:
            raise self._failed("mapper_unreachable") from error
        except (ValidationError, ValueError) as error:
            raise self._failed("mapper_invalid") from error
        except BaseException:
            self._breaker.abandon()
            raise
        self._breaker.success()
        self._metrics.mapper_up.set(1)
        return answer

    def _failed(self, reason: str) -> _Failed:
        self._breaker.failure()
        self._metrics.mapper_up.set(0)
        return _Failed(reason)


def new_epoch(session: Session) -> lineage.Epoch:
    return f"{session.epoch + 1}-{secrets.token_hex(4)}"


class _Failed(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
