"""How likely the small model finds what the user wrote: an input that some policies ask for."""

from __future__ import annotations

import httpx

from router.workers.worker import Worker

# The end of a long text tells as much as all of it, and takes less time.
_MAX_CHARS = 4000
# Apart from every conversation's KV.
_NAMESPACE = "likelihood"


async def prompt_logprob(worker: Worker, text: str, tenant: str, seconds: float) -> float | None:
    """Mean log-probability of the text's tokens, in nats; None when it is not had in time.

    Through SGLang's /generate, which can return the prompt's log-probabilities.
    """
    if not text:
        return None
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
        entries = response.json()["meta_info"]["input_token_logprobs"]
        # The first token has nothing before it, and so no value.
        values = [float(entry[0]) for entry in entries if entry[0] is not None]
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError):
        return None
    return sum(values) / len(values) if values else None
