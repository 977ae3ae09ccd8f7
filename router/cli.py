"""The `baton` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mapper.cli import app as mapper_commands

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


def main() -> None:
    app()


if __name__ == "__main__":
    main()
