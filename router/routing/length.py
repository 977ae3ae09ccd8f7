"""How many tokens a prompt will have, without asking a worker: learned from what they report."""

from __future__ import annotations

import orjson

from router.routing.facts import chars
from router.sessions.base import Session
from router.settings import Transfers
from router.turns.incoming import Incoming

# What a chat template adds to a message.
_FRAME = 6
_START = 0.25
_FORGET = 0.98
# What the target prefills itself where no native tail is set: one page, more or less.
_TAIL = 16


class PromptLength:
    """Tokens a character, over the whole prompts of first turns; older ones count less."""

    def __init__(self) -> None:
        self._tokens, self._chars = 1000.0 * _START, 1000.0

    def observe(self, incoming: Incoming, prompt_tokens: int) -> None:
        count = chars(incoming.messages) + _tools(incoming)
        tokens = prompt_tokens - _FRAME * len(incoming.messages)
        if count > 0 and tokens > 0:
            self._tokens = _FORGET * self._tokens + tokens
            self._chars = _FORGET * self._chars + count

    def estimate(self, incoming: Incoming, session: Session | None) -> int:
        """What the last answer's model holds is known; the rest is estimated by its length."""
        messages, more = incoming.messages, _tools(incoming)
        held = held_tokens(session, session.model) if session is not None else 0
        if held:
            last = max(
                (i for i, one in enumerate(messages) if one.get("role") == "assistant"), default=-1
            )
            messages, more = messages[last + 1 :], 0
        count = chars(messages) + more
        return held + round(count * self._tokens / self._chars) + _FRAME * len(messages)


def _tools(incoming: Incoming) -> int:
    """Tools are part of the prompt's beginning, as JSON."""
    tools = incoming.clean.get("tools")
    return len(orjson.dumps(tools)) if tools else 0


def held_tokens(session: Session | None, model: str | None) -> int:
    """Leading tokens of the conversation that a model has KV of, as far as is known."""
    if session is None or model is None:
        return 0
    lineage = session.lineage(model)
    return lineage.lossy.tokens if lineage.lossy is not None else lineage.exact


def mappable_tokens(settings: Transfers, session: Session, target: str, prompt: int) -> int:
    """What a transfer to `target` could take over from the model that answered last."""
    tail = settings.native_tail if settings.native_tail is not None else _TAIL
    reach = min(held_tokens(session, session.model), prompt - tail)
    tokens = reach - held_tokens(session, target)
    return tokens if tokens > 0 and tokens >= settings.min_mapped_tokens else 0
