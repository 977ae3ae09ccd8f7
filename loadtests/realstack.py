"""The local stack of real workers for the drift measurements: started, asked, scored, cleaned up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from deploy.demo import POLICY
from deploy.local import LocalConfig, LocalStack
from mapper.demo import model_name
from mapper.demo.artifacts import demo_artifacts
from mapper.demo.models import demo_models
from router import settings
from router.drift import probe
from router.drift.probe import Namespace, Scored
from router.workers.worker import Worker

ADMIN_KEY = "loadtest"
_numbers = itertools.count()


@contextlib.contextmanager
def real_stack(drift: dict[str, Any], policies: dict[str, Any]) -> Iterator[LocalStack]:
    """The demo's models and maps behind a gateway with these drift settings."""
    with tempfile.TemporaryDirectory(prefix="baton-loadtest-") as folder:
        key = Path(folder) / "admin.key"
        key.write_text(ADMIN_KEY)
        config = LocalConfig(
            folder=Path(folder),
            models=demo_models(),
            artifacts=[*demo_artifacts().values()],
            policy=POLICY,
            base_port=_free_ports(5),
            # So that no page is evicted before it was scored.
            store_bytes=8 << 30,
            gateway={
                "policies": policies,
                "drift": drift,
                "auth": {"admin_key_file": str(key)},
                "transfers": {"deadline_ms": 60_000},
                "timeouts": {"tokenize_seconds": 30},
            },
        )
        with LocalStack(config, progress=lambda message: print(message, flush=True)) as stack:
            yield stack


@dataclass
class Reply:
    text: str
    kv: str
    reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft: float


class Client:
    """Asks the gateway and, for scores and native answers, its workers."""

    def __init__(self, stack: LocalStack) -> None:
        self.gateway = stack.config.url("gateway")
        self._urls = {tier: stack.config.url(tier) for tier in stack.config.models}
        self.http = httpx.AsyncClient(timeout=600)
        pool, timeouts = settings.Pool(), settings.Timeouts()
        self.workers = {
            tier: Worker(
                settings.Worker(
                    name=tier, tier=tier, url=stack.config.url(tier), model=model_name(tier)
                ),
                pool,
                timeouts,
            )
            for tier in stack.config.models
        }

    async def close(self) -> None:
        await self.http.aclose()
        for worker in self.workers.values():
            await worker.close()

    async def turn(
        self, tier: str, messages: list[dict], session: str, policy: str, tokens: int
    ) -> Reply:
        """One greedy turn through the gateway, streamed."""
        headers = {"x-session-id": session, "x-baton-policy": policy, "x-baton-tier": tier}
        body = {"model": "auto", "messages": messages, "max_tokens": tokens, "temperature": 0}
        return await self._stream(f"{self.gateway}/v1/chat/completions", body, headers)

    async def native(self, tier: str, messages: list[dict], salt: str, tokens: int) -> Reply:
        """The same turn straight at a worker, on exact KV of its own."""
        body = {
            "model": model_name(tier), "messages": messages, "max_tokens": tokens,
            "temperature": 0, "cache_salt": salt,
        }  # fmt: skip
        return await self._stream(f"{self._urls[tier]}/v1/chat/completions", body, {})

    async def session(self, id: str) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        response = await self.http.get(f"{self.gateway}/admin/sessions/{id}", headers=headers)
        return response.raise_for_status().json()

    async def delete(self, id: str) -> None:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        response = await self.http.delete(f"{self.gateway}/admin/sessions/{id}", headers=headers)
        response.raise_for_status()

    async def audits_done(self, id: str) -> dict[str, Any]:
        """The session once every lossy turn's audit has ended."""
        while True:
            seen = await self.session(id)
            if all(turn["audit"] != "none" for turn in seen["timeline"] if turn["epoch"]):
                return seen
            await asyncio.sleep(0.2)

    async def ids(self, tier: str, messages: list[dict], answer: str) -> tuple[list[int], int]:
        """Token ids of the conversation with its answer, and where the answer begins.

        At the end, when the answer cannot be told apart from the prompt.
        """
        said = {"role": "assistant", "content": answer}
        body = {"messages": messages}
        prompt, whole = await probe.conversation_ids(self.workers[tier], body, said, 60)
        return whole, len(prompt) if whole[: len(prompt)] == prompt else len(whole)

    async def score(
        self, tier: str, ids: list[int], start: int, salt: str, extra_key: str | None = None
    ) -> Scored:
        return await probe.score(self.workers[tier], ids, start, Namespace(salt, extra_key), 0)

    async def _stream(self, url: str, body: dict, headers: dict) -> Reply:
        loop = asyncio.get_running_loop()
        began, ttft, text, usage = loop.time(), 0.0, [], {}
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with self.http.stream("POST", url, json=body, headers=headers) as response:
            if response.status_code != 200:
                raise RuntimeError((await response.aread()).decode())
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                for choice in chunk["choices"]:
                    if choice["delta"].get("content"):
                        ttft = ttft or loop.time() - began
                        text.append(choice["delta"]["content"])
                usage = chunk.get("usage") or usage
        details = usage.get("prompt_tokens_details") or {}
        return Reply(
            "".join(text),
            response.headers.get("x-baton-kv", ""),
            response.headers.get("x-baton-kv-reason", ""),
            usage["prompt_tokens"],
            details.get("cached_tokens") or 0,
            usage["completion_tokens"],
            ttft,
        )


def passages(path: Path | None, count: int, questions: int) -> list[tuple[str, list[str]]]:
    """(passage, questions): from a file of {"story", "turns": [{"question"}]}, or made up."""
    if path is None:
        return [_made_up(number, questions) for number in range(count)]
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        asked = [turn["question"] for turn in item["turns"]]
        if len(asked) >= questions:
            found.append((item["story"], asked[:questions]))
    if len(found) < count:
        raise SystemExit(f"{path}: {len(found)} passages have {questions} questions, not {count}")
    return found[:count]


_TOWNS = ("Aldermoor", "Brackwell", "Corvane", "Dunharrow", "Elmsgate", "Farrowby", "Glenside")
_SIDES = ("North", "South", "East", "West")
_GOODS = ("wool", "slate", "barley", "copper", "honey", "timber", "glass", "salt", "linen", "tar")


def _made_up(number: int, questions: int) -> tuple[str, list[str]]:
    """A passage of plain facts, and a question about each of them in turn."""
    facts, asked = [], []
    for index in range(questions):
        town = f"{_TOWNS[(number + index) % len(_TOWNS)]} {_SIDES[index % 4]}"
        good = _GOODS[(3 * number + index) % len(_GOODS)]
        year = 1700 + (37 * number + 13 * index) % 200
        facts.append(f"In {year} the harbour of {town} sent {index + 2} ships with {good}.")
        kinds = (
            f"What did {town} send?",
            f"When did {town} send {good}?",
            f"How many ships had {town}?",
        )
        asked.append(kinds[index % 3])
    return " ".join(facts), asked


def fresh(name: str) -> str:
    """A session or salt that nothing else has."""
    return f"{name}-{next(_numbers)}"


def _free_ports(count: int) -> int:
    for base in range(23000, 30000, count):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(base, base + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return base
    raise SystemExit("no free ports on loopback")
