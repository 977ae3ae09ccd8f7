"""The drift estimate against the divergence it estimates, at the same positions.

    python -m loadtests.drift_estimator --tokens 3000 --out build/drift

Prompts are prefilled by the small worker and mapped to the large one, which answers on the
mapped KV at temperature 1. The estimate is what an audit computes from two calls to the
worker: the mean of (mapped - native) log-probability of the answer's tokens. The divergence
is computed in Transformers: the mapped pages are read from the store, both distributions over
the whole vocabulary are formed at each position of the answer, and KL(mapped || native) is
summed without sampling. For answers at temperature 1 the two have the same expectation; for
greedy answers they do not, and the difference, the estimate's bias, is reported beside.
Writes estimator.json. Takes about six minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from deploy.local import LocalStack
from loadtests.realstack import Client, fresh, passages, real_stack
from mapper.capture.model import CapturedModel, build_cache
from mapper.demo import model_name
from mapper.keys import Namespace, page_keys
from mapper.store import DirectoryStore, PageLayout

_AT_ONCE = 8
_NATIVE_TAIL = 16
_TOKENS_OF_AN_ANSWER = 64
_DRAWS = 2000


class Direct:
    """Both distributions of the large model, from the same pages that the worker reads."""

    def __init__(self, stack: LocalStack) -> None:
        config = stack.config.worker("large")
        self._size = config.page_size
        self._layout = PageLayout.of(config.spec())
        self._store = DirectoryStore(stack.config.store_folder, stack.config.store_bytes)
        self._model = CapturedModel(stack.config.models["large"]).model

    @torch.inference_mode()
    def divergence(
        self, ids: list[int], start: int, restored: int, namespace: Namespace
    ) -> list[float]:
        """KL(mapped || native) in nats for each token of ids[start:].

        The first `restored` tokens' KV is from `namespace`; what follows is computed on top.
        """
        keys = page_keys(ids, self._size, namespace)[: restored // self._size]
        pages = [self._store.get(self._layout, key) for key in keys]
        if any(page is None for page in pages):
            raise RuntimeError("a page is not in the store any more; raise its limit")
        both = torch.cat([page for page, _ in pages], dim=2)
        cache = build_cache(both[:, 0].clone(), both[:, 1].clone())
        tokens = torch.tensor(ids[:-1])[None]
        wanted = len(ids) - start
        mapped = self._model(tokens[:, restored:], past_key_values=cache, logits_to_keep=wanted)
        native = self._model(tokens, logits_to_keep=wanted)
        p, q = (one.logits[0].float().log_softmax(-1) for one in (mapped, native))
        return (p.exp() * (p - q)).sum(-1).tolist()


async def answer(
    client: Client, stack: LocalStack, prompt: list[int], lineage: str, temperature: float
) -> list[int]:
    """The large worker's answer on mapped KV, as token ids."""
    body = {
        "input_ids": prompt,
        "cache_salt": "default",
        "extra_key": lineage,
        "sampling_params": {
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": _TOKENS_OF_AN_ANSWER,
        },
    }
    url = f"{stack.config.url('large')}/generate"
    data = (await client.http.post(url, json=body)).raise_for_status().json()
    return data["output_ids"]


async def prepare(client: Client, stack: LocalStack, text: str) -> list[int]:
    """Prefills the prompt on the small worker; its token ids."""
    messages = [{"role": "user", "content": f"({fresh('estimator')})\n{text}"}]
    await client.native("small", messages, "default", 1)
    return await client.workers["small"].tokenize({"messages": messages}, 60)


async def map_to_large(client: Client, stack: LocalStack, ids: list[int], lineage: str) -> int:
    """Tokens that the large worker can restore; waits until the small one's pages are there."""
    request = {
        "session": lineage, "token_ids": ids, "deadline_ms": 60_000, "native_tail": _NATIVE_TAIL,
        "source": {"model": model_name("small"), "cache_salt": "default"},
        "target": {"model": model_name("large"), "extra_key": lineage, "cache_salt": "default"},
    }  # fmt: skip
    url = f"{stack.config.url('mapper')}/v1/transfers"
    for _ in range(100):
        result = (await client.http.post(url, json=request)).raise_for_status().json()
        if result["tokens"] >= len(ids) - 3 * _NATIVE_TAIL:
            return result["tokens"]
        await asyncio.sleep(0.1)
    raise RuntimeError(f"the prompt was not mapped: {result}")


