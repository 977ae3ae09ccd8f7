"""A whole gateway on loopback, in front of scripted workers and a scripted mapper."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from router import log
from router.server.serve import Server
from router.settings import Settings
from tests.fakes.mapper import FakeMapper
from tests.fakes.pages import PageStore
from tests.fakes.server import Threaded
from tests.fakes.worker import FakeWorker

_LONG = "word " * 60
_NUMBERS = itertools.count()
QUICK = {
    "connect_seconds": 1.0,
    "first_event_seconds": 5.0,
    "idle_seconds": 5.0,
    "drain_delay_seconds": 0.0,
    "drain_seconds": 2.0,
}


class Stack:
    def __init__(
        self,
        small: int = 1,
        large: int = 1,
        mapper: bool = True,
        extra_workers: Sequence = (),
        own_devices: bool = False,
        **settings: Any,
    ) -> None:
        log.configure("info")
        self.store = PageStore()
        self.small = [FakeWorker("small-model", self.store) for _ in range(small)]
        self.large = [FakeWorker("large-model", self.store) for _ in range(large)]
        self.mapper = FakeMapper(self.store)
        self.servers = {
            f"{tier}-{number}": Threaded(worker.app()).start()
            for tier, workers in (("small", self.small), ("large", self.large))
            for number, worker in enumerate(workers)
        }
        if mapper:
            self.servers["mapper"] = Threaded(self.mapper.app()).start()
            settings.setdefault("mapper_url", self.servers["mapper"].url)
        settings["timeouts"] = {**QUICK, **settings.get("timeouts", {})}
        # Audits come by chance and change what the next turn runs on.
        settings["drift"] = {
            "audit_rate": 0.0, "audit_above_tokens": None, "audit_idle_seconds": 0.0,
            "audit_share": 1.0,
            **settings.get("drift", {}),
        }  # fmt: skip
        settings.setdefault("pool", {"health_seconds": 0.2, "breaker_seconds": 0.5})
        self.settings = Settings(
            port=0,
            workers=[
                {
                    "name": name,
                    "tier": name.partition("-")[0],
                    "url": server.url,
                    "model": f"{name.partition('-')[0]}-model",
                    "device": name if own_devices else None,
                }
                for name, server in self.servers.items()
                if name != "mapper"
            ]
            + list(extra_workers),
            **settings,
        )
        self.server = Server(self.settings)
        self.gateway = self.server.config.app.state.gateway
        self.front = Threaded(None, server=self.server).start()
        self._standing = self.tasks()

    @property
    def url(self) -> str:
        return self.front.url

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        options.setdefault("max_retries", 0)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **options)

    def async_client(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def post(self, body: Any, headers: dict[str, str] | None = None, **options: Any) -> Any:
        url = f"{self.url}/v1/chat/completions"
        return httpx.post(url, json=body, headers=headers, timeout=30, **options)

    def stream(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        """The whole answer of a stream, read to its end."""
        return self.post({"stream": True, **body}, headers)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        text = httpx.get(f"{self.url}/metrics").text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def tasks(self) -> Counter[str]:
        """What runs on the gateway's loop, by name."""
        future = asyncio.run_coroutine_threadsafe(_tasks(), self.server._loop)
        return future.result(5)

    def idle(self) -> bool:
        """Nothing is left of any request: no task, no place in a queue, no work at a worker."""
        workers = [*self.small, *self.large]
        return (
            not any(worker.in_flight for worker in self.gateway.pool.workers)
            and not any(worker.active for worker in workers)
            and not self.gateway.running
            and not any(gate.in_flight or gate.queued for gate in self.gateway.gates.values())
            and not self.tasks() - self._standing
        )

    def stop(self) -> None:
        self.server._loop.call_soon_threadsafe(self.server.drain)
        for server in self.servers.values():
            server.server.should_exit = True
        self.front.thread.join(timeout=20)
        for server in self.servers.values():
            server.stop()


async def _tasks() -> Counter[str]:
    # The end of a generator that was left is a task as well, and has no name.
    return Counter(
        getattr(task.get_coro(), "__qualname__", "generator") for task in asyncio.all_tasks()
    )


def eventually(check: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Waits for what another thread is about to do; the bound only ends a failing test."""
    deadline = time.monotonic() + seconds
    while not (value := check()):
        if time.monotonic() > deadline:
            raise AssertionError(f"did not happen in {seconds} s")
        time.sleep(0.01)
    return value


def user(text: str = "Hello there, how are you today?") -> dict[str, str]:
    return {"role": "user", "content": text}


def events(body: bytes) -> list[bytes]:
    return [event for event in body.split(b"\n\n") if event]


class Talk:
    """A conversation as an application has it, over one gateway or several."""

    def __init__(self, session=None, model="auto", stream=True):
        self.headers = {"x-session-id": session} if session else {}
        self.model = model
        self.stream = stream
        self.messages = []

    def turn(self, stack, text=_LONG, model=None, **options):
        # Its own words, so that no other conversation has left exact KV of them.
        self.messages.append(user(f"{next(_NUMBERS)} {text}"))
        client = stack.client(options.pop("key", "none"))
        raw = client.chat.completions.with_raw_response.create(
            model=model or self.model, messages=self.messages, stream=self.stream,
            extra_headers=self.headers, **options,
        )  # fmt: skip
        answer = raw.parse()
        if self.stream:
            text = "".join(c.choices[0].delta.content or "" for c in answer if c.choices)
        else:
            text = answer.choices[0].message.content
        assert text
        self.messages.append({"role": "assistant", "content": text})
        return raw.headers
