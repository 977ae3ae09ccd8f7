"""A turn: tenant, session, decision, KV, worker, answer, books, session state."""

from __future__ import annotations

import time
from typing import Any

from starlette.types import Send

from policies import Decision, SessionView
from policies import Turn as PolicyTurn
from router import log
from router.errors import ApiError
from router.gateway import Gateway
from router.relay.parser import Usage
from router.settings import Tier
from router.transfer.outcome import Outcome
from router.turns import outgoing, overrides, relay
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
        self._decision: Decision | None = None
        self._leg: Leg | None = None
        self._writer: relay.Writer | None = None
        self._recorder = Recorder(gateway)

    async def run(self, send: Send) -> None:
        """Answers on `send`. Raises ApiError as long as nothing was sent."""
        gateway = self._gateway
        forced = overrides.forced_tier(self._in, gateway.pool)
        if gateway.rate is not None:
            await gateway.rate.hit(self._in.tenant)
        self._subject = await identify(gateway.store, self._in)
        self._decision = self._decide(forced)
        # Only a turn that was not asked for by model may be answered by the other tier.
        fallback = "none" if forced else self._policy.fail_open
        tiers = [self._decision.tier]
        if fallback not in ("none", self._decision.tier) and fallback in gateway.pool.models:
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
                self._leg = leg = Leg(gateway, self._subject, tier)
                try:
                    await leg.open(self._subject.session, self._decision, self._in.clean)
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
        raise failure.error

    async def abandoned(self) -> None:
        """The client has gone. What was done for it is recorded all the same."""
        upstream = self._leg.upstream if self._leg is not None else None
        if upstream is None or self._recorder.finished:
            return
        usage = upstream.answer.usage
        basis = "reported"
        if usage is None:
            basis = "counted"
            usage = Usage(await self._leg.count_prompt(), upstream.answer.content_events)
        await self._finish(usage, basis, complete=False)

    async def cut(self, message: str) -> None:
        """Ends a stream that has begun, with an error as its last event."""
        await self.abandoned()
        if self._writer is not None and self._in.stream:
            await self._writer.error(message, "cut")

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

    # Deciding

    @property
    def _policy(self) -> Any:
        name = self._in.headers.get("x-baton-policy") or "default"
        policy = self._gateway.policies.get(name)
        if policy is None:
            raise ApiError(400, "There is no policy of that name.", param="x-baton-policy")
        if not self._in.principal.may_use_policy(name):
            raise ApiError(403, "This key may not use that policy.", param="x-baton-policy")
        return policy

    def _decide(self, forced: tuple[Tier, str] | None) -> Decision:
        policy = self._policy
        if forced is not None:
            tier, how = forced
            return Decision(tier=tier, stage="forced", reason=f"forced_by_{how}")
        session = self._subject.session
        messages, body = self._in.messages, self._in.clean
        answers = sum(message.get("role") == "assistant" for message in messages)
        last = next((m for m in reversed(messages) if m.get("role") == "user"), {})
        turn = PolicyTurn(
            # A conversation that began elsewhere is as old as its history says.
            number=1 + (session.turns if session else answers),
            messages=len(messages),
            prompt_chars=sum(len(_plain(m.get("content"))) for m in messages),
            has_tools=bool(body.get("tools")),
            has_schema=bool(body.get("response_format")),
            text=_plain(last.get("content")),
        )
        queued = {tier: gate.queued for tier, gate in self._gateway.gates.items()}
        view = session.view() if session else SessionView()
        return policy.decide(turn, view, self._gateway.pool.economics(queued))

    # Answering

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
            await writer.whole(upstream.body)
            return
        try:
            await relay.stream(
                upstream, writer, outgoing.wants_usage(self._in.body), self._complete
            )
        except BrokenStream as broken:
            logger.warning("stream_broken", worker=upstream.worker.name, reason=broken.reason)
            await self._finish(upstream.answer.usage, "reported", complete=False)
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
        }

    # Recording

    async def _complete(self) -> None:
        await self._finish(self._leg.upstream.answer.usage, "reported", complete=True)

    async def _finish(self, usage: Usage | None, basis: str, complete: bool) -> None:
        await self._recorder.finish(
            self._subject, self._decision, self._leg, usage, basis, complete
        )


def _plain(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return ""


def _header(value: str) -> str:
    return value.encode("ascii", "backslashreplace").decode()
