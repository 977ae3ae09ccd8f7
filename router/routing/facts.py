"""What a policy is told of a turn and its session."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from policies import SessionView, Spent, Turn
from router.settings import Tier
from router.turns.incoming import Subject

_EARLIER = 3


def turn(
    subject: Subject, forced: Tier | None, prompt_tokens: int, prompt_logprob: float | None
) -> Turn:
    incoming, session = subject.incoming, subject.session
    messages, body = incoming.messages, incoming.clean
    answers = sum(message.get("role") == "assistant" for message in messages)
    asked = questions(messages)
    limits = (body.get("max_completion_tokens"), body.get("max_tokens"))
    return Turn(
        # A conversation that began elsewhere is as old as its history says.
        number=1 + (session.turns if session else answers),
        messages=len(messages),
        prompt_chars=chars(messages),
        prompt_tokens=prompt_tokens or None,
        max_tokens=next((limit for limit in limits if limit), None),
        has_tools=bool(body.get("tools")),
        has_schema=bool(body.get("response_format")),
        tool_loop=bool(messages) and messages[-1].get("role") == "tool",
        forced=forced,
        tenant=incoming.tenant,
        text=asked[-1] if asked else "",
        earlier=tuple(reversed(asked[-1 - _EARLIER : -1])),
        prompt_logprob=prompt_logprob,
    )


def view(subject: Subject, tenant_spent: Spent) -> SessionView:
    session = subject.session
    # With the tenant, so that a rollout's share is not the same for everybody's session "1".
    id = f"{subject.incoming.tenant}:{subject.identity.id}"
    if session is None:
        return SessionView(id=id, tenant_spent=tenant_spent)
    answered = session.timeline[-1].at if session.timeline else None
    return session.view().model_copy(
        update={
            "id": id,
            "stay": session.stay,
            "idle_seconds": max(0.0, time.time() - answered) if answered else 0.0,
            "spent": session.spent,
            "tenant_spent": tenant_spent,
            "memory": session.memory,
        }
    )


def questions(messages: Sequence[dict[str, Any]]) -> list[str]:
    """What the user wrote, in order."""
    return [plain(m.get("content")) for m in messages if m.get("role") == "user"]


def chars(messages: Sequence[dict[str, Any]]) -> int:
    return sum(len(plain(message.get("content"))) for message in messages)


def plain(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return ""
