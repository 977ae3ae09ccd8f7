"""The `baton` command."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mapper.cli import app as mapper_commands
from mapper.errors import MapperError
from router.offline.cli import app as offline_commands

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
app.registered_commands.extend(offline_commands.registered_commands)
app.registered_groups.extend(offline_commands.registered_groups)
keys_app = typer.Typer(help="API keys of tenants.", no_args_is_help=True)
config_app = typer.Typer(help="The gateway's configuration.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")
app.add_typer(config_app, name="config")


@app.command()
def serve(
    config: Annotated[Path, typer.Option(help="The gateway's YAML file.")],
) -> None:
    """Run the gateway."""
    from router.serve import run
    from router.settings import load

    with _config_errors():
        settings = load(config)
    raise typer.Exit(run(settings))


@config_app.command("check")
def check_config(
    config: Annotated[Path, typer.Argument(help="The gateway's YAML file.")],
) -> None:
    """Validate a configuration: says file, key and what is allowed; starts nothing."""
    from router.settings import load

    with _config_errors():
        settings = load(config)
    tiers = ", ".join(f"{worker.name} ({worker.tier})" for worker in settings.workers)
    typer.echo(f"{config}: good; workers: {tiers}")


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of the configuration, for editors."""
    from router.settings import json_schema

    print(json.dumps(json_schema(), indent=1))


KeysOption = Annotated[Path, typer.Option("--file", help="The gateway's auth.keys_file.")]


@keys_app.command("create")
def create_key(
    tenant: Annotated[str, typer.Argument(help="Whose requests the key makes.")],
    file: KeysOption,
    model: Annotated[
        list[str] | None, typer.Option(help="Model or alias it may use; repeatable; default all.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Policy it may name; repeatable; default all.")
    ] = None,
    days: Annotated[float | None, typer.Option(help="Days until it expires.")] = None,
) -> None:
    """Make a key and print it, once; the file keeps its hash. Running gateways take it up."""
    from router.auth import keys

    expires = datetime.now(UTC) + timedelta(days=days) if days else None
    with _config_errors():
        print(keys.create(file, tenant, models=model, policies=policy, expires=expires))


@keys_app.command("list")
def list_keys(file: KeysOption) -> None:
    """Show keys by id, without their secrets."""
    from router.auth import keys

    table = Table("id", "tenant", "models", "policies", "expires", "revoked")
    with _config_errors():
        for key in keys.list_keys(file):
            table.add_row(
                key.id,
                key.tenant,
                ", ".join(key.models) if key.models is not None else "all",
                ", ".join(key.policies) if key.policies is not None else "all",
                str(key.expires or "never"),
                "yes" if key.revoked else "",
            )
    Console().print(table)


@keys_app.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="As `baton keys list` shows it.")],
    file: KeysOption,
) -> None:
    """End a key. Running gateways refuse it within a moment."""
    from router.auth import keys

    with _config_errors():
        if not keys.revoke(file, key_id):
            typer.echo(f"baton: {file} has no working key {key_id!r}", err=True)
            raise typer.Exit(1)


@contextmanager
def _config_errors() -> Iterator[None]:
    from router.settings import ConfigError

    try:
        yield
    except (ConfigError, ValueError, OSError) as error:
        typer.echo(f"baton: {error}", err=True)
        raise typer.Exit(2) from None


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
    from deploy.demo import QUIET, run

    with _demo_stack(port, folder, QUIET) as stack:
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
def _demo_stack(
    port: int, folder: Path, settings: dict[str, Any] | None = None
) -> Iterator[LocalStack]:
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
        gateway={"policies": POLICIES, **(settings or {})},
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
