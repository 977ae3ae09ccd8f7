"""Decides how a turn's KV is carried over, asks the mapper, and never fails the turn."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace
from typing import Any

import httpx
from pydantic import ValidationError

from policies import Decision
from router import log
from router.metrics import Metrics
from router.sessions.base import Session
from router.settings import Settings
from router.transfer.client import MapperClient, Namespace, TransferAnswer, TransferRequest
from router.transfer.outcome import Outcome
from router.workers.breaker import Breaker
from router.workers.worker import Worker

logger = log.get("transfer")
_WORD = re.compile(r"^[a-z][a-z0-9_]{0,39}$")
# How long past its deadline the mapper's answer is still waited for.
_GRACE_SECONDS = 0.05


class Transfers:
    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings = settings.transfers
        self._tokenize_seconds = settings.timeouts.tokenize_seconds
        self._metrics = metrics
        self._breaker = Breaker(settings.pool.breaker_failures, settings.pool.breaker_seconds)
        self.client = MapperClient(settings.mapper_url) if settings.mapper_url else None

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
            lineage = session.lineages.get(target.model)
            if lineage is None:
                return Outcome("none", "same_model")
            return Outcome("continued", "same_model", extra_key=lineage)

        direction = "up" if target.tier == "large" else "down"
        outcome = Outcome(
            "native",
            "policy",
            pair=f"{session.tier}->{target.tier}",
            direction=direction,
            epoch=session.epoch,
        )
        if decision.kv == "native":
            return outcome
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
        lineage = session.lineages.get(target.model)
        epoch = session.epoch if lineage is not None else session.epoch + 1
        extra_key = lineage or f"lossy:{session.id}:{epoch}"
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
                extra_key=session.lineages.get(session.model),
                cache_salt=tenant,
            ),
            target=Namespace(model=target.model, extra_key=extra_key, cache_salt=tenant),
        )
        answer = await self._send(request)
        reason = answer.reason if _WORD.match(answer.reason) else "other"
        if answer.status == "unsupported" and answer.field:
            logger.warning("transfer_unsupported", field=answer.field, pair=answer.pair)
        outcome = replace(
            outcome,
            status=answer.status,
            reason=self._metrics.bounded_reason(reason),
            pair=self._metrics.bounded_pair(answer.pair),
            epoch=epoch,
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
            extra_key=extra_key,
            tokens=answer.tokens,
            exact_tokens=answer.exact_tokens,
            mapped_tokens=answer.mapped_tokens,
        )

    async def _tokenize(self, body: dict[str, Any], worker: Worker) -> list[int]:
        try:
            async with asyncio.timeout(self._tokenize_seconds):
                return await worker.tokenize(body, self._tokenize_seconds)
        except (httpx.HTTPError, ValueError, KeyError, TypeError, TimeoutError) as error:
            raise _Failed("tokenize_failed") from error

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


class _Failed(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
