"""Time to first token with audits on and off, under steady load on real workers.

    python -m loadtests.drift_ttft --minutes 9 --out build/drift

Users hold conversations that begin with the small model and go up, and read for some seconds
after each answer. Rounds in which every lossy turn is audited alternate with rounds in which
none is, in one run on one stack; what differs is the policy's audit rate alone. Two rounds make
a pair: in both the same users ask the same questions after the same pauses, and which comes
first is drawn and then turned round (AB BA). Ratios of medians and of means, with 95 % intervals
bootstrapped over sessions, are told for each kind of turn and for all. The first round warms up
and is left out. Writes ttft.json, ttft.md and ttft.png, and fails when no audit has run.
Starting the stack comes on top of --minutes, and takes about two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from loadtests.paired import Sample, compare, within
from loadtests.realstack import Client, fresh, passages, real_stack

AUDITED, UNAUDITED = "audited", "unaudited"
SETTINGS = {
    "budget_nats": 1e9,
    "audit_rate": 0.0,
    "audit_rates": {AUDITED: 1.0},
    "audit_above_tokens": None,
    "audit_piece_tokens": 32,
    "ahead_above": None,
}
_PLAIN = {"kind": "pinned", "tier": "large"}
# Each turn's tier, and what kind of turn it is.
_TURNS = (
    ("small", "first"),
    ("small", "plain"),
    ("large", "switch"),
    ("large", "after the switch"),
    *[("large", "plain")] * 16,
)
# Of a made-up passage, so that a switch has some 500 tokens to carry over.
_FACTS = 24
_LIMIT = 1.05


@dataclass
class Found:
    samples: list[Sample] = field(default_factory=list)
    # By arm: what became of its turns' KV, and of their audits.
    kv: dict[str, Counter[str]] = field(default_factory=dict)
    audits: dict[str, Counter[str]] = field(default_factory=dict)


async def converse(
    client: Client, arm: str, pair: str, material: list, options: argparse.Namespace
) -> tuple[str, list[Sample]]:
    """One user's session, and the same in the other arm but for its name."""
    chance = random.Random(f"{options.seed} {pair}")
    passage, questions = chance.choice(material)
    session, messages, samples = fresh("talk"), [], []
    await asyncio.sleep(chance.uniform(0, options.pause))
    for index, (tier, kind) in enumerate(_TURNS):
        question = questions[index]
        content = question if index else f"({session})\n{passage}\n\n{question}"
        messages.append({"role": "user", "content": content})
        reply = await client.turn(tier, messages, session, arm, options.tokens)
        samples.append(Sample(pair, kind, arm, reply.ttft))
        messages.append({"role": "assistant", "content": reply.text})
        await asyncio.sleep(chance.uniform(0.5, 1.5) * options.pause)
    return session, samples


async def one_round(
    client: Client, arm: str, number: int, material: list, options: argparse.Namespace,
    found: Found,
) -> None:  # fmt: skip
    """All users at once."""
    talks = await asyncio.gather(
        *(
            converse(client, arm, f"{number}-{user}", material, options)
            for user in range(options.users)
        )
    )
    for session, samples in talks:
        timeline = (await client.session(session))["timeline"]
        found.samples += samples
        found.kv.setdefault(arm, Counter()).update(turn["kv"] for turn in timeline)
        found.audits.setdefault(arm, Counter()).update(
            turn["audit"] for turn in timeline if turn["epoch"]
        )
        # Ends its audits too: the next round has none of them.
        await client.delete(session)


async def run(stack: Any, options: argparse.Namespace) -> dict[str, Any]:
    client = Client(stack)
    facts = _FACTS if options.passages is None else len(_TURNS)
    material = passages(options.passages, 20, facts)
    chance = random.Random(options.seed)
    found, number, longest = Found(), 0, 0.0
    until = time.monotonic() + options.minutes * 60
    order = [AUDITED, UNAUDITED]
    chance.shuffle(order)
    try:
        await one_round(client, UNAUDITED, -1, material, options, Found())
        while number < 2 or time.monotonic() + longest < until:
            began = time.monotonic()
            for arm in order:
                await one_round(client, arm, number, material, options, found)
            longest = max(longest, time.monotonic() - began)
            number += 1
            if number % 2:
                order.reverse()
            else:
                chance.shuffle(order)
            print(f"pair {number}: audits {dict(found.audits[AUDITED])}", flush=True)
        exposition = (await client.http.get(f"{client.gateway}/metrics")).text
    finally:
        await client.close()
    return {**summarise(found, exposition), "users": options.users, "pause": options.pause}


