"""A turn's reply: begun at workers, written to the client, and recorded once."""

from __future__ import annotations

import time
from typing import Any

from starlette.types import Send

from policies import Decision, Signals
from router import log
from router.gateway import Gateway
from router.relay.logprobs import Strip
from router.relay.parser import Usage
from router.routing import explain
from router.routing.route import Routed
from router.sessions.base import Session
from router.settings import Tier
from router.transfer.outcome import Outcome
from router.turns import outgoing, overrides, relay
from router.turns.incoming import Incoming, Subject
from router.turns.leg import Leg
from router.turns.recording import Recorder
from router.turns.upstream import BrokenStream

logger = log.get("turn")


class Reply:
    def __init__(self, gateway: Gateway, incoming: Incoming, subject: Subject, routed: Routed):
        self.subject = subject
        # Changes when a cascade escalates, or another tier has to answer.
        self.decision: Decision = routed.decision
        # Every answer that was begun at a worker; the last one is the turn's.
        self.legs: list[Leg] = []
        # What became of a cascade's first part, and what it was judged by.
        self.cascade: str | None = None
        self.signals: Signals | None = None
        # What the cascade has asked for beyond the client's wishes.
        self.strip: Strip | None = None
        self._gateway = gateway
        self._in = incoming
        self._routed = routed
        # The leg at hand, which may not have begun.
        self._leg: Leg | None = None
        self._writer: relay.Writer | None = None
        self._recorder = Recorder(gateway, routed.name)

    @property
    def begun(self) -> bool:
        """Whether the client was sent anything."""
        return self._writer is not None

    @property
    def outcome(self) -> Outcome:
        return self._leg.outcome if self._leg is not None else Outcome("none", "first_turn")

    async def open(self, tier: Tier, session: Session | None, body: dict[str, Any]) -> Leg:
        """A new leg. Raises UpstreamError."""
        self._leg = leg = Leg(self._gateway, self.subject, tier)
        await leg.open(session, self.decision, body)
        self.legs.append(leg)
        return leg

    def go_back_to(self, leg: Leg) -> None:
        self._leg = leg

    async def write(self, send: Send) -> None:
        """Sends the leg's answer to the client, as it comes."""
        upstream = self._leg.upstream
        if self._in.stream:
            ttft = time.monotonic() - self._in.received
            self._gateway.metrics.ttft.labels(self.decision.tier, self.outcome.status).observe(ttft)
        self._writer = writer = relay.Writer(
            send, self._headers(), self._gateway.settings.timeouts.client_write_seconds
        )
        if not self._in.stream:
            await self._complete()
            await writer.whole(self.strip.whole(upstream.body) if self.strip else upstream.body)
            return
        usage = outgoing.wants_usage(self._in.body)
        try:
            await relay.stream(upstream, writer, usage, self._complete, self.strip)
        except BrokenStream as broken:
            logger.warning("stream_broken", worker=upstream.worker.name, reason=broken.reason)
            await self.finish(complete=False, count=False)
            if broken.told:
                await writer.end()
            else:
                await writer.error(broken.message, broken.reason)

    async def cut(self, message: str) -> None:
        """Ends a stream that has begun, with an error as its last event."""
        if self._writer is not None and self._in.stream:
            await self._writer.error(message, "cut")

    async def finish(self, complete: bool, count: bool) -> None:
        """Records what was done; with `count` also what no worker has reported."""
        if self._recorder.finished or not self.legs:
            return
        *earlier, last = self.legs
        for leg in earlier:
            await leg.settle(count=True)
        await last.settle(count)
        await self._recorder.finish(self.subject, self.decision, self.legs, complete)

    def charge(self, tier: Tier, usage: Usage) -> None:
        """What was asked of a worker before the decision."""
        self._recorder.charge(tier, usage)

    async def refused(self) -> None:
        """The turn is not answered; what was asked for it is paid for all the same."""
        await self._recorder.pay(self.subject.incoming.tenant)

    def log_decision(self) -> None:
        routed = self._routed
        entry = explain.entry(self.subject, routed, self.decision, self.legs, self._recorder.spent)
        entry |= {"kv_status": self.outcome.status, "kv_reason": self.outcome.reason}
        if self.cascade is not None:
            entry["cascade"] = self.cascade
        if self.signals is not None:
            entry["signals"] = self.signals.model_dump(exclude_none=True)
        text = {"text": routed.turn.text, "earlier": routed.turn.earlier}
        self._gateway.decisions.write(entry, routed.inputs(), text)

    @property
    def log_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "session": self.subject.identity.id,
            "tier": self.decision.tier,
            "reason": self.decision.reason,
            "kv": self.outcome.status,
            "kv_reason": self.outcome.reason,
        }
        upstream = self._leg.upstream if self._leg is not None else None
        if upstream is not None and (usage := upstream.answer.usage):
            fields |= {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
            }
        return fields

    def explanation(self) -> dict[str, str]:
        """The header that the client has asked for, if it has."""
        if not overrides.explain(self._in):
            return {}
        return {"x-baton-explain": explain.header(self._routed, self.decision)}

    def _headers(self) -> dict[str, str]:
        outcome = self.outcome
        return {
            "x-baton-tier": self.decision.tier,
            "x-baton-reason": self.decision.reason,
            "x-baton-kv": outcome.status,
            "x-baton-kv-tokens": str(outcome.tokens),
            "x-baton-kv-reason": outcome.reason,
            "x-baton-session": self.subject.identity.id.encode(
                "ascii", "backslashreplace"
            ).decode(),
            **({"x-baton-cascade": self.cascade} if self.cascade else {}),
            **self.explanation(),
        }

    async def _complete(self) -> None:
        await self.finish(complete=True, count=False)
