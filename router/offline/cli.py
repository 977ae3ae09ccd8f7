"""The offline commands: tune, replay, policy check and policy schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import policies
from router.offline.costmodel import DEMO
from router.offline.records import RecordError

app = typer.Typer()
policy_app = typer.Typer(help="Routing policies.", no_args_is_help=True)
app.add_typer(policy_app, name="policy")


@app.command()
def tune(
    source: Annotated[Path, typer.Argument(help="JSONL of turns with both models' outcomes.")],
    out: Annotated[Path, typer.Argument(help="Folder for the report, the scores and policy.yaml.")],
    policy: Annotated[
        Path | None,
        typer.Option(
            help="Policy whose scores and thresholds are set; default: the preset cascade."
        ),
    ] = None,
    large_share: Annotated[
        float | None, typer.Option(min=0, max=1, help="Goal: this share of turns to large.")
    ] = None,
    quality: Annotated[
        float | None, typer.Option(min=0, max=1, help="Goal: this share of large's quality.")
    ] = None,
    guarantee: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Goal: at most this expected loss of quality a session."),
    ] = None,
    small_cost: Annotated[
        float, typer.Option(min=0, max=1, help="Cost of a small turn; a large one costs 1.")
    ] = 0.2,
    prompt_logprob: Annotated[
        bool,
        typer.Option(help="Give the policy the classifier that reads prompt log-probabilities."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the split into train, calibrate and test.")] = 0,
) -> None:
    """Learn when the large model is worth it, judge that on held-out sessions, set thresholds.

    SOURCE has one object a line: {"id", "session", "task", "text", "signals": {"low_logprob",
    "mean_logprob", "margin", "tokens"}, "prompt_logprob", "small": {"quality": 0..1}, "large":
    {"quality": 0..1}}; all but the two outcomes may be missing. A decision log with outcomes
    added will do; `baton outcomes` makes such a file from task questions.

    Half of the sessions train the scores, a fifth sets thresholds, the rest judges them beside
    an oracle, shuffled controls and single signals. With --guarantee the threshold comes from
    conformal risk control: the loss per session holds on average over new sessions, provided
    these are exchangeable with the sessions it was set on. Changed traffic voids it.
    """
    from router.offline.tune import Goal
    from router.offline.tune import tune as run

    given = [value for value in (large_share, quality, guarantee) if value is not None]
    if len(given) > 1:
        raise typer.BadParameter("choose one of --large-share, --quality and --guarantee")
    goal = Goal(large_share if given else 0.3, quality, guarantee)
    with _reported():
        found = run(
            source, out, policy or preset("cascade"), goal, small_cost, prompt_logprob, seed
        )
    typer.echo((out / "report.md").read_text())
    typer.echo(
        f"Written to {out}: report.md, report.json, curves.png, policy.yaml; set: ", nl=False
    )
    typer.echo(json.dumps(found["written"]))


@app.command()
def replay(
    log: Annotated[Path, typer.Argument(help="Decision log, or JSONL of turns.")],
    policy: Annotated[
        list[Path], typer.Option(help="Policy file or preset; repeat to compare with the first.")
    ],
    costs: Annotated[
        Path, typer.Option(help="Cost model: prices, speeds, what maps cost and keep.")
    ] = DEMO,
    out: Annotated[Path | None, typer.Option(help="JSON with every turn of every policy.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Figures for scripts.")] = False,
) -> None:
    """What would have happened: money, seconds, quality and switches under each policy.

    Sessions are gone through turn by turn, without chance: who holds how much of the
    conversation, what is prefilled, mapped and decoded. Answers stay as long as they were.
    Quality needs the outcome of both models, "quality": {"small": 0..1, "large": 0..1}.
    """
    from router.offline import replay as replays

    with _reported():
        found = replays.replay(log, [_policy_file(name) for name in policy], costs, out)
    if json_output:
        print(json.dumps(found, indent=1))
    else:
        Console().print(replays.table(found))


@policy_app.command("check")
def check_policy(
    file: Annotated[Path, typer.Argument(help="Policy file, or a preset's name.")],
) -> None:
    """Validate a policy and run its probe prompts; exit status 1 when one is not as expected."""
    from policies.check import check

    with _reported():
        policy = policies.from_file(_policy_file(file))
    checked = check(policy)
    shown = Table("probe", "tier", "kv", "reason", "")
    for one in checked:
        decision = one.decision
        shown.add_row(
            one.probe.text[:50], decision.tier, decision.kv, decision.reason,
            "; ".join(one.differences) or "as expected",
        )  # fmt: skip
    if checked:
        Console().print(shown)
    wrong = sum(bool(one.differences) for one in checked)
    typer.echo(
        f"{file}: {policy.kind}, version {policy.version}, {len(checked)} probes, {wrong} wrong"
    )
    raise typer.Exit(1 if wrong else 0)


@policy_app.command("schema")
def policy_schema() -> None:
    """Print the JSON schema of policy files, for editors."""
    print(json.dumps(policies.json_schema(), indent=1))


def preset(name: str) -> Path:
    return Path(str(files("policies") / "presets" / f"{name}.yaml"))


def _policy_file(name: Path) -> Path:
    return name if name.exists() or not preset(str(name)).exists() else preset(str(name))


@contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except (policies.PolicyError, RecordError, OSError, ValueError) as error:
        typer.echo(f"baton: {error}", err=True)
        raise typer.Exit(2) from None