async def one(
    client: Client, stack: LocalStack, direct: Direct, text: str, temperature: float, slots: Any
) -> tuple[list[float], list[float]]:
    """Estimates and divergences, token by token, of one answer."""
    async with slots:
        prompt = await prepare(client, stack, text)
        lineage = f"lossy:{fresh('estimator')}:1"
        restored = await map_to_large(client, stack, prompt, lineage)
        ids = prompt + await answer(client, stack, prompt, lineage, temperature)
        start = len(prompt)
        mapped = await client.score("large", ids, start, "default", lineage)
        native = await client.score("large", ids, start, "default")
    estimates = [a - b for a, b in zip(mapped.logprobs, native.logprobs, strict=True)]
    namespace = Namespace(lineage, "default")
    return estimates, direct.divergence(ids, start, restored, namespace)


async def run(stack: LocalStack, options: argparse.Namespace) -> dict[str, Any]:
    client, direct = Client(stack), Direct(stack)
    report = {}
    try:
        for name, temperature, wanted in (
            ("temperature_1", 1.0, options.tokens),
            ("greedy", 0.0, options.greedy_tokens),
        ):
            texts = _texts(options.passages)
            slots, answers = asyncio.Semaphore(_AT_ONCE), []
            began = time.monotonic()
            until = began + options.minutes * 60
            while sum(len(e) for e, _ in answers) < wanted and time.monotonic() < until:
                batch = [next(texts) for _ in range(_AT_ONCE)]
                answers += await asyncio.gather(
                    *(one(client, stack, direct, text, temperature, slots) for text in batch)
                )
                print(name, sum(len(e) for e, _ in answers), "tokens", flush=True)
            report[name] = compare(answers)
            report[name]["seconds"] = round(time.monotonic() - began, 1)
    finally:
        await client.close()
    return report


def compare(answers: list[tuple[list[float], list[float]]]) -> dict[str, Any]:
    """Means per token with 95 % intervals, bootstrapped over answers."""
    sums = torch.tensor([[sum(e), sum(d), len(e)] for e, d in answers], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    drawn = sums[torch.randint(len(sums), (_DRAWS, len(sums)), generator=generator)].sum(1)

    def figure(values: torch.Tensor, draws: torch.Tensor) -> dict[str, Any]:
        low, high = torch.quantile(draws, torch.tensor([0.025, 0.975], dtype=draws.dtype)).tolist()
        return {"value": float(values), "interval": [low, high]}

    total = sums.sum(0)
    estimate, divergence = float(total[0] / total[2]), float(total[1] / total[2])
    every = [value for e, _ in answers for value in e]
    # What the same tokens give with (r - 1) added, whose expectation is nothing: r is the
    # ratio native : mapped. Never negative and less noisy, but not what an audit reports.
    steadier = sum(math.exp(-value) - 1 + value for value in every) / len(every)
    return {
        "answers": len(answers),
        "tokens": int(total[2]),
        "estimate": figure(total[0] / total[2], drawn[:, 0] / drawn[:, 2]),
        "divergence": figure(total[1] / total[2], drawn[:, 1] / drawn[:, 2]),
        "difference": figure(
            (total[0] - total[1]) / total[2], (drawn[:, 0] - drawn[:, 1]) / drawn[:, 2]
        ),
        "relative_difference": (estimate - divergence) / divergence,
        "within_20_percent_or_0.01_nats": abs(estimate - divergence) <= max(0.2 * divergence, 0.01),
        "control_variate_estimate": steadier,
    }


def _texts(path: Path | None) -> Iterator[str]:
    for passage, questions in passages(path, 40, 8):
        for question in questions:
            yield f"{passage}\n\n{question} Answer in three sentences."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=3000, help="at temperature 1, at least")
    parser.add_argument("--greedy-tokens", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=10, help="of each part, at most")
    parser.add_argument(
        "--passages", type=Path, help='.jsonl of {"story", "turns": [{"question"}]}'
    )
    parser.add_argument("--out", type=Path, default=Path("build/drift"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with real_stack({"audit_rate": 0.0, "audit_above_tokens": None}, {}) as stack:
        # The parts above are asynchronous for the workers' sake; Transformers runs in between.
        report = asyncio.run(run(stack, options))
    (options.out / "estimator.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
