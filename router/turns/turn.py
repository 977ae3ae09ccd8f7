"""A turn: tenant, session, decision, KV, worker, answer, books, session state."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.types import Send

from policies import Cascade, Decision, Signals, Verdict, escalate
from router import log
from router.errors import ApiError
from router.gateway import Gateway
from router.relay.logprobs import Strip
from router.routing import explain
from router.routing.route import Routed, refusal
from router.savings.books import Booking
from router.sessions.base import Session
from router.settings import Tier
from router.transfer.outcome import Outcome
from router.turns import cascade, outgoing, overrides, relay
from router.turns.dispatch import NoWorker
from router.turns.incoming import Incoming, Subject, identify
from router.turns.leg import Leg
from router.turns.recording import Recorder
from router.turns.upstream import BrokenStream
from router.workers.worker import UpstreamError

logger = log.get("turn")


class Turn:
    def __init__(self, gateway: Gateway, incoming: Incoming) -> None:
        self._gateway = gateway
        self._in = incoming
        self._subject: Subject | None = None
        self._routed: Routed | None = None
        self._decision: Decision | None = None
        # Every answer that was begun at a worker, the last one being the turn's.
        self._legs: list[Leg] = []
        # The one at hand, which may not have begun.
        self._leg: Leg | None = None
        # What became of a cascade's first part: kept, escalated, unanswered, rescued.
        self._cascade: str | None = None
        self._signals: Signals | None = None
        self._strip: Strip | None = None
        self._writer: relay.Writer | None = None
        self._recorder = Recorder(gateway)

    async def run(self, send: Send) -> None:
        """Answers on `send`. Raises ApiError as long as nothing was sent."""
        gateway = self._gateway
        forced = overrides.forced_tier(self._in, gateway.pool)
        name = overrides.policy_name(self._in)
        policy = gateway.route.policy(name)
        if gateway.rate is not None:
            await gateway.rate.hit(self._in.tenant)
        self._subject, spent = await asyncio.gather(
            identify(gateway.store, self._in), gateway.ledger.spent(self._in.tenant)
        )
        self._routed = gateway.route.decide(self._subject, name, policy, forced, spent)
        self._decision = decision = self._routed.decision
        if decision.rejection is not None:
            gateway.metrics.rejected.labels(decision.rejection.code).inc()
            raise refusal(decision, self._explanation())
        # Only a turn that was not asked for by model, and has not used up a budget, may be
        # answered by the other tier.
        fallback = "none" if forced or decision.stage == "budget" else policy.fail_open
        session = self._subject.session
        if decision.cascade is not None and cascade.possible(self._in):
            if await self._answer_small(send, decision.cascade):
                return
            if self._legs:
                session = self._taken_back(self._legs[0])
            if fallback != "none":
                fallback = "held" if self._held else "small"
        try:
            await self._answer_by(send, session, fallback)
        except (UpstreamError, ApiError) as error:
            if fallback != "held" or self._writer is not None:
                raise error.error if isinstance(error, UpstreamError) else error from None
            await self._rescue(send)

    async def abandoned(self) -> None:
        """The client has gone. What was done for it is recorded all the same."""
        if self._legs:
            await self._finish(complete=False, count=True)

    async def cut(self, message: str) -> None:
        """Ends a stream that has begun, with an error as its last event."""
        await self.abandoned()
        if self._writer is not None and self._in.stream:
            await self._writer.error(message, "cut")

    def log_decision(self) -> None:
        """Once, when all of the turn is over."""
        if self._routed is not None:
            entry = explain.entry(
                self._subject, self._routed, self._decision, self._legs, self._recorder.spent
            )
            entry |= {"kv_status": self._outcome.status, "kv_reason": self._outcome.reason}
            entry |= {"cascade": self._cascade}
            if self._signals is not None:
                entry["signals"] = self._signals.model_dump(exclude_none=True)
            self._gateway.decisions.write(
                entry,
                self._routed.inputs(),
                {"text": self._routed.turn.text, "earlier": self._routed.turn.earlier},
            )

    @property
    def tier(self) -> Tier | None:
        return self._decision.tier if self._decision is not None else None

    @property
    def log_fields(self) -> dict[str, Any]:
        """Who, where and how, without a word of what was said."""
        session = self._subject.identity.id if self._subject is not None else ""
        fields: dict[str, Any] = {"tenant": self._in.tenant, "session": session}
        if self._decision is not None:
            fields |= {"tier": self._decision.tier, "reason": self._decision.reason}
        outcome = self._outcome
        fields |= {"kv": outcome.status, "kv_reason": outcome.reason}
        upstream = self._leg.upstream if self._leg is not None else None
        if upstream is not None and (usage := upstream.answer.usage):
            fields |= {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
            }
        return fields

    @property
    def _outcome(self) -> Outcome:
        return self._leg.outcome if self._leg is not None else Outcome("none", "first_turn")

    # Answering

    async def _answer_by(self, send: Send, session: Session | None, fallback: str) -> None:
        """By the decision's tier, else by `fallback`. Raises UpstreamError, ApiError."""
        gateway = self._gateway
        tiers = [self._decision.tier]
        if fallback != self._decision.tier and fallback in gateway.pool.models:
            tiers.append(fallback)
        failure: UpstreamError | None = None
        for tier in tiers:
            if tier not in gateway.gates:
                failure = NoWorker(tier)
                continue
            if failure is not None:
                self._decision = self._decision.model_copy(
                    update={"tier": tier, "stage": "failover", "reason": "fail_open"}
                )
            async with gateway.gates[tier].enter(self._in.tenant):
                try:
                    leg = await self._open(tier, session, self._in.clean)
                except UpstreamError as error:
                    failure = failure or error
                    if not error.elsewhere:
                        break
                    continue
                try:
                    await self._answer(send)
                finally:
                    await leg.close()
                return
        raise failure

    async def _open(self, tier: Tier, session: Session | None, body: dict[str, Any]) -> Leg:
        self._leg = leg = Leg(self._gateway, self._subject, tier)
        await leg.open(session, self._decision, body)
        self._legs.append(leg)
        return leg

    async def _answer(self, send: Send) -> None:
        upstream = self._leg.upstream
        if self._in.stream:
            ttft = time.monotonic() - self._in.received
            self._gateway.metrics.ttft.labels(self._decision.tier, self._outcome.status).observe(
                ttft
            )
        self._writer = writer = relay.Writer(
            send, self._response_headers(), self._gateway.settings.timeouts.client_write_seconds
        )
        if not self._in.stream:
            await self._complete()
            await writer.whole(self._strip.whole(upstream.body) if self._strip else upstream.body)
            return
        usage = outgoing.wants_usage(self._in.body)
        try:
            await relay.stream(upstream, writer, usage, self._complete, self._strip)
        except BrokenStream as broken:
            logger.warning("stream_broken", worker=upstream.worker.name, reason=broken.reason)
            await self._finish(complete=False, count=False)
            if broken.told:
                await writer.end()
            else:
                await writer.error(broken.message, broken.reason)

    def _response_headers(self) -> dict[str, str]:
        return {
            "x-baton-tier": self._decision.tier,
            "x-baton-reason": self._decision.reason,
            "x-baton-kv": self._outcome.status,
            "x-baton-kv-tokens": str(self._outcome.tokens),
            "x-baton-kv-reason": self._outcome.reason,
            "x-baton-session": _header(self._subject.identity.id),
            **({"x-baton-cascade": self._cascade} if self._cascade else {}),
            **self._explanation(),
        }

    def _explanation(self) -> dict[str, str]:
        if not overrides.explain(self._in):
            return {}
        return {"x-baton-explain": explain.header(self._routed, self._decision)}

    # A cascade

    async def _answer_small(self, send: Send, plan: Cascade) -> bool:
        """The small tier's answer, if it will do; else the decision is now to escalate."""
        gateway, started = self._gateway, time.monotonic()
        async with gateway.gates["small"].enter(self._in.tenant):
            try:
                leg = await self._open(
                    "small", self._subject.session, cascade.asking(self._in.clean)
                )
            except UpstreamError as error:
                if not error.elsewhere:
                    raise error.error from None
                verdict = Verdict(escalate=True, reason="unanswered")
            else:
                try:
                    verdict = await self._judge(leg, plan)
                    if not verdict.escalate:
                        first_event = leg.upstream.opened + leg.upstream.first_event_seconds
                        self._count_cascade("kept", verdict, time.monotonic() - first_event)
                        await self._answer(send)
                        return True
                finally:
                    # Ends what the worker still does for an answer that nobody wants.
                    await leg.close()
        outcome = "unanswered" if verdict.reason == "unanswered" else "escalated"
        self._count_cascade(outcome, verdict, time.monotonic() - started)
        self._strip = None
        self._decision = escalate(self._decision, verdict)
        return False

    async def _judge(self, leg: Leg, plan: Cascade) -> Verdict:
        self._strip = Strip.of(self._in.clean)
        try:
            await cascade.hold(leg.upstream, plan)
        except BrokenStream as broken:
            logger.warning("stream_broken", worker=leg.worker.name, reason=broken.reason)
            return Verdict(escalate=True, reason="unanswered")
        right = await cascade.check_itself(self._in, leg) if plan.self_check else None
        self._signals = cascade.measure(leg.upstream, plan, right)
        return plan.judge(self._signals)

    def _taken_back(self, leg: Leg) -> Session | None:
        usage = leg.upstream.answer.usage
        turn = self._gateway.drift.write_down(leg.worker, leg.outcome, usage, Booking())
        return cascade.taken_back(self._subject, leg, turn)

    @property
    def _held(self) -> bool:
        """Whether the small tier's answer was held back whole."""
        return bool(self._legs) and self._legs[0].upstream.answer.done

    async def _rescue(self, send: Send) -> None:
        """The large tier cannot answer: the small tier's answer is better than none."""
        self._leg, self._cascade = self._legs[0], "rescued"
        self._gateway.metrics.cascades.labels("rescued", "escalation_failed").inc()
        self._strip = Strip.of(self._in.clean)
        self._decision = self._decision.model_copy(
            update={"tier": "small", "stage": "cascade", "reason": "escalation_failed"}
        )
        await self._answer(send)

    def _count_cascade(self, outcome: str, verdict: Verdict, seconds: float) -> None:
        self._cascade = outcome
        self._gateway.metrics.cascades.labels(outcome, verdict.reason).inc()
        self._gateway.metrics.cascade_wait.labels(outcome).observe(seconds)

    # Recording

    async def _complete(self) -> None:
        await self._finish(complete=True, count=False)

    async def _finish(self, complete: bool, count: bool) -> None:
        if self._recorder.finished:
            return
        *earlier, last = self._legs
        for leg in earlier:
            await leg.settle(count=True)
        await last.settle(count)
        await self._recorder.finish(self._subject, self._decision, self._legs, complete)


def _header(value: str) -> str:
    return value.encode("ascii", "backslashreplace").decode()
