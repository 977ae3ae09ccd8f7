"""The `baton` command."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from mapper.cli import app as mapper_commands
from mapper.errors import MapperError

if TYPE_CHECKING:
    from deploy.local import LocalStack

PortOption = Annotated[
    int, typer.Option(help="The gateway's port; mapper, Redis and workers take the next four.")
]

app = typer.Typer(
    help="Baton routes each turn of a conversation to a small or a large model and hands over "
    "the KV cache when it switches. Start with `baton demo`, then `baton up`.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.registered_commands.extend(mapper_commands.registered_commands)


@app.command()
def serve(
    config: Annotated[Path, typer.Option(help="The gateway's YAML file.")],
) -> None:
    """Run the gateway."""
    from router.serve import run
    from router.settings import ConfigError, load

    try:
        settings = load(config)
    except ConfigError as error:
        typer.echo(f"baton: {error}", err=True)
        raise typer.Exit(2) from None
    run(settings)


@app.command()
def up(
    port: PortOption = 8080,
    folder: Annotated[Path, typer.Option(help="Logs and the generated gateway.yaml.")] = Path(
        "build/up"
    ),
) -> None:
    """Run the whole demo stack on this machine until Ctrl-C: Redis, two workers, mapper, gateway."""
    with _demo_stack(port, folder) as stack:
        url = stack.config.url("gateway")
        _console().print(
            f"[green]Baton is up[/] at {url}/v1 (metrics: {url}/metrics, logs: {folder}).\n"
            f"Any OpenAI client will do; models: auto, small, large. For example:\n\n"
            f"  curl {url}/v1/chat/completions -H 'content-type: application/json' -d \\\n"
            f"""    '{{"model": "auto", "messages": [{{"role": "user", "content": "Hello!"}}]}}'\n\n"""
            "Ctrl-C stops everything."
        )
        ended = stack.wait()
        _console().print(f"[red]{ended} has ended[/]; see {folder}/{ended}.log. Stopping the rest.")
        raise typer.Exit(1)


@app.command()
def demo(
    port: PortOption = 8080,
    folder: Annotated[Path, typer.Option(help="Where report.json and the logs go.")] = Path(
        "build/demo"
    ),
) -> None:
    """Hold one conversation twice, with and without KV transfer, and show what a switch costs."""
    from deploy.demo import run

    with _demo_stack(port, folder) as stack:
        run(stack, folder, _console())
    _console().print(
        f"Written: {folder}/report.json. To talk to the models yourself: [bold]make up[/], then "
        f"http://127.0.0.1:{port}/v1 with any OpenAI client (model: auto, small or large)."
    )


@app.command()
def doctor(
    json_output: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Check what Baton needs on this machine, and say what to do where something is missing."""
    from deploy.doctor import report

    found = report()
    if json_output:
        print(json.dumps(found, indent=1))
    else:
        for check in found["checks"]:
            mark = "[green]ok  [/]" if check["ok"] else "[red]no  [/]"
            remedy = "" if check["ok"] else f"\n      [yellow]{check['remedy']}[/]"
            _console().print(f"{mark}{check['name']}: {check['found']}{remedy}", highlight=False)
    raise typer.Exit(0 if found["ok"] else 1)


@contextmanager
def _demo_stack(port: int, folder: Path) -> Iterator[LocalStack]:
    """The demo stack, with Ctrl-C and SIGTERM as ways to leave it."""
    from deploy.demo import POLICIES, POLICY
    from deploy.local import LocalConfig, LocalError, LocalStack
    from mapper.demo.artifacts import demo_artifacts
    from mapper.demo.models import demo_models

    console = _console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = LocalConfig(
        folder=folder.resolve(),
        models=demo_models(),
        artifacts=list(demo_artifacts().values()),
        policy=POLICY,
        base_port=port,
        gateway={"policies": POLICIES},
    )
    try:
        with console.status("starting") as status:
            stack = LocalStack(config, progress=lambda part: status.update(f"starting: {part}"))
            stack.__enter__()
    except (LocalError, MapperError) as error:
        typer.echo(f"baton: {error}", err=True)
        raise typer.Exit(1) from None
    try:
        yield stack
    except KeyboardInterrupt:
        console.print("stopping")
    finally:
        stack.stop()


def _console() -> Console:
    return Console(stderr=True, highlight=False)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
