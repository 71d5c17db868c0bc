"""Prints docs/settings.md: the options of all commands, as the code declares them.

    .venv/bin/python scripts/settings_page.py > docs/settings.md

A test compares the page with what this prints.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import typer
from msgspec import inspect as types

from baton.cli import route, serve_settings
from baton.cli.main import app
from baton.cli.settings import Command, Setting, helps_of

HEAD = """# Settings

`scripts/settings_page.py` prints this page from the code. [operations.md](operations.md#settings) explains
what belongs together.

`baton serve` and `baton route` read each setting from the command line, then the environment, then one TOML
file, and otherwise use the default. `--show-config` prints each value with its origin. An empty variable
counts as unset. In a variable, the texts of a list have white space between them. The other commands have
options only."""
COMMANDS = {"serve": serve_settings.COMMAND, "route": route.COMMAND}
KINDS = {types.BoolType: "flag", types.IntType: "integer", types.FloatType: "number", types.DictType: "list"}


def cell(text: str) -> str:
    return re.sub(r"([|*<\[_])", r"\\\1", text)


def code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def kind_of(one: Setting) -> str:
    match one.type:
        case types.LiteralType(values=values):
            return ", ".join(map(code, sorted(values)))
        case types.StructType():
            return "table, or JSON"
        case types.VarTupleType():
            return "list"
    return KINDS.get(type(one.type), "text")


def layered(command: Command) -> Iterator[str]:
    """Tables of a command whose settings come from several origins."""
    yield f"The variable of a key is `{command.prefix}` and the key in capitals."
    yield f"`--config` or `{command.prefix}CONFIG` names the file."
    for section, names in command.sections.items():
        yield from [
            "",
            f"### `[{section}]` of {command.name}",
            "",
            "| key | option | type | meaning |",
            "|---|---|---|---|",
        ]
        for one in map(command.settings.__getitem__, names):
            option = one.option.metavar if one.option.is_argument else one.flag
            yield f"| {code(one.name)} | {code(str(option))} | {kind_of(one)} | {cell(help_of(one))} |"


def tables() -> Iterator[str]:
    """A table for each setting that is a table itself, and whose keys are explained."""
    settings = {one.name: one for command in COMMANDS.values() for one in command.settings.values()}
    for one in settings.values():
        if isinstance(one.type, types.StructType) and (texts := helps_of(one.type.cls)):
            yield from ["", f"## `{one.name}`", "", cell(help_of(one)), ""]
            yield from ["| key | default | meaning |", "|---|---|---|"]
            for field in msgspec.structs.fields(one.type.cls):
                yield f"| {code(field.name)} | {field.default} | {cell(texts[field.name])} |"


def help_of(one: Setting) -> str:
    """The help, without a default that is a table."""
    return one.help.split(" (default {")[0]


def plain(command: Any) -> Iterator[str]:
    """Table of a command's arguments and options."""
    yield from ["| option | default | meaning |", "|---|---|---|"]
    for parameter in command.params:
        names = ", ".join(code(name) for name in [*parameter.opts, *parameter.secondary_opts])
        if parameter.param_type_name != "option":
            names = code(parameter.metavar or parameter.name.upper())
        default = "required" if parameter.required else parameter.default
        yield f"| {names} | {'' if default is None else default} | {cell(parameter.help or '')} |"


def sections(command: Any, path: str) -> Iterator[str]:
    if hasattr(command, "list_commands"):
        context = typer.Context(command)
        for name in command.list_commands(context):
            yield from sections(command.get_command(context, name), f"{path} {name}")
        return
    yield from ["", f"## {path}", "", " ".join((command.help or "").split("\n\n")[0].split()), ""]
    layers = COMMANDS.get(path.removeprefix("baton "))
    yield from plain(command) if layers is None else layered(layers)


if __name__ == "__main__":
    print(HEAD)
    print("\n".join([*sections(typer.main.get_command(app), "baton"), *tables()]))
