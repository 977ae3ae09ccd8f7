"""What an audit asks a worker for: load, token ids, exact KV, log-probabilities."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from router.workers.worker import Worker

_QUICK_SECONDS = 5.0
# A piece of an audit is far shorter; this only ends what hangs.
_PIECE_SECONDS = 120.0


class ProbeFailed(Exception):
    """The worker did not answer, or not what was asked; `reason` is a metric's label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Namespace:
    """Where a probe reads and leaves KV: a tenant's exact namespace, or one lossy lineage's."""

    cache_salt: str
    extra_key: str | None = None


@dataclass(frozen=True)
class Scored:
    """Log-probabilities (nats) of the tokens after the prompt, how much KV was found, how long
    the worker took."""

    logprobs: tuple[float, ...]
    cached_tokens: int
    seconds: float


async def loaded(worker: Worker) -> bool:
    """Whether the worker has anything to answer, through this gateway or another."""
    data = await _json(worker.client.get("/v1/loads?include=core", timeout=_QUICK_SECONDS))
    try:
        return any(load["num_running_reqs"] or load["num_waiting_reqs"] for load in data["loads"])
    except (KeyError, TypeError) as error:
        raise ProbeFailed("loads_unreadable") from error


async def conversation_ids(
    worker: Worker, body: dict[str, Any], answer: dict[str, Any], seconds: float
) -> tuple[list[int], list[int]]:
    """Token ids of the prompt, and of all of it with the answer, as the next turn will send it.

    The second need not begin with the first: a token may reach over the answer's beginning.
    """
    try:
        prompt = await worker.tokenize(body, seconds)
        longer = {**body, "messages": [*body["messages"], answer]}
        whole = await worker.tokenize(longer, seconds, whole=True)
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ProbeFailed("tokenize_failed") from error
    return prompt, whole


async def prefill(worker: Worker, ids: Sequence[int], where: Namespace, priority: int) -> Scored:
    """Leaves KV of `ids` behind; nothing is scored."""
    began = time.monotonic()
    meta = await _generate(worker, {"input_ids": list(ids)}, where, priority)
    return Scored((), _cached(meta), time.monotonic() - began)


async def score(
    worker: Worker, ids: Sequence[int], start: int, where: Namespace, priority: int
) -> Scored:
    """Log-probabilities of ids[start:] under the KV of ids[:start] that `where` holds.

    KV from `start - 1` on is computed anew, so that only the prefix before it is read.
    """
    # SGLang answers from the token at `logprob_start_len` on, the first without a value.
    wanted = {
        "input_ids": list(ids),
        "return_logprob": True,
        "logprob_start_len": start - 1,
    }
    began = time.monotonic()
    meta = await _generate(worker, wanted, where, priority)
    seconds = time.monotonic() - began
    try:
        entries = meta["input_token_logprobs"][-(len(ids) - start) :]
        scored = tuple(float(entry[0]) for entry in entries)
        same = [entry[1] for entry in entries] == list(ids[start:])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ProbeFailed("logprobs_unreadable") from error
    if not same:
        raise ProbeFailed("logprobs_unreadable")
    return Scored(scored, _cached(meta), seconds)


def _cached(meta: dict[str, Any]) -> int:
    cached = meta.get("cached_tokens") or 0
    if not isinstance(cached, int):
        raise ProbeFailed("logprobs_unreadable")
    return cached


async def _generate(
    worker: Worker, wanted: dict[str, Any], where: Namespace, priority: int
) -> dict[str, Any]:
    body = {
        **wanted,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "cache_salt": where.cache_salt,
        "priority": priority,
    }
    if where.extra_key is not None:
        body["extra_key"] = where.extra_key
    data = await _json(worker.client.post("/generate", json=body, timeout=_PIECE_SECONDS))
    if not isinstance(data, dict) or not isinstance(data.get("meta_info"), dict):
        raise ProbeFailed("logprobs_unreadable")
    return data["meta_info"]


async def _json(call: Any) -> Any:
    try:
        response = await call
        response.raise_for_status()
        return response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise ProbeFailed("worker_failed") from error
