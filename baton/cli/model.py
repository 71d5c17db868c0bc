"""`baton model`: make small checkpoints to try things with."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Make checkpoints.")


@app.callback()
def _group() -> None:
    """Keeps `new` a subcommand although it is the only one."""


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; made if it is missing.")],
) -> None:
    """Write a small random checkpoint."""
    typer.echo(folder)
