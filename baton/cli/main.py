"""Root of the `baton` command: a table of commands, each imported only when it is used.

A command is a module of this package with an attribute `app`, a `typer.Typer`. The module imports slow
packages (torch, the server, ...) inside its functions, so that `--help` and light commands are fast. A test
checks this.
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
    "top": "baton.cli.top",
    "demo": "baton.cli.demo",
    "cache": "baton.cli.cache",
    "doctor": "baton.cli.doctor",
    "model": "baton.cli.model",
    "check": "baton.cli.check",
    "bench": "baton.bench.command",
}

_COMPLETION_OPTIONS = ("install_completion", "show_completion")


class LazyGroup(TyperGroup):
    """Finds commands in COMMANDS. The context is `Any` because its type moved between releases of typer."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, module in COMMANDS.items() if importlib.util.find_spec(module) is not None]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: Any = typer.main.get_command(importlib.import_module(COMMANDS[cmd_name]).app)
        command.name = cmd_name
        # Typer takes each `app` for a root, with a root's options for shell completion.
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