def summarise(found: Found, exposition: str) -> dict[str, Any]:
    # A turn that said nothing has no first token, and is left out with its pair.
    silent = {sample.pair for sample in found.samples if not sample.seconds}
    samples = [sample for sample in found.samples if sample.pair not in silent]
    ratios = compare(samples, AUDITED, UNAUDITED)
    pieces = {
        outcome: dict.fromkeys(("count", "sum"), 0.0) for outcome in ("done", "aborted", "failed")
    }
    for family in text_string_to_metric_families(exposition):
        for name, labels, value, *_ in family.samples:
            unit = name.removeprefix("baton_audit_piece_seconds_")
            if unit in ("count", "sum"):
                pieces[labels["outcome"]][unit] += value
    audits = {arm: dict(counts) for arm, counts in found.audits.items()}
    return {
        "ratios": ratios,
        "within_5_percent": {
            statistic: within(ratios["all"][f"ratio_of_{statistic}s"], _LIMIT)
            for statistic in ("median", "mean")
        },
        "audits": audits,
        "audits_ran": sum(
            audits[AUDITED].get(outcome, 0) for outcome in ("measured", "reanchored")
        ),
        "audit_pieces": pieces,
        "kv": {arm: dict(counts) for arm, counts in found.kv.items()},
        "pairs_left_out": len(silent),
        "samples": [asdict(sample) for sample in samples],
    }


def table(report: dict[str, Any]) -> str:
    lines = [
        "| turns | | median s, off | on | ratio (95 %) | mean s, off | on | ratio (95 %) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, ratios in report["ratios"].items():
        cells = [kind, str(ratios[AUDITED]["turns"]) if AUDITED in ratios else ""]
        for statistic in ("median", "mean"):
            for arm in (UNAUDITED, AUDITED):
                cells.append(f"{ratios[arm][f'{statistic}_seconds']:.3f}" if arm in ratios else "")
            ratio = ratios[f"ratio_of_{statistic}s"]
            low, high = ratio["interval"]
            cells.append(f"{ratio['value']:.3f} ({low:.3f} to {high:.3f})")
        lines.append(f"| {' | '.join(cells)} |")
    verdicts = ", ".join(f"{name} {word}" for name, word in report["within_5_percent"].items())
    pieces = report["audit_pieces"]
    lines += [
        "",
        f"Within 5 % of audits off, over all turns: {verdicts}.",
        f"Audits with audits on: {report['audits'][AUDITED]}; off: "
        f"{report['audits'][UNAUDITED]}. Pieces done: {pieces['done']['count']:.0f} "
        f"({pieces['done']['sum']:.1f} s), aborted for a user: {pieces['aborted']['count']:.0f} "
        f"({pieces['aborted']['sum']:.1f} s).",
    ]
    return "\n".join(lines) + "\n"


def plot(path: Path, report: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2))
    kinds = [kind for kind in report["ratios"] if kind != "all"]
    for offset, arm in ((-0.17, UNAUDITED), (0.17, AUDITED)):
        seconds = [
            [s["seconds"] for s in report["samples"] if (s["kind"], s["arm"]) == (kind, arm)]
            for kind in kinds
        ]
        boxes = left.boxplot(
            seconds, positions=[at + offset for at in range(len(kinds))], widths=0.3,
            patch_artist=True, manage_ticks=False, medianprops={"color": "black"},
        )  # fmt: skip
        colour = {UNAUDITED: "lightgrey", AUDITED: "tab:orange"}[arm]
        for box in boxes["boxes"]:
            box.set_facecolor(colour)
        left.bar(0, 0, color=colour, label=arm)
    left.set_xticks(range(len(kinds)), kinds)
    left.set_ylabel("seconds to first token")
    left.set_yscale("log")
    left.legend()
    names = list(report["ratios"])
    for offset, statistic in ((-0.1, "median"), (0.1, "mean")):
        ratios = [report["ratios"][name][f"ratio_of_{statistic}s"] for name in names]
        values = [ratio["value"] for ratio in ratios]
        ends = [[abs(r["value"] - r["interval"][side]) for r in ratios] for side in (0, 1)]
        at = [place + offset for place in range(len(names))]
        right.errorbar(at, values, yerr=ends, fmt="o", capsize=3, label=statistic)
    right.axhline(1, color="grey", linewidth=0.8)
    right.axhline(_LIMIT, color="red", linewidth=0.8, linestyle="--")
    right.set_xticks(range(len(names)), names)
    right.set_ylabel("audits on / off (95 %)")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def write(folder: Path, report: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ttft.json").write_text(json.dumps(report, indent=1))
    (folder / "ttft.md").write_text(table(report))
    plot(folder / "ttft.png", report)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="of measuring; two pairs of rounds at least"
    )
    parser.add_argument("--users", type=int, default=3)
    parser.add_argument("--pause", type=float, default=4.0, help="mean seconds between turns")
    parser.add_argument("--tokens", type=int, default=8, help="of an answer, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--passages", type=Path, help='.jsonl of {"story", "turns": [{"question"}]}'
    )
    parser.add_argument("--out", type=Path, default=Path("build/drift"))
    options = parser.parse_args()
    with real_stack(SETTINGS, {AUDITED: _PLAIN, UNAUDITED: _PLAIN}) as stack:
        report = asyncio.run(run(stack, options))
    write(options.out, report)
    print(table(report))
    if not report["audits_ran"]:
        raise SystemExit("no audit has run while audits were on: the ratios show nothing")


if __name__ == "__main__":
    main()
