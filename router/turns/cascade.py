"""A cascade's first part: the small tier's answer, asked for with confidence and held back."""

from __future__ import annotations

import math
from typing import Any

import httpx

import policies
from policies import Cascade, Signals
from router.relay.parser import Kind
from router.sessions import record
from router.sessions.base import Session, TurnRecord
from router.turns.incoming import Incoming, Subject
from router.turns.leg import Leg
from router.turns.upstream import Upstream
from router.workers.worker import CHAT

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


def taken_back(subject: Subject, leg: Leg, turn: TurnRecord) -> Session | None:
    """The session as the next leg finds it: the small model has the prompt's KV."""
    if subject.store_down:
        return None
    session = (subject.session or Session(id=subject.identity.id)).model_copy()
    record.use(session, turn, leg.outcome, session.born)
    session.tier, session.model = leg.tier, leg.worker.model
    return session


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
        if upstream.answer.done or len(upstream.answer.confidence.logprobs) >= enough:
            return
        more = await upstream.read()
        if more is None:
            return
        events += more


def measure(upstream: Upstream, cascade: Cascade, self_check: float | None) -> Signals:
    confidence = upstream.answer.confidence
    return policies.signals(confidence.logprobs, confidence.margins, cascade.quantile, self_check)


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
        response = await leg.worker.client.post(CHAT, json=body, timeout=_CHECK_SECONDS)
        response.raise_for_status()
        top = response.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return _yes(top)
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
