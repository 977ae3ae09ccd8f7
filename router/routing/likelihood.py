"""How likely the small model finds what the user wrote: an input that some policies ask for."""

from __future__ import annotations

from typing import NamedTuple

import httpx

from router.relay.parser import Usage
from router.workers.worker import Worker

# The end of a long text tells as much as all of it, and takes less time.
_MAX_CHARS = 4000
# Apart from every conversation's KV.
_NAMESPACE = "likelihood"


class Likelihood(NamedTuple):
    """Mean log-probability of a text's tokens, in nats, and what asking for it has used.

    None is what was not had in time.
    """

    logprob: float | None = None
    usage: Usage | None = None


async def likelihood(worker: Worker, text: str, tenant: str, seconds: float) -> Likelihood:
    """Through SGLang's /generate, which can return the prompt's log-probabilities."""
    if not text:
        return Likelihood()
    body = {
        "text": text[-_MAX_CHARS:],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "cache_salt": tenant,
        "extra_key": _NAMESPACE,
    }
    try:
        with worker.busy():
            response = await worker.client.post("/generate", json=body, timeout=seconds)
        response.raise_for_status()
        meta = response.json()["meta_info"]
        entries = meta["input_token_logprobs"]
        # The one token that it has to write is thrown away, and paid for.
        usage = Usage(int(meta["prompt_tokens"]), 1, int(meta.get("cached_tokens") or 0))
        # The first token has nothing before it, and so no value.
        values = [float(entry[0]) for entry in entries if entry[0] is not None]
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError):
        return Likelihood()
    return Likelihood(sum(values) / len(values) if values else None, usage)
