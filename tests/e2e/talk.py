"""Helpers of the end-to-end tests: a conversation through the gateway, a request to a worker."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import OpenAI

from deploy.local import LocalStack
from mapper.keys import Namespace, page_keys

_numbers = itertools.count()
# Tokens that all conversations of a tenant share: the chat template's own system prompt.
SHARED = 32
PAGE = 16
ADMIN_KEY = "the-admin-key"


@dataclass
class Reply:
    text: str
    headers: dict[str, str]
    prompt_tokens: int
    cached_tokens: int


@dataclass
class Conversation:
    """A session at the gateway; `opening` makes its prompts unlike any other session's."""

    stack: LocalStack
    opening: str
    session: str = field(default_factory=lambda: f"e2e-{next(_numbers)}")
    messages: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int = 8
    policy: str = "default"

    def turn(self, question: str, model: str, stream: bool = False) -> Reply:
        url = self.stack.config.url("gateway") + "/v1"
        client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=300)
        content = question if self.messages else f"{self.opening}\n{question}"
        self.messages.append({"role": "user", "content": content})
        raw = client.chat.completions.with_raw_response.create(
            model=model,
            messages=self.messages,
            temperature=0,
            max_tokens=self.max_tokens,
            extra_headers={"x-session-id": self.session, "x-baton-policy": self.policy},
            **({"stream": True, "stream_options": {"include_usage": True}} if stream else {}),
        )
        answer = raw.parse()
        if stream:
            chunks = list(answer)
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            usage = chunks[-1].usage
        else:
            text, usage = answer.choices[0].message.content, answer.usage
        self.messages.append({"role": "assistant", "content": text})
        details = usage.prompt_tokens_details
        return Reply(
            text,
            dict(raw.headers),
            usage.prompt_tokens,
            (details.cached_tokens or 0) if details else 0,
        )

    def settle(self) -> None:
        """Waits for the pages of the last turn: a worker writes them after it has answered."""
        ids = token_ids(self.stack, "large", self.messages)
        namespace = Namespace(lineage(self.stack, self.session), "default")
        # The last page or two hold what follows the answer, which no worker has read yet.
        last = page_keys(ids, PAGE, namespace)[-3]
        for _ in range(300):
            if any(self.stack.config.store_folder.rglob(f"{last}.*.kv")):
                return
            time.sleep(0.1)
        raise AssertionError("the worker has not written the pages of its last turn")


def session(stack: LocalStack, id: str) -> dict[str, Any]:
    """The operators' view of a session."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    url = f"{stack.config.url('gateway')}/admin/sessions/{id}"
    return httpx.get(url, headers=headers, timeout=30).raise_for_status().json()


def lineage(stack: LocalStack, id: str) -> str | None:
    """The namespace in which the session's last turn was answered."""
    epoch = session(stack, id)["timeline"][-1]["epoch"]
    return epoch and f"lossy:{id}:{epoch}"


def ask_worker(stack: LocalStack, tier: str, messages: list, **fields: Any) -> httpx.Response:
    """A chat completion straight at a worker."""
    body = {
        "model": stack.config.worker(tier).name,
        "messages": messages,
        "temperature": 0,
        "max_tokens": 4,
        **fields,
    }
    return httpx.post(f"{stack.config.url(tier)}/v1/chat/completions", json=body, timeout=300)


def cached(response: httpx.Response) -> int:
    details = response.json()["usage"]["prompt_tokens_details"] or {}
    return details.get("cached_tokens") or 0


def token_ids(stack: LocalStack, tier: str, messages: list) -> list[int]:
    body = {"model": stack.config.worker(tier).name, "messages": messages}
    answer = httpx.post(f"{stack.config.url(tier)}/v1/tokenize", json=body, timeout=60)
    return answer.json()["tokens"]


def transfer(stack: LocalStack, ids: list[int], source: dict, target: dict) -> dict[str, Any]:
    body = {
        "session": "direct",
        "token_ids": ids,
        "deadline_ms": 60_000,
        "native_tail": 16,
        "source": source,
        "target": target,
    }
    answer = httpx.post(stack.config.url("mapper") + "/v1/transfers", json=body, timeout=90)
    return answer.raise_for_status().json()


def flush(stack: LocalStack, tier: str) -> None:
    """Empties a worker's radix cache; the page store keeps its pages."""
    url = f"{stack.config.url(tier)}/flush_cache"
    httpx.post(url, params={"timeout": 30}, timeout=60).raise_for_status()


def metric(stack: LocalStack, part: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    from prometheus_client.parser import text_string_to_metric_families

    text = httpx.get(stack.config.url(part) + "/metrics", timeout=30).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
