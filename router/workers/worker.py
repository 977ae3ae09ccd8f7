"""One worker: its HTTP client, its health and its breaker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from router import settings as config
from router.errors import ApiError
from router.workers.breaker import Breaker
from router.workers.device import Device

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class Worker:
    def __init__(
        self,
        worker: config.Worker,
        pool: config.Pool,
        timeouts: config.Timeouts,
        device: Device | None = None,
    ) -> None:
        self.name = worker.name
        self.tier = worker.tier
        self.model = worker.model
        self.health_path = worker.health_path
        self.context_tokens = worker.context_tokens
        self._context_known = worker.context_tokens is not None
        # Until the first check has an answer the worker is believed to be up: a gateway
        # that starts under load must not turn everything away.
        self.healthy = True
        self.checked = False
        # Unix time at which it was found to be back after it had been away.
        self.up_since = 0.0
        self.in_flight = 0
        # Requests ever sent, so that whoever waits can tell whether another came in between.
        self.started = 0
        self.breaker = Breaker(pool.breaker_failures, pool.breaker_seconds)
        self.device = device or Device()
        self.device.workers.append(self)
        headers = {"accept-encoding": "identity", "user-agent": "baton"}
        if worker.api_key_file is not None:
            headers["authorization"] = f"Bearer {config.read_secret(worker.api_key_file)}"
        self.client = httpx.AsyncClient(
            base_url=worker.url,
            headers=headers,
            # No proxies or credentials from the environment: workers are ours.
            trust_env=False,
            follow_redirects=False,
            limits=httpx.Limits(
                max_connections=pool.connections_per_worker,
                max_keepalive_connections=pool.connections_per_worker,
                keepalive_expiry=pool.keepalive_seconds,
            ),
            # How long an answer may take is decided by whoever waits for it.
            timeout=httpx.Timeout(None, connect=timeouts.connect_seconds),
        )

    @property
    def available(self) -> bool:
        return self.healthy and self.breaker.allows()

    async def check(self, timeout: float) -> bool:
        try:
            response = await self.client.get(self.health_path, timeout=timeout)
        except httpx.HTTPError:
            return False
        if response.status_code == 200 and not self._context_known:
            await self._ask_context(timeout)
        return response.status_code == 200

    async def tokenize(
        self, body: dict[str, Any], timeout: float, *, whole: bool = False
    ) -> list[int]:
        """Token ids of the rendered prompt, exactly as a chat completion would see them.

        With `whole`, of the messages as they are, without the opening of an answer.
        """
        # The fields that a chat template can see; the worker ignores what it does not know.
        fields = (
            "messages", "tools", "tool_choice", "reasoning_effort", "reasoning",
            "continue_final_message", "chat_template_kwargs",
        )  # fmt: skip
        payload = {name: body[name] for name in fields if body.get(name) is not None}
        payload["model"] = self.model
        if whole:
            payload["add_generation_prompt"] = False
        response = await self.client.post("/v1/tokenize", json=payload, timeout=timeout)
        response.raise_for_status()
        tokens = response.json()["tokens"]
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise ValueError("the worker's token ids are not a list of integers")
        return tokens

    async def _ask_context(self, timeout: float) -> None:
        try:
            response = await self.client.get("/v1/models", timeout=timeout)
        except httpx.HTTPError:
            return
        self._context_known = True
        try:
            tokens = response.json()["data"][0]["max_model_len"]
        except (ValueError, KeyError, IndexError, TypeError):
            return
        if isinstance(tokens, int) and tokens > 0:
            self.context_tokens = tokens

    def enter(self) -> None:
        """A request for a user is about to be sent; `leave` once it is over."""
        self.in_flight += 1
        self.started += 1
        self.device.enter()

    def leave(self) -> None:
        self.in_flight -= 1
        self.device.leave()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Counts a request that is not a turn's answer but keeps the worker busy all the same."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    async def close(self) -> None:
        await self.client.aclose()


class UpstreamError(Exception):
    """A worker did not answer as it should, before anything was sent to the client."""

    def __init__(
        self,
        reason: str,
        error: ApiError,
        *,
        elsewhere: bool = False,
        again: bool = False,
        trips: bool = False,
    ) -> None:
        super().__init__(reason)
        # A code word for metrics and logs.
        self.reason = reason
        # What the client gets when nobody else can answer.
        self.error = error
        # Whether another worker may be asked, and whether this one may be asked again.
        self.elsewhere = elsewhere or again
        self.again = again
        # Whether it counts against the worker.
        self.trips = trips
