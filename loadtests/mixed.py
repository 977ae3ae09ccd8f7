"""Mixed load with random faults: streams, whole answers, clients that leave, Redis that goes.

    python -m loadtests.mixed --minutes 10

Everything runs on loopback in processes of its own. Writes report.json and report.png, and
ends with 1 when an answer was not explained by a fault, or something was left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from loadtests import report
from tests.redis_server import RedisServer

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
]
SERVE = "import sys; from router import serve, settings; sys.exit(serve.run(settings.load(sys.argv[1])))"


@dataclass
class Result:
    """How one request ended, for its client."""

    at: float
    seconds: float
    request_id: str
    # ok, framed (an error as a stream's last event), left, broken, or the status.
    outcome: str
    code: str | None = None
    kv: str | None = None
    ttft: float | None = None


@dataclass
class Run:
    url: str
    control: str
    seconds: float
    pause: float
    started: float = field(default_factory=time.monotonic)
    results: list[Result] = field(default_factory=list)
    # (start, end) on this run's clock, in which Redis was away.
    outages: list[tuple[float, float]] = field(default_factory=list)

    @property
    def now(self) -> float:
        return time.monotonic() - self.started

    @property
    def over(self) -> bool:
        return self.now > self.seconds


async def session(run: Run, client: httpx.AsyncClient, number: int, chance: random.Random) -> None:
    """Conversations one after the other; a failed turn is asked again, as people do."""
    await asyncio.sleep(chance.uniform(0, run.pause))
    count = 0
    while not run.over:
        count += 1
        headers = {"x-session-id": f"load-{number}-{count}"} if chance.random() < 0.5 else {}
        messages: list[dict[str, Any]] = []
        for _ in range(chance.randint(2, 7)):
            text = " ".join(chance.choices(WORDS, k=chance.randint(5, 120)))
            messages.append({"role": "user", "content": text})
            answer = await turn(run, client, messages, headers, chance)
            if run.over:
                return
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})
            await asyncio.sleep(chance.expovariate(1 / run.pause))


async def turn(
    run: Run,
    client: httpx.AsyncClient,
    messages: list[dict[str, Any]],
    headers: dict[str, str],
    chance: random.Random,
) -> str | None:
    request_id = f"load-{chance.getrandbits(64):x}"
    stream = chance.random() < 0.8
    leaves_after = chance.uniform(0.0, 1.0) if chance.random() < 0.05 else None
    result = Result(run.now, 0.0, request_id, "ok")
    started = time.monotonic()
    body = {"model": "auto", "messages": messages, "stream": stream, "max_tokens": 40}
    answer = None
    try:
        async with asyncio.timeout(leaves_after):
            answer = await ask(run, client, body, {**headers, "x-request-id": request_id}, result)
    except TimeoutError:
        result.outcome = "left"
    except httpx.HTTPError as error:
        result.outcome, result.code = "broken", type(error).__name__
    result.seconds = time.monotonic() - started
    run.results.append(result)
    return answer


async def ask(
    run: Run,
    client: httpx.AsyncClient,
    body: dict[str, Any],
    headers: dict[str, str],
    result: Result,
) -> str | None:
    started = time.monotonic()
    async with client.stream(
        "POST", f"{run.url}/v1/chat/completions", json=body, headers=headers
    ) as response:
        result.kv = response.headers.get("x-baton-kv")
        if response.status_code != 200:
            result.outcome = str(response.status_code)
            result.code = json.loads(await response.aread())["error"]["code"]
            return None
        if not body["stream"]:
            return json.loads(await response.aread())["choices"][0]["message"]["content"]
        text, done = [], False
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if result.ttft is None:
                result.ttft = time.monotonic() - started
            if line == "data: [DONE]":
                done = True
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                result.outcome, result.code = "framed", str(chunk["error"]["code"])
                return None
            text.append(chunk["choices"][0]["delta"].get("content") or "")
        if not done:
            result.outcome = "silent end"
            return None
        return "".join(text)


async def redis_comes_and_goes(run: Run, server: RedisServer, chance: random.Random) -> None:
    while True:
        await asyncio.sleep(chance.uniform(20, 60))
        start = run.now
        if chance.random() < 0.5:
            await asyncio.to_thread(server.stop)
            await asyncio.sleep(chance.uniform(1, 5))
            await asyncio.to_thread(server.start)
        else:
            server.freeze()
            await asyncio.sleep(chance.uniform(1, 3))
            server.freeze(False)
        run.outages.append((start, run.now))


async def sample(run: Run, pid: int, samples: list[dict[str, float]]) -> None:
    while True:
        with open(f"/proc/{pid}/statm") as file:
            pages = int(file.read().split()[1])
        samples.append(
            {
                "at": run.now,
                "rss": pages * os.sysconf("SC_PAGE_SIZE"),
                "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
            }
        )
        await asyncio.sleep(1)


async def load(run: Run, server: RedisServer, pid: int, sessions: int, seed: int) -> list[dict]:
    samples: list[dict[str, float]] = []
    limits = httpx.Limits(max_connections=sessions * 2, keepalive_expiry=2.0)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:
        background = [
            asyncio.create_task(sample(run, pid, samples)),
            asyncio.create_task(redis_comes_and_goes(run, server, random.Random(seed))),
        ]
        await asyncio.gather(
            *(session(run, client, n, random.Random(f"{seed}-{n}")) for n in range(sessions))
        )
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
    return samples


def metrics(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics").text
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            found[one.name] += one.value
            if "status" in one.labels and one.name == "baton_kv_transfer_total":
                found[f"{one.name}.{one.labels['status']}"] += one.value
    return dict(found)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def settle(run: Run, pid: int, before: int, seconds: float = 20.0) -> dict[str, float]:
    """What is left once nobody asks any more; waits for idle connections to expire."""
    deadline = time.monotonic() + seconds
    while True:
        seen = metrics(run.url)
        left = {
            "worker_in_flight": seen["baton_worker_in_flight"],
            "in_flight": seen["baton_in_flight"],
            "queued": seen["baton_queued"],
            "at_workers": httpx.get(f"{run.control}/active").json(),
            "descriptors_more_than_before": descriptors(pid) - before,
        }
        descriptors_back = left["descriptors_more_than_before"] <= report.DESCRIPTORS
        settled = not any(list(left.values())[:4]) and descriptors_back
        if settled or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--pause", type=float, default=4.0, help="mean seconds between turns")
    parser.add_argument("--fault-rate", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/loadtest"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        summary = execute(options, Path(folder))
    print(
        json.dumps(
            {name: summary[name] for name in ("outcomes", "left", "memory", "checks")}, indent=2
        )
    )
    sys.exit(0 if all(summary["checks"].values()) else 1)


def execute(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    fleet = subprocess.Popen(
        [sys.executable, "-m", "loadtests.fleet", f"--fault-rate={options.fault_rate}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    server = RedisServer().start()
    gateway = None
    try:
        urls = json.loads(fleet.stdout.readline())
        port = _free_port()
        config = folder / "baton.yaml"
        config.write_text(yaml.safe_dump(_settings(urls, server.url, port)))
        with open(options.out / "gateway.log", "w") as log:
            gateway = subprocess.Popen([sys.executable, "-c", SERVE, str(config)], stderr=log)
        url = f"http://127.0.0.1:{port}"
        _wait_ready(url)
        before = descriptors(gateway.pid)
        run = Run(url, urls["control"], options.minutes * 60, options.pause)
        samples = asyncio.run(load(run, server, gateway.pid, options.sessions, options.seed))
        httpx.post(f"{urls['control']}/faults/off")
        left = settle(run, gateway.pid, before)
        faults = httpx.get(f"{urls['control']}/faults").json()
        summary = report.summarise(run, samples, faults, left, metrics(url))
        gateway.terminate()
        summary["checks"]["clean_exit"] = gateway.wait(60) == 0
        report.write(options.out, summary, run, samples)
        return summary
    finally:
        if gateway is not None:
            gateway.kill()
        with suppress(OSError):
            fleet.stdin.close()
        try:
            fleet.wait(20)
        except subprocess.TimeoutExpired:
            fleet.kill()
        server.close()


def _settings(urls: dict[str, str], redis_url: str, port: int) -> dict[str, Any]:
    return {
        "port": port,
        "redis_url": redis_url,
        "mapper_url": urls["mapper"],
        "policy": {"kind": "turns", "escalate_at": 3, "downgrade_at": 5},
        "workers": [
            {
                "name": name,
                "tier": name.partition("-")[0],
                "url": url,
                "model": f"{name.partition('-')[0]}-model",
            }
            for name, url in urls.items()
            if name not in ("mapper", "control")
        ],
        # Longer than a busy machine may pause, and shorter than the scripted stall.
        "timeouts": {"idle_seconds": 6.0, "drain_delay_seconds": 0.0},
        "transfers": {"deadline_ms": 500},
        "pool": {"health_seconds": 1.0, "breaker_seconds": 2.0},
    }


def _wait_ready(url: str) -> None:
    for _ in range(600):
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError("the gateway did not become ready")


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
