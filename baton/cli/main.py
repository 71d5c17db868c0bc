"""`baton COMMAND`: a table of commands, each imported only when it is asked for.

A command is a module of this package with an attribute `app`, a `typer.Typer`. The module itself stays light:
what takes long to import (torch, the server, ...) is imported inside its functions, so that `--help` and the
commands that need none of it answer at once. A test holds us to it.
"""

import importlib
import importlib.util
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import baton

COMMANDS = {
    "serve": "baton.cli.serve",
    "route": "baton.cli.route",
    "up": "baton.cli.up",
    "demo": "baton.cli.demo",
    "doctor": "baton.cli.doctor",
    "model": "baton.cli.model",
    "sim": "baton.cli.sim",
    "check": "baton.cli.check",
    "bench": "baton.bench.command",  # By name only: benchmarks are above the commands.
}

_COMPLETION_OPTIONS = ("install_completion", "show_completion")


class LazyGroup(TyperGroup):
    """Finds commands in COMMANDS. `Any` for the context: its type moved between releases of typer."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, module in COMMANDS.items() if importlib.util.find_spec(module) is not None]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: Any = typer.main.get_command(importlib.import_module(COMMANDS[cmd_name]).app)
        command.name = cmd_name
        # Each `app` is a root of its own to typer, with a root's options for shell completion.
        command.params = [p for p in command.params if p.name not in _COMPLETION_OPTIONS]
        return command


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"baton {baton.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Move KV caches between LLM engines: serve a model, route between engines, bring a whole system up."""
