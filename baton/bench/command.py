"""`baton bench`: above the other commands, so that it may drive them; `baton.cli.main` knows it by name."""

import typer

from baton.bench.compare.command import compare

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Measure this machine: Baton beside its peers."""


app.command()(compare)
