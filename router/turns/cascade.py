"""A cascade's first part: the small tier's answer, asked for with confidence and held back."""

from __future__ import annotations

import math
import time
from typing import Any

import httpx
from starlette.types import Send

from policies import Cascade, Signals, Verdict, escalate, signals
from router import log
from router.gateway import Gateway
from router.relay.logprobs import Strip
from router.relay.parser import Answer, Kind
from router.savings.books import Booking
from router.sessions import record
from router.sessions.base import Session
from router.turns.incoming import Incoming
from router.turns.leg import Leg
from router.turns.reply import Reply
from router.turns.upstream import BrokenStream, Upstream
from router.workers.worker import CHAT, UpstreamError

logger = log.get("turn")
# The answer's token and the one it is compared with.
_TOP = 2
_CHECK = "Is the answer above right and complete? Reply with one word: yes or no."
_CHECK_TOP = 10
_CHECK_SECONDS = 30.0


def possible(incoming: Incoming) -> bool:
    """Only a conversation with one answer can be judged and taken back."""
    body = incoming.clean
    return incoming.path == CHAT and (body.get("n") or 1) == 1


def asking(body: dict[str, Any]) -> dict[str, Any]:
    """The request with log-probabilities, and usage in every chunk: it may be cut short."""
    top = max(_TOP, body.get("top_logprobs") or 0)
    out = {**body, "logprobs": True, "top_logprobs": top}
    if body.get("stream") is True:
        options = body.get("stream_options") or {}
        out["stream_options"] = {**options, "continuous_usage_stats": True}
    return out


class SmallFirst:
    """Gets the small tier's answer judged: it is the reply, or the decision turns to large."""

    def __init__(self, gateway: Gateway, incoming: Incoming, reply: Reply) -> None:
        self._gateway = gateway
        self._in = incoming
        self._reply = reply
        self._plan: Cascade = reply.decision.cascade
        self._leg: Leg | None = None

    @property
    def held(self) -> bool:
        """Whether all of the answer is here."""
        return self._leg is not None and self._leg.upstream.answer.done

    async def answered(self, send: Send) -> bool:
        """Whether the answer would do, and was sent. Raises ApiError."""
        started, reply = time.monotonic(), self._reply
        verdict = Verdict(escalate=True, reason="unanswered")
        if "small" in self._gateway.gates:
            async with self._gateway.gates["small"].enter(self._in.tenant):
                try:
                    verdict = await self._judged()
                    if not verdict.escalate:
                        upstream = self._leg.upstream
                        first_event = upstream.opened + upstream.first_event_seconds
                        self._count("kept", verdict, time.monotonic() - first_event)
                        reply.strip = Strip.of(self._in.clean)
                        await reply.write(send)
                        return True
                except UpstreamError as error:
                    if not error.elsewhere:
                        raise error.error from None
                except BrokenStream as broken:
                    logger.warning(
                        "stream_broken", worker=self._leg.worker.name, reason=broken.reason
                    )
                finally:
                    # Ends what the worker still does for an answer that nobody wants.
                    if self._leg is not None:
                        await self._leg.close()
        outcome = "unanswered" if verdict.reason == "unanswered" else "escalated"
        self._count(outcome, verdict, time.monotonic() - started)
        reply.decision = escalate(reply.decision, verdict)
        return False

    def session(self) -> Session | None:
        """The session as the large tier finds it: the small model has the prompt's KV."""
        subject, leg = self._reply.subject, self._leg
        if leg is None or subject.store_down:
            return subject.session
        session = (subject.session or Session(id=subject.identity.id)).model_copy()
        usage = leg.upstream.answer.usage
        turn = self._gateway.drift.write_down(leg.worker, leg.outcome, usage, Booking())
        record.take_back(session, turn, leg.outcome, session.born)
        session.tier, session.model = leg.tier, leg.worker.model
        return session

    async def rescue(self, send: Send) -> None:
        """The large tier cannot answer: the small tier's answer is better than none."""
        reply = self._reply
        reply.go_back_to(self._leg)
        reply.cascade = "rescued"
        self._gateway.metrics.cascades.labels("rescued", "escalation_failed").inc()
        reply.strip = Strip.of(self._in.clean)
        reply.decision = reply.decision.model_copy(
            update={"tier": "small", "stage": "cascade", "reason": "escalation_failed"}
        )
        await reply.write(send)

    async def _judged(self) -> Verdict:
        """Raises UpstreamError, BrokenStream."""
        reply, plan = self._reply, self._plan
        self._leg = leg = await reply.open("small", reply.subject.session, asking(self._in.clean))
        await hold(leg.upstream, plan)
        right = await check_itself(self._in, leg) if plan.self_check else None
        reply.signals = measure(leg.upstream, plan, right)
        return plan.judge(reply.signals)

    def _count(self, outcome: str, verdict: Verdict, seconds: float) -> None:
        self._reply.cascade = outcome
        self._gateway.metrics.cascades.labels(outcome, verdict.reason).inc()
        self._gateway.metrics.cascade_wait.labels(outcome).observe(seconds)


async def hold(upstream: Upstream, cascade: Cascade) -> None:
    """Reads as much of the answer as the policy judges; it stays in `upstream.first`.

    Raises BrokenStream.
    """
    if not upstream.stream:
        return
    enough = cascade.tokens if cascade.mode == "early" else math.inf
    events, read = upstream.first, 0
    while True:
        for kind, _ in events[read:]:
            if kind is Kind.GARBAGE:
                raise upstream.garbage()
            if kind is Kind.ERROR:
                raise upstream.error_event()
        read = len(events)
        answer = upstream.answer
        # A worker that gives no log-probabilities is not waited for.
        if answer.done or max(len(answer.confidence.logprobs), answer.content_events) >= enough:
            return
        more = await upstream.read()
        if more is None:
            return
        events += more


def measure(upstream: Upstream, cascade: Cascade, self_check: float | None) -> Signals:
    confidence = upstream.answer.confidence
    return signals(confidence.logprobs, confidence.margins, cascade.quantile, self_check)


async def check_itself(incoming: Incoming, leg: Leg) -> float | None:
    """The probability that the small model gives to its answer's being right.

    It is asked for one word after the answer, and what it says counts by the likelihoods of
    yes and no. None when it has no opinion, or gives no answer.
    """
    choice = leg.upstream.answer.choices.get(0)
    text = "".join(choice.content) if choice is not None else ""
    if not text:
        return None
    asked = [
        *incoming.messages,
        {"role": "assistant", "content": text},
        {"role": "user", "content": _CHECK},
    ]
    body = {
        "model": leg.worker.model,
        "messages": asked,
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": _CHECK_TOP,
        "cache_salt": incoming.tenant,
        "extra_key": leg.outcome.extra_key,
    }
    try:
        with leg.worker.busy():
            response = await leg.worker.client.post(CHAT, json=body, timeout=_CHECK_SECONDS)
        response.raise_for_status()
        answer = Answer()
        answer.read_body(response.content)
        if answer.usage is not None:
            leg.checks.append(answer.usage)
        return _yes(response.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None


def _yes(top: list[dict[str, Any]]) -> float | None:
    weights = {"yes": 0.0, "no": 0.0}
    for entry in top:
        word = entry["token"].strip().lower()
        if word in weights:
            weights[word] += math.exp(entry["logprob"])
    total = sum(weights.values())
    return weights["yes"] / total if total > 0 else None
