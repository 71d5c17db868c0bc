"""Settings of a command: command line over environment over one TOML file over defaults.

Fields of structs declare them (`baton.core.option`). They are typed and checked, and each keeps its origin
for `--show-config`.

    command line   --block-size 32
    environment    BATON_BLOCK_SIZE=32
    file           [cache]
                   block_size = 32

Only this package reads the environment.
"""

import difflib
import inspect
import json
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import msgspec
import typer
from msgspec import inspect as types

from baton.core.errors import ConfigError, UserError
from baton.core.json_text import NotJson, decode_json
from baton.core.limited_file import read_limited
from baton.core.option import Option
from baton.core.validation import explain

EXIT_BAD_CONFIG = 2
MAX_CONFIG_BYTES = 1 << 20

_PANEL = "Configuration"
_BOOLEANS = dict.fromkeys(("t", "y", "yes", "on"), True) | dict.fromkeys(("f", "n", "no", "off"), False)
_FILES = ("_file", "_ca", "_cert", "tls_key", "_log")  # Ends of the names of settings that name a file.
_FLAGS = {types.BoolType: bool, types.IntType: int, types.FloatType: float}
Kind = TypeVar("Kind", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Setting:
    """One option, and the field of a struct that it sets."""

    name: str
    field: str
    kind: Any
    type: types.Type  # The kind without None.
    default: Any  # None: none, or the option may stay unset.
    option: Option
    text: str  # Help, without the default.

    @property
    def is_list(self) -> bool:
        return isinstance(self.type, types.VarTupleType | types.DictType)

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def metavar(self) -> str | None:
        """What stands for the value in help; None: the type."""
        if isinstance(self.type, types.StructType):
            return "JSON"
        return "FILE" if self.name.endswith(_FILES) else self.option.metavar

    @property
    def help(self) -> str:
        return self.text if self.text.endswith(".") else f"{self.text} (default {_shown(self.default)})."

    def parameter(self, panel: str | None) -> inspect.Parameter:
        """The option with default None: if it is not given, it must not hide the environment or the file."""
        kind = _FLAGS.get(type(self.type), list[str] if self.is_list else str)
        return _parameter(self.name, kind | None, self._info(self.help, panel, kind))

    def plain_parameter(self) -> inspect.Parameter:
        """The option of a command that reads no other origins, with its default."""
        hint = self.kind.__origin__
        is_optional = type(None) in get_args(hint)
        inner = next(one for one in get_args(hint) if one is not type(None)) if is_optional else hint
        kind = _FLAGS.get(type(self.type), inner)
        has_default = self.default is not None
        info = self._info(self.text.rstrip(".") + ".", None, kind, show_default=has_default)
        default = self.default if is_optional or has_default else inspect.Parameter.empty
        return _parameter(self.name, kind | None if is_optional else kind, info, default)

    def _info(self, help: str, panel: str | None, kind: Any, *, show_default: bool = False) -> Any:
        shown: dict[str, Any] = {"help": help, "show_default": show_default, "metavar": self.metavar}
        if self.option.is_argument:
            return typer.Argument(**shown)
        names = [self.flag]
        if kind is bool and not (show_default and self.default is False):
            names[0] += f"/--no-{self.flag[2:]}"
        names += filter(None, [self.option.short])
        shown |= {"min": getattr(self.type, "ge", None), "max": getattr(self.type, "le", None)}
        return typer.Option(
            *names, rich_help_panel=panel, envvar=self.option.variable, show_envvar=False, **shown
        )

    def convert(self, value: Any) -> Any:
        """The value of the field. Raises NotJson, ConfigError or msgspec.ValidationError."""
        if self.option.parse is not None:
            given: Any = tuple[str, ...] if self.is_list else str
            value = self.option.parse(msgspec.convert(value, given))
        elif isinstance(value, str) and isinstance(self.type, types.StructType):
            value = decode_json(value.encode())
        elif isinstance(value, str) and isinstance(self.type, types.BoolType):
            value = _BOOLEANS.get(value.lower(), value)
        # Not strict: environment values are text, so "16" is a number and "true" a flag.
        return msgspec.convert(value, self.kind, strict=False)


def _parameter(name: str, kind: Any, info: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def _settings_of(kind: type[msgspec.Struct]) -> Iterable[Setting]:
    helps = helps_of(kind)
    # Inherited fields last: a command's own options come before those of every server.
    for one in sorted(msgspec.structs.fields(kind), key=lambda one: one.name not in kind.__annotations__):
        options = [option for option in getattr(one.type, "__metadata__", ()) if isinstance(option, Option)]
        for option in options:
            found = types.type_info(one.type)
            if isinstance(found, types.UnionType):
                found = next(type for type in found.types if not isinstance(type, types.NoneType))
            default = () if isinstance(found, types.VarTupleType) else None
            if one.default_factory is not msgspec.NODEFAULT:
                default = one.default_factory()
            elif one.default is not msgspec.NODEFAULT:
                default = one.default
            help = helps.get(one.name, "")
            yield Setting(option.name or one.name, one.name, one.type, found, default, option, help)


def helps_of(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Entries `field: help` in the docstrings of a struct; lines that continue an entry are indented."""
    own = [base for base in reversed(kind.__mro__) if base not in (object, msgspec.Struct)]
    text = "\n".join(inspect.cleandoc(base.__doc__ or "") for base in own)
    found = re.findall(r"^(\w+): (.*(?:\n    .*)*)", text, re.MULTILINE)
    return {name: " ".join(help.split()) for name, help in found}


def _shown(default: Any) -> str:
    match default:
        case bool():
            return "on" if default else "off"
        case float():
            return format(default, "g")
        case msgspec.Struct():
            return msgspec.json.encode(default).decode()
        case _:
            return str(default)


def plain_entry(kind: type[Kind], run: Callable[[Kind, list[str]], None]) -> Callable[..., None]:
    """The function for typer of a command whose settings come from the command line only.

    The second argument of `run` are the arguments that typer has not parsed.
    """

    def command(context: typer.Context, **options: Any) -> None:
        run(kind(**options), context.args)

    own = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    return _described(command, run, [own, *(one.plain_parameter() for one in _settings_of(kind))])


def _described(
    command: Callable[..., None], run: Callable[..., Any], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    """`command` with the name and docstring of `run`, and with these parameters."""
    command.__name__, command.__doc__ = run.__name__, run.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


class Command:
    """Settings of one command. `table`: the only one of its file; otherwise each option names its own.

    `others`: variables that begin like those of the settings, and `other_prefixes`: those of other commands.
    """

    def __init__(
        self,
        name: str,
        *kinds: type[msgspec.Struct],
        prefix: str,
        table: str | None = None,
        others: Collection[str] = (),
        other_prefixes: tuple[str, ...] = (),
    ) -> None:
        self.name, self.prefix, self._table = name, prefix, table
        self.others, self.other_prefixes = {*others, f"{prefix}CONFIG"}, other_prefixes
        self.by_kind = {kind: tuple(_settings_of(kind)) for kind in kinds}
        self.settings = {one.name: one for settings in self.by_kind.values() for one in settings}
        self.sections: dict[str, list[str]] = {}
        for one in self.settings.values():
            self.sections.setdefault(table or one.option.section, []).append(one.name)

    def variable(self, name: str) -> str:
        return self.prefix + name.upper()

    def entry(self, run: "Callable[[Values, bool], int]") -> Callable[..., None]:
        """The function for typer: reads the settings and ends with the status of `run`.

        The second argument of `run` is whether `--show-config` was given.
        """

        def command(*, config: Path | None = None, show_config: bool = False, **flags: Any) -> None:
            given = {name: value for name, value in flags.items() if value is not None and value != []}
            try:
                values = self.resolve(
                    given, environment=os.environ, config_file=str(config) if config else None
                )
                status = run(values, show_config)
            except UserError as error:
                typer.echo(f"baton {self.name}: {error}", err=True)
                raise typer.Exit(EXIT_BAD_CONFIG) from error
            raise typer.Exit(status)

        file = typer.Option(
            help=f"TOML file; options and {self.prefix}* override it.",
            rich_help_panel=_PANEL,
            show_default=False,
            metavar="FILE",
        )
        show = typer.Option(
            "--show-config", help="Print the settings with their origins, and exit.", rich_help_panel=_PANEL
        )
        parameters = [
            *(
                one.parameter(None if self._table else one.option.section.capitalize())
                for one in self.settings.values()
            ),
            _parameter("config", Path | None, file),
            _parameter("show_config", bool, show, default=False),
        ]
        return _described(command, run, parameters)

    def resolve(
        self, given: Mapping[str, Any], *, environment: Mapping[str, str], config_file: str | None = None
    ) -> "Values":
        """Merge all origins. `given`: the options on the command line. Raises ConfigError that names the
        setting and its origin.
        """
        file = config_file or environment.get(f"{self.prefix}CONFIG") or None
        layers: list[tuple[Mapping[str, Any], Callable[[str], str]]] = [
            (self.read_file(Path(file)) if file else {}, lambda name: f"file {file}"),
            (self._from_environment(environment), lambda name: f"environment {self.variable(name)}"),
            (given, lambda name: f"command line {self.settings[name].flag}"),
        ]
        origins = {name: origin(name) for layer, origin in layers for name in layer}
        values = {name: value for layer, _ in layers for name, value in layer.items()}
        self._refuse_unknown_variables(environment)
        typed = {name: self._convert(name, value, origins[name]) for name, value in values.items()}
        return Values(self, values, typed, origins, environment, None if file is None else Path(file))

    def _from_environment(self, environment: Mapping[str, str]) -> dict[str, Any]:
        """An empty variable counts as unset; the texts of a list have white space between them."""
        found = {name: environment.get(self.variable(name), "") for name in self.settings}
        return {
            name: text.split() if self.settings[name].is_list else text
            for name, text in found.items()
            if text
        }

    def _refuse_unknown_variables(self, environment: Mapping[str, str]) -> None:
        """Raise ConfigError for a misspelt variable, which would silently leave a default in force."""
        known = {*map(self.variable, self.settings), *self.others}
        for name in environment:
            if (
                name.startswith(self.prefix)
                and name not in known
                and not (self.other_prefixes and name.startswith(self.other_prefixes))
            ):
                advice = _suggestion(name, known) or "; unset it"
                raise ConfigError(f"is set in the environment but is not a setting{advice}", field=name)

    def read_file(self, path: Path) -> dict[str, Any]:
        """Values in a configuration file, by setting. Raises ConfigError that names file and key."""
        text = read_limited(path, MAX_CONFIG_BYTES, field="config")
        try:
            document = tomllib.loads(text.decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}", field="config") from error
        values: dict[str, Any] = {}
        for section, content in document.items():
            if section not in self.sections or not isinstance(content, dict):
                known = ", ".join(f"[{name}]" for name in self.sections)
                raise ConfigError(f"unknown in {path}; the sections are {known}", field=section)
            for name in content:
                if name not in self.sections[section]:
                    advice = _suggestion(name, self.sections[section])
                    known = ", ".join(self.sections[section])
                    raise ConfigError(
                        f"unknown in {path}{advice}; [{section}] has {known}", field=f"{section}.{name}"
                    )
            values |= content
        return values

    def _convert(self, name: str, value: Any, origin: str) -> Any:
        """Convert each value by itself, so that an error names the setting and its origin."""
        setting = self.settings[name]
        try:
            return setting.convert(value)
        except NotJson as error:
            raise ConfigError(f"is not JSON: {error} ({origin})", field=name) from error
        except ConfigError as error:
            raise ConfigError(f"{error.problem} ({origin})", field=error.field) from error
        except msgspec.ValidationError as error:
            problem, path = explain(error, setting.kind)
            raise ConfigError(f"{problem} ({origin})", field=name + path) from error


def _suggestion(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else ""


@dataclass(frozen=True, slots=True)
class Values:
    """Values of a command's settings that differ from the default, each with its origin."""

    command: Command
    given: Mapping[str, Any]  # Values before their conversion.
    typed: Mapping[str, Any]
    origins: Mapping[str, str]
    environment: Mapping[str, str] = field(repr=False)
    config_file: Path | None

    def __getitem__(self, name: str) -> Any:
        return self.typed.get(name, self.command.settings[name].default)

    def make(self, kind: type[Kind], **more: Any) -> Kind:
        """Make one of the command's structs; `more`: fields that no option sets. Raises ConfigError."""
        settings = self.command.by_kind[kind]
        fields = {one.field: self[one.name] for one in settings}
        try:
            return kind(**fields, **more)
        except ConfigError as error:
            wrong = (error.field or "").rpartition(".")[2]
            name = next((one.name for one in settings if one.field == wrong), wrong)
            origin = self.origins.get(name, "default")
            raise ConfigError(f"{error.problem} ({origin})", field=error.field) from error

    def keys(self, name: str) -> tuple[str, ...]:
        """Keys in the file that the setting names, or in the environment. Raises ConfigError."""
        variable = self.command.settings[name].option.content
        assert variable is not None
        return read_api_keys(self[name], self.environment, variable=variable, field=name)

    def shown(self, unset: Callable[[str], str | None] = lambda name: None) -> str:
        """All settings with their origins, as a TOML file with the same effect.

        `unset`: describes the value that applies to a setting without one. None: the help does, if it ends
        with "(default: ...)".
        """
        lines: list[str] = []
        for section, names in self.command.sections.items():
            lines += [f"[{section}]", *(self._line(name, unset) for name in names), ""]
        return "\n".join(lines).rstrip("\n")

    def _line(self, name: str, unset: Callable[[str], str | None]) -> str:
        setting = self.command.settings[name]
        is_parsed = setting.is_list and setting.option.parse is not None
        value = self.given.get(name, ()) if is_parsed else self[name]
        if value is None:
            in_help = re.search(r"\(default: (.*)\)\.$", setting.text)
            return f"# {name}: {unset(name) or (in_help[1] if in_help else 'not set')}"
        return f"{name} = {to_toml(value)}  # {self.origins.get(name, 'default')}"


def read_api_keys(
    file: str | None, environment: Mapping[str, str], *, variable: str, field: str
) -> tuple[str, ...]:
    """Return the keys of the file, or of the environment variable without a file. Raises ConfigError."""
    from baton.http.auth import parse_api_keys, read_key_file

    if file is None:
        return parse_api_keys(environment.get(variable, ""), field=variable)
    return read_key_file(file, field=field)


def to_toml(value: Any) -> str:
    """Return a value as TOML, without keys that have no value."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)} = {to_toml(item)}" for key, item in value.items() if item is not None)
        return "{ " + ", ".join(pairs) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(to_toml(item) for item in value if item is not None) + "]"
    # JSON's strings, numbers and booleans are TOML's too.
    return json.dumps(value, ensure_ascii=False)
