"""A turn: tenant, session, decision, KV, worker, answer, books, session state."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
from starlette.types import Send

from policies import Decision, SessionView
from policies import Turn as PolicyTurn
from router import log
from router.auth.keys import Principal
from router.errors import ApiError
from router.gateway import Gateway
from router.relay.parser import Usage
from router.savings.books import Booking
from router.sessions import identity
from router.sessions.base import Session, StoreDown
from router.sessions.identity import Identity
from router.settings import ALIASES, Tier
from router.transfer.outcome import Outcome
from router.turns import outgoing, relay
from router.turns.dispatch import NoWorker, Request
from router.turns.upstream import LOAD_FAILED, BrokenStream, Upstream
from router.workers.worker import CHAT, UpstreamError, Worker

logger = log.get("turn")
_LOAD_RETRIES = 2


@dataclass(frozen=True)
class Incoming:
    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]
    principal: Principal
    request_id: str
    received: float


class Turn:
    def __init__(self, gateway: Gateway, incoming: Incoming) -> None:
        self._gateway = gateway
        self._in = incoming
        self._tenant = incoming.principal.tenant
        self._body = outgoing.normalise(incoming.body)
        self._stream = self._body.get("stream") is True
        self._messages: list[dict[str, Any]] = self._body.get("messages") or []
        self._identity = Identity("", None, None)
        self._store_down = False
        self._outcome = Outcome("none", "first_turn")
        self._decision: Decision | None = None
        self._worker: Worker | None = None
        self._upstream: Upstream | None = None
        self._writer: relay.Writer | None = None
        self._finished = False

    async def run(self, send: Send) -> None:
        """Answers on `send`. Raises ApiError as long as nothing was sent."""
        gateway = self._gateway
        forced = self._forced_tier()
        if gateway.rate is not None:
            await gateway.rate.hit(self._tenant)
        await self._identify()
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
            async with gateway.gates[tier].enter(self._tenant):
                try:
                    await self._open(tier)
                except UpstreamError as error:
                    failure = failure or error
                    if not error.elsewhere:
                        break
                    continue
                try:
                    await self._answer(send)
                finally:
                    await self._upstream.close()
                return
        raise failure.error

    async def abandoned(self) -> None:
        """The client has gone. What was done for it is recorded all the same."""
        upstream = self._upstream
        if upstream is None or self._finished:
            return
        usage = upstream.answer.usage
        basis = "reported"
        if usage is None:
            basis = "counted"
            usage = Usage(await self._count_prompt(), upstream.answer.content_events)
        await self._finish(usage, basis, complete=False)

    async def cut(self, message: str) -> None:
        """Ends a stream that has begun, with an error as its last event."""
        await self.abandoned()
        if self._writer is not None and self._stream:
            await self._writer.error(message, "cut")

    @property
    def tier(self) -> Tier | None:
        return self._decision.tier if self._decision is not None else None

    @property
    def log_fields(self) -> dict[str, Any]:
        """Who, where and how, without a word of what was said."""
        fields: dict[str, Any] = {"tenant": self._tenant, "session": self._identity.id}
        if self._decision is not None:
            fields |= {"tier": self._decision.tier, "reason": self._decision.reason}
        fields |= {"kv": self._outcome.status, "kv_reason": self._outcome.reason}
        if self._upstream is not None and (usage := self._upstream.answer.usage):
            fields |= {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
            }
        return fields

    # Deciding

    def _forced_tier(self) -> tuple[Tier, str] | None:
        """A tier asked for by header, alias or model name goes before any policy."""
        pool, principal = self._gateway.pool, self._in.principal
        model = self._body["model"]
        if model not in ALIASES and pool.tier_of(model) is None:
            raise ApiError(
                404, f"The model {model!r} does not exist.", param="model", code="model_not_found"
            )
        if not principal.may_use_model(model):
            raise ApiError(
                403, f"This key may not use the model {model!r}.",
                param="model", code="model_not_allowed",
            )  # fmt: skip
        header = self._in.headers.get("x-baton-tier")
        if header:
            if header not in ("small", "large"):
                raise ApiError(400, "x-baton-tier is small or large.", param="x-baton-tier")
            if not (
                principal.may_use_model(header)
                or principal.may_use_model(pool.models.get(header, header))
            ):
                raise ApiError(
                    403, f"This key may not use the {header} tier.", code="model_not_allowed"
                )
            return header, "header"
        if model in ("small", "large"):
            return model, "alias"
        if model != "auto":
            return pool.tier_of(model), "model"
        return None

    async def _identify(self) -> None:
        name = identity.named(self._in.headers, self._in.body)
        try:
            self._identity = await identity.identify(
                self._gateway.store, self._tenant, name, self._messages
            )
        except StoreDown:
            self._store_down = True
            self._identity = Identity(name or identity.new_id(), None, None)

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
        session = self._identity.session
        answers = sum(message.get("role") == "assistant" for message in self._messages)
        last = next((m for m in reversed(self._messages) if m.get("role") == "user"), {})
        turn = PolicyTurn(
            # A conversation that began elsewhere is as old as its history says.
            number=1 + (session.turns if session else answers),
            messages=len(self._messages),
            prompt_chars=sum(len(_plain(m.get("content"))) for m in self._messages),
            has_tools=bool(self._body.get("tools")),
            has_schema=bool(self._body.get("response_format")),
            text=_plain(last.get("content")),
        )
        queued = {tier: gate.queued for tier, gate in self._gateway.gates.items()}
        view = session.view() if session else SessionView()
        return policy.decide(turn, view, self._gateway.pool.economics(queued))

    # Answering

    async def _open(self, tier: Tier) -> None:
        """Carries KV over and gets the answer started. Raises UpstreamError."""
        gateway = self._gateway
        worker = gateway.pool.pick(tier, self._affinity)
        if worker is None:
            raise NoWorker(tier)
        self._outcome = await self._carry_over(worker)
        gateway.metrics.turns.labels(tier, self._decision.reason).inc()
        try:
            self._upstream = await self._dispatch(tier, worker)
        finally:
            gateway.transfers.count(self._outcome)
        self._worker = self._upstream.worker

    async def _dispatch(self, tier: Tier, worker: Worker) -> Upstream:
        for attempt in range(1 + _LOAD_RETRIES):
            try:
                return await self._gateway.dispatcher.open(tier, worker, self._request(worker))
            except UpstreamError as error:
                if error.reason != LOAD_FAILED or attempt == _LOAD_RETRIES:
                    raise
            # Pages could not be restored. They are gone by now, and exact KV will do;
            # damaged exact pages are found, and gone, at the attempt after.
            self._outcome = self._outcome.natively(LOAD_FAILED)

    @property
    def _affinity(self) -> str:
        return f"{self._tenant}\0{self._identity.id}"

    async def _carry_over(self, worker: Worker) -> Outcome:
        gateway = self._gateway
        if self._store_down:
            return Outcome("native", "session_store_down", pair="unknown", direction="unknown")
        if self._in.path != CHAT:
            return Outcome("none", "no_conversation")
        return await gateway.transfers.prepare(
            self._identity.session, self._tenant, self._body, worker, self._decision
        )

    def _request(self, worker: Worker) -> Request:
        body = outgoing.for_worker(self._body, worker.model, self._tenant, self._outcome.extra_key)
        return Request(
            path=self._in.path,
            body=orjson.dumps(body),
            headers=outgoing.headers(self._in.headers, self._in.request_id),
            stream=self._stream,
            affinity=self._affinity,
        )

    async def _answer(self, send: Send) -> None:
        if self._stream:
            ttft = time.monotonic() - self._in.received
            self._gateway.metrics.ttft.labels(self._decision.tier, self._outcome.status).observe(
                ttft
            )
        self._writer = writer = relay.Writer(
            send, self._response_headers(), self._gateway.settings.timeouts.client_write_seconds
        )
        if not self._stream:
            await self._complete()
            await writer.whole(self._upstream.body)
            return
        try:
            await relay.stream(
                self._upstream, writer, outgoing.wants_usage(self._in.body), self._complete
            )
        except BrokenStream as broken:
            logger.warning("stream_broken", worker=self._worker.name, reason=broken.reason)
            await self._finish(self._upstream.answer.usage, "reported", complete=False)
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
            "x-baton-session": _header(self._identity.id),
        }

    # Recording

    async def _complete(self) -> None:
        await self._finish(self._upstream.answer.usage, "reported", complete=True)

    async def _finish(self, usage: Usage | None, basis: str, complete: bool) -> None:
        """Books and session state, once; before the client can send its next turn."""
        if self._finished:
            return
        self._finished = True
        booking = Booking()
        metrics, tier = self._gateway.metrics, self._decision.tier
        if usage is not None:
            metrics.tokens.labels(tier, "prompt", basis).inc(usage.prompt_tokens)
            metrics.tokens.labels(tier, "cached", basis).inc(usage.cached_tokens or 0)
            metrics.tokens.labels(tier, "completion", basis).inc(usage.completion_tokens)
            if basis == "reported":
                booking = self._gateway.books.book(self._worker, self._outcome, usage)
                self._observe_prefill(usage)
        if self._store_down:
            return
        self._count_switch()
        try:
            await self._gateway.store.update(
                self._tenant,
                self._identity.id,
                lambda session: self._advance(session, usage, booking, complete),
                self._digests() if complete else [],
            )
        except StoreDown:
            logger.warning("session_not_saved", session=self._identity.id)

    def _observe_prefill(self, usage: Usage) -> None:
        upstream = self._upstream
        # Only time to a first event is a prefill, and only of a worker with nothing else
        # to do; restoring transferred pages takes time of its own.
        if self._stream and upstream.alone and self._outcome.extra_key is None:
            self._gateway.books.observe(self._worker, usage, upstream.first_event_seconds)

    def _count_switch(self) -> None:
        direction = self._switch()
        if direction is not None:
            self._gateway.metrics.switches.labels(direction, self._decision.reason).inc()

    def _switch(self) -> str | None:
        session = self._identity.session
        if session is None or session.tier in (None, self._decision.tier):
            return None
        return "up" if self._decision.tier == "large" else "down"

    def _advance(
        self, session: Session, usage: Usage | None, booking: Booking, complete: bool
    ) -> None:
        before = self._identity.session
        if before is not None and session.turns == 0:
            # The first turn of a branch, or of a session that has expired since.
            session.turns, session.tier, session.model = before.turns, before.tier, before.model
        direction = self._switch()
        session.switches_up += direction == "up"
        session.switches_down += direction == "down"
        session.turns += 1
        session.tier = self._decision.tier
        session.model = self._worker.model
        session.lineages[self._worker.model] = self._outcome.extra_key
        session.epoch = max(session.epoch, self._outcome.epoch)
        session.mapped_tokens += booking.tokens
        session.seconds_saved += max(0.0, booking.seconds or 0.0)
        session.seconds_lost += max(0.0, -(booking.seconds or 0.0))
        if usage is not None:
            session.prompt_tokens += usage.prompt_tokens
            session.completion_tokens += usage.completion_tokens
        digests = self._digests()
        if complete and digests:
            session.head = digests[0]

    def _digests(self) -> list[str]:
        """Where the conversation stands after each of the answers."""
        if self._identity.digest is None:
            return []
        choices = self._upstream.answer.choices
        return [
            identity.conversation([choices[index].message()], self._identity.digest)
            for index in sorted(choices)
        ]

    async def _count_prompt(self) -> int:
        if self._in.path != CHAT:
            return 0
        seconds = self._gateway.settings.timeouts.tokenize_seconds
        try:
            return len(await self._worker.tokenize(self._body, seconds))
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return 0


def _plain(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return ""


def _header(value: str) -> str:
    return value.encode("ascii", "backslashreplace").decode()
