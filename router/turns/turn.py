"""A turn: tenant, session, decision, and a reply by the tier that was decided on, or another."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Send

from policies import Policy
from router.errors import ApiError
from router.gateway import Gateway
from router.routing.facts import questions
from router.routing.likelihood import Likelihood, likelihood
from router.routing.route import refusal
from router.sessions.base import Session
from router.settings import Tier
from router.turns import cascade, overrides
from router.turns.dispatch import NoWorker
from router.turns.incoming import Incoming, Subject, identify
from router.turns.reply import Reply
from router.workers.worker import UpstreamError


class Turn:
    def __init__(self, gateway: Gateway, incoming: Incoming) -> None:
        self._gateway = gateway
        self._in = incoming
        self._reply: Reply | None = None

    async def run(self, send: Send) -> None:
        """Answers on `send`. Raises ApiError as long as nothing was sent."""
        gateway = self._gateway
        forced = overrides.forced_tier(self._in, gateway.pool)
        name = overrides.policy_name(self._in)
        policy = gateway.route.policy(name)
        if gateway.rate is not None:
            await gateway.rate.hit(self._in.tenant)
        subject, spent = await asyncio.gather(
            identify(gateway.store, self._in), gateway.ledger.spent(self._in.tenant)
        )
        likely = await self._likelihood(subject, policy)
        routed = gateway.route.decide(subject, name, policy, forced, spent, likely.logprob)
        self._reply = reply = Reply(gateway, self._in, subject, routed)
        if likely.usage is not None:
            reply.charge("small", likely.usage)
        decision = reply.decision
        if decision.rejection is not None:
            gateway.metrics.rejected.labels(decision.rejection.code).inc()
            await reply.refused()
            raise refusal(decision, reply.explanation())
        # Only a turn that was not asked for by model, and has not used up a budget, may be
        # answered by the other tier.
        may_fail_over = not forced and decision.stage != "budget" and policy.fail_open != "none"
        if decision.cascade is None or not cascade.possible(self._in):
            fallback = policy.fail_open if may_fail_over else None
            await self._answer_by(send, subject.session, fallback)
            return
        first = cascade.SmallFirst(gateway, self._in, reply)
        if await first.answered(send):
            return
        fallback = "small" if may_fail_over and not first.held else None
        try:
            await self._answer_by(send, first.session(), fallback)
        except ApiError:
            if reply.begun or not (may_fail_over and first.held):
                raise
            await first.rescue(send)

    async def abandoned(self) -> None:
        """The client has gone. What was done for it is recorded all the same."""
        if self._reply is not None:
            await self._reply.finish(complete=False, count=True)

    async def cut(self, message: str) -> None:
        """Ends a stream that has begun, with an error as its last event."""
        await self.abandoned()
        if self._reply is not None:
            await self._reply.cut(message)

    def log_decision(self) -> None:
        """Once, when all of the turn is over."""
        if self._reply is not None:
            self._reply.log_decision()

    @property
    def tier(self) -> Tier | None:
        return self._reply.decision.tier if self._reply is not None else None

    @property
    def log_fields(self) -> dict[str, Any]:
        """Who, where and how, without a word of what was said."""
        fields = self._reply.log_fields if self._reply is not None else {}
        return {"tenant": self._in.tenant, **fields}

    async def _answer_by(self, send: Send, session: Session | None, fallback: Tier | None) -> None:
        """By the decision's tier, else by `fallback`. Raises ApiError."""
        gateway, reply = self._gateway, self._reply
        tiers = [reply.decision.tier]
        if fallback not in (None, *tiers) and fallback in gateway.pool.models:
            tiers.append(fallback)
        failure: UpstreamError | None = None
        for tier in tiers:
            if tier not in gateway.gates:
                failure = NoWorker(tier)
                continue
            if failure is not None:
                reply.decision = reply.decision.model_copy(
                    update={"tier": tier, "stage": "failover", "reason": "fail_open"}
                )
            async with gateway.gates[tier].enter(self._in.tenant):
                try:
                    leg = await reply.open(tier, session, self._in.clean)
                except UpstreamError as error:
                    failure = failure or error
                    if not error.elsewhere:
                        break
                    continue
                try:
                    await reply.write(send)
                finally:
                    await leg.close()
                return
        raise failure.error

    async def _likelihood(self, subject: Subject, policy: Policy) -> Likelihood:
        if not policy.needs_prompt_logprob:
            return Likelihood()
        worker = self._gateway.pool.pick("small", subject.affinity)
        if worker is None:
            return Likelihood()
        seconds = self._gateway.settings.timeouts.tokenize_seconds
        text = (questions(self._in.messages) or [""])[-1]
        return await likelihood(worker, text, self._in.tenant, seconds)
