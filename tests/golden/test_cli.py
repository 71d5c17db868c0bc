"""The command line: commands, arguments and options, with types and defaults and without help texts."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import typer

from baton.cli.main import app
from tests.golden.golden import check


def described(command: Any, path: str) -> Iterator[str]:
    settings = {
        name: value for name, value in command.context_settings.items() if name != "help_option_names"
    }
    yield " ".join([path, *(f"{name}={value!r}" for name, value in settings.items())])
    hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True) if command.callback else {}
    for parameter in sorted(command.params, key=lambda parameter: str(parameter.name)):
        yield f"  {_parameter(parameter, hints[parameter.name])}"
    if hasattr(command, "list_commands"):
        context = typer.Context(command)
        for name in command.list_commands(context):
            yield from described(command.get_command(context, name), f"{path} {name}")


def _parameter(parameter: Any, hint: Any) -> str:
    """The type is that of the function's argument: typer's own classes differ between its releases."""
    is_option = parameter.param_type_name == "option"
    names = [*parameter.opts, *parameter.secondary_opts] if is_option else [parameter.metavar or "ARGUMENT"]
    variable = f" or {parameter.envvar}" if parameter.envvar else ""
    # Python 3.13 names the module where Path stands.
    kind = inspect.formatannotation(hint.__origin__).replace("pathlib._local.", "pathlib.")
    [info] = hint.__metadata__
    limits = [f" {limit} {value}" for limit in ("min", "max") if (value := getattr(info, limit)) is not None]
    default = str(parameter.default) if isinstance(parameter.default, Path) else parameter.default
    value = "required" if parameter.required else f"= {default!r}"
    return f"{' / '.join(names)}{variable}: {kind}{''.join(limits)} {value}"


def test_commands() -> None:
    check("cli", described(typer.main.get_command(app), "baton"))
