"""The demo: one conversation that changes model twice, with and without its KV cache."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI
from rich.console import Console
from rich.table import Table

from deploy.local import LocalStack
from mapper.demo import model_name
from router.settings import direction as direction_into

DOCUMENT = Path(__file__).with_name("demo_document.txt")
QUESTIONS = (
    "In which year was the line opened?",
    "What was the first engine called?",
    "How was the track carried over the bog? Answer in two sentences.",
    "Why did the railway decline? Answer in two sentences.",
    "What can be seen at the quarry today?",
    "How long does the ride take?",
)
POLICY = {"kind": "turns", "escalate_at": 3, "downgrade_at": 5}
NATIVE_POLICY = "native"
POLICIES = {NATIVE_POLICY: POLICY | {"kv": "native"}}
# No audits while times are taken: both workers share the machine's cores.
QUIET = {"drift": {"audit_rate": 0.0, "audit_above_tokens": None}}
_ANSWER_TOKENS = 48


@dataclass
class Answer:
    """One turn as the client saw it; times in milliseconds."""

    tier: str
    kv: str
    kv_reason: str
    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int
    text: str


def converse(stack: LocalStack, policy: str, console: Console) -> list[Answer]:
    """Runs the six turns in a fresh session, with the workers' own caches flushed before."""
    for worker in stack.workers.values():
        url = f"{worker.config.url}/flush_cache"
        httpx.post(url, params={"timeout": 20}, timeout=30).raise_for_status()
    client = OpenAI(base_url=stack.config.url("gateway") + "/v1", api_key="demo", max_retries=0)
    headers = {"x-session-id": f"demo-{policy}-{time.time_ns()}", "x-baton-policy": policy}
    # A first line of its own keeps the two runs' conversations from sharing any page.
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"Reading room {policy}. Answer from the document."}
    ]
    answers = []
    for number, question in enumerate(QUESTIONS, 1):
        content = question if number > 1 else f"{DOCUMENT.read_text()}\n{question}"
        messages.append({"role": "user", "content": content})
        console.print(f"[dim]{policy} {number}/{len(QUESTIONS)}[/] {question}")
        answers.append(_ask(client, messages, headers))
        console.print(f"  [bold]{answers[-1].tier}[/]: {answers[-1].text.strip()}")
        messages.append({"role": "assistant", "content": answers[-1].text})
    return answers


def _warm_up(stack: LocalStack) -> None:
    """Takes each worker's one-time costs of a first request out of both runs."""
    client = OpenAI(base_url=stack.config.url("gateway") + "/v1", api_key="demo", max_retries=0)
    for tier in stack.workers:
        for words in (40, 300, 800):
            text = "warm up " * words
            for _ in client.chat.completions.create(
                model=tier,
                messages=[{"role": "user", "content": text}],
                max_tokens=2,
                stream=True,
                extra_headers={"x-session-id": f"warm-{tier}-{words}"},
            ):
                pass


def _ask(client: OpenAI, messages: list[dict[str, Any]], headers: dict[str, str]) -> Answer:
    began = time.perf_counter()
    ttft, text, usage = 0.0, [], None
    with client.chat.completions.with_streaming_response.create(
        model="auto",
        messages=messages,
        stream=True,
        stream_options={"include_usage": True},
        temperature=0,
        max_tokens=_ANSWER_TOKENS,
        extra_headers=headers,
    ) as response:
        told = response.headers
        for chunk in response.parse():
            if chunk.choices and chunk.choices[0].delta.content:
                ttft = ttft or time.perf_counter() - began
                text.append(chunk.choices[0].delta.content)
            usage = chunk.usage or usage
    details = usage.prompt_tokens_details
    return Answer(
        tier=told["x-baton-tier"],
        kv=told["x-baton-kv"],
        kv_reason=told["x-baton-kv-reason"],
        ttft_ms=ttft * 1000,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        text="".join(text),
    )


def report(stack: LocalStack, handed_over: list[Answer], native: list[Answer]) -> dict[str, Any]:
    """The content of `report.json`."""
    turns, tier = [], None
    mapped = _mapped_tokens(stack)
    for number, (ours, theirs) in enumerate(zip(handed_over, native, strict=True), 1):
        direction = None
        if tier and ours.tier != tier:
            direction = direction_into(ours.tier)
        tier = ours.tier
        turns.append(
            {
                "turn": number,
                "tier": ours.tier,
                "direction": direction,
                "kv": ours.kv,
                "kv_reason": ours.kv_reason,
                "prompt_tokens": ours.prompt_tokens,
                "cached_tokens": ours.cached_tokens,
                "mapped_tokens": mapped.get(direction, 0),
                "ttft_ms": round(ours.ttft_ms, 1),
                "ttft_ms_native": round(theirs.ttft_ms, 1),
                "saved_ms": round(theirs.ttft_ms - ours.ttft_ms, 1),
            }
        )
    return {
        "pair": f"{model_name('small')}->{model_name('large')}",
        "sglang": version("sglang"),
        "turns": turns,
    }


def _mapped_tokens(stack: LocalStack) -> dict[str, int]:
    """Tokens mapped by direction: each direction happens once in the demo."""
    text = httpx.get(stack.config.url("mapper") + "/metrics", timeout=10).text
    found = {}
    for line in text.splitlines():
        if line.startswith("baton_mapper_tokens_total") and 'origin="mapped"' in line:
            up = f'pair="{model_name("small")}->' in line
            found["up" if up else "down"] = int(float(line.rsplit(" ", 1)[1]))
    return found


def show(result: dict[str, Any], console: Console) -> None:
    table = Table(title="Six turns over one document, with and without KV transfer")
    table.add_column("turn", justify="right")
    table.add_column("tier")
    table.add_column("KV")
    for name in ("prompt", "cached", "mapped"):
        table.add_column(f"{name}\ntokens", justify="right")
    for name in ("TTFT", "native\nTTFT", "saved"):
        table.add_column(f"{name} (s)", justify="right")
    for turn in result["turns"]:
        arrow = {"up": " ↑", "down": " ↓", None: ""}[turn["direction"]]
        table.add_row(
            str(turn["turn"]),
            turn["tier"] + arrow,
            turn["kv"] + (f"\n[dim]{turn['kv_reason']}[/]" if turn["direction"] else ""),
            str(turn["prompt_tokens"]),
            str(turn["cached_tokens"]),
            str(turn["mapped_tokens"] or ""),
            f"{turn['ttft_ms'] / 1000:.2f}",
            f"{turn['ttft_ms_native'] / 1000:.2f}",
            f"{turn['saved_ms'] / 1000:+.2f}" if turn["direction"] else "",
        )
    console.print(table)


def run(stack: LocalStack, folder: Path, console: Console) -> dict[str, Any]:
    """Both runs, the table, and `report.json` in `folder`."""
    _warm_up(stack)
    # Native first: it is also what the gateway's model of prefill time learns from.
    native = converse(stack, NATIVE_POLICY, console)
    handed_over = converse(stack, "default", console)
    result = report(stack, handed_over, native)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(result, indent=1) + "\n")
    show(result, console)
    return result
