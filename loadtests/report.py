"""Judges a load test, and writes its report and plot."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadtests.mixed import Result, Run

# Share of the run after which memory must not grow any more, and by how much it may.
_WARM = 0.3
_FLAT = 1.05
# What may stay open: the pools to Redis for sessions and spending, the mapper's idle
# connections, and those of the health checks.
DESCRIPTORS = 32 + 16 + 8 + 8


def summarise(
    run: Run,
    samples: list[dict[str, float]],
    faults: dict[str, list[str]],
    left: dict[str, float],
    metrics: dict[str, float],
) -> dict[str, Any]:
    unexplained = [
        vars(result)
        for result in run.results
        if result.outcome not in ("ok", "left") and not explained(result, faults)
    ]
    times = sorted(r.seconds for r in run.results if r.outcome == "ok")
    ttft = sorted(r.ttft for r in run.results if r.ttft is not None)
    memory = _memory(samples, run.seconds)
    return {
        "seconds": run.seconds,
        "requests": len(run.results),
        "outcomes": dict(Counter(r.outcome for r in run.results)),
        "kv": dict(Counter(r.kv for r in run.results if r.kv)),
        "requests_with_a_fault": len(faults),
        "faults": dict(Counter(kind for kinds in faults.values() for kind in kinds)),
        "redis_outages": len(run.outages),
        "seconds_per_answer": _spread(times),
        "ttft_seconds": _spread(ttft),
        "unexplained": unexplained,
        "left": left,
        "memory": memory,
        "metrics": {name: value for name, value in metrics.items() if name.endswith("_total")},
        "checks": {
            "every_failure_is_explained": not unexplained,
            "nothing_left_running": not any(
                left[name] for name in ("worker_in_flight", "in_flight", "queued", "at_workers")
            ),
            "connections_returned": left["descriptors_more_than_before"] <= DESCRIPTORS,
            "memory_flat": memory["growth"] <= _FLAT,
        },
    }


def explained(result: Result, faults: dict[str, list[str]]) -> bool:
    """A failure needs a fault of its own request, or of those that opened every breaker."""
    if faults.get(result.request_id):
        return True
    return result.outcome == "503" and result.code == "no_worker"


def _memory(samples: list[dict[str, float]], seconds: float) -> dict[str, float]:
    """Medians after warm-up and at the end: single samples jump by what is in flight."""
    warm = [s["rss"] for s in samples if _WARM <= s["at"] / seconds < _WARM + 0.2]
    end = [s["rss"] for s in samples if s["at"] / seconds >= 0.8]
    return {
        "warm_mib": median(warm) / 2**20,
        "end_mib": median(end) / 2**20,
        "growth": median(end) / median(warm),
    }


def _spread(values: list[float]) -> dict[str, float] | None:
    if len(values) < 2:
        return None
    cuts = quantiles(values, n=100)
    return {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98]}


def write(folder: Path, summary: dict[str, Any], run: Run, samples: list[dict[str, float]]) -> None:
    (folder / "report.json").write_text(json.dumps(summary, indent=2))
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (upper, middle, lower) = pyplot.subplots(3, 1, figsize=(9, 9), sharex=True)
    width = max(1.0, run.seconds / 120)
    for outcome in sorted(summary["outcomes"]):
        counts = Counter(int(r.at / width) for r in run.results if r.outcome == outcome)
        at = range(int(run.seconds / width) + 1)
        upper.plot([i * width for i in at], [counts[i] / width for i in at], label=outcome)
    upper.set_ylabel("requests/s by outcome")
    upper.set_yscale("symlog", linthresh=0.1)
    upper.legend(fontsize="small")
    streams = [r for r in run.results if r.ttft is not None]
    middle.plot([r.at for r in streams], [r.ttft for r in streams], ".", markersize=2)
    middle.set_ylabel("TTFT (s)")
    middle.set_yscale("log")
    for start, end in run.outages:
        for axis in (upper, middle):
            axis.axvspan(start, end, alpha=0.2, color="grey")
    lower.plot([s["at"] for s in samples], [s["rss"] / 2**20 for s in samples])
    lower.set_ylabel("gateway RSS (MiB)")
    lower.set_ylim(bottom=0)
    right = lower.twinx()
    right.plot([s["at"] for s in samples], [s["descriptors"] for s in samples], color="tab:orange")
    right.set_ylabel("open descriptors")
    lower.set_xlabel("seconds (grey: Redis away)")
    figure.tight_layout()
    figure.savefig(folder / "report.png", dpi=110)
