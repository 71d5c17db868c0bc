"""Names that programs of users import and subclass: modules, names, and how they are called."""

import importlib
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

import pytest

import baton
from tests.golden.golden import ROOT, check, check_values

PACKAGES = (
    "baton.contract",
    "baton.testing",
    "baton.testing.contract",
    "baton.hosts.vllm",
    "baton.hosts.vllm.tier",
    "baton.assemble",
)
"""Of which every name in `__all__` is public."""

FORMER = (
    ("baton.core.config", "EngineConfig"),
    ("baton.engine.api", "SamplingParams"),
    ("baton.engine.llm", "LLM"),
)
"""Names that the README has shown, for programs that import them from there."""

CALLED = {
    "baton": ["LLM", "load_model_config"],
    "baton.contract": None,
    "baton.engine.llm": ["Completion"],
    "baton.testing.contract": ["ConnectorCase", "check_connector", "connector_suite", "cut_files"],
}
"""Names whose parameters and members are public; None: all. What has no entry is pinned by another text."""

_MAKERS = {"__init__", "__new__"}
_IMPORT = re.compile(r"^\s*from (baton[\w.]*) import \(?([\w, ]+)", re.MULTILINE)
_DOCUMENTED = ("README.md", "SECURITY.md", "docs/*.md", "deploy/**/*", "examples/**/*.md", "examples/**/*.py")


def test_names() -> None:
    names = {path: sorted(importlib.import_module(path).__all__) for path in PACKAGES}
    names["baton"] = sorted(baton._MODULES)  # What it loads when it is used.
    check_values("imports", {path: " ".join(found) for path, found in names.items()})


def documented() -> list[tuple[str, str]]:
    files = [file for pattern in _DOCUMENTED for file in ROOT.glob(pattern) if file.is_file()]
    found = [pair for file in files for pair in _IMPORT.findall(file.read_text())]
    return sorted({(path, name.strip()) for path, names in found for name in names.split(",")})


def test_what_the_documents_import() -> None:
    assert documented() == [
        ("baton", "EngineConfig"),
        ("baton", "KVConnectorBase_V1"),
        ("baton", "KVConnectorMetadata"),
        ("baton", "LLM"),
        ("baton", "SamplingParams"),
        ("baton", "load_model_config"),
        ("baton.contract", "KVConnectorMetadata"),
        ("baton.contract", "NullSchedulerHalf"),
        ("baton.contract", "NullWorkerHalf"),
        ("baton.contract", "TwoHalves"),
        ("baton.contract.base", "hidden_states_name"),
        ("baton.testing", "connector_suite"),
    ]


@pytest.mark.parametrize(("path", "name"), [*documented(), *FORMER])
def test_an_import_works(path: str, name: str) -> None:
    assert getattr(importlib.import_module(path), name) is not None


# --- How they are called ------------------------------------------------------------------------------


def called(name: str, value: Any, public: set[Any]) -> Iterator[str]:
    """A line for a function or a class, and for each public member that no other public class gives to it."""
    if not inspect.isclass(value):
        yield name + (_parameters(value) if inspect.isfunction(value) else "")
        return
    ours = [base for base in value.__mro__ if base.__module__.partition(".")[0] == "baton"]
    foreign = set(value.__mro__) - set(ours)
    bases = [base for base in ours[1:] if base in public]
    is_made = not issubclass(value, Enum) and any(_MAKERS & vars(base).keys() for base in ours)
    parents = f" of {', '.join(base.__name__ for base in bases)}" if bases else ""
    yield f"{name}{_parameters(value) if is_made else ''}{parents}"
    if issubclass(value, Enum):
        yield from (f"  {member.name}" for member in value)
        return
    known = {member for base in (*bases, *foreign) for member in dir(base)}
    known |= {*getattr(value, "__struct_fields__", ()), *getattr(value, "__dataclass_fields__", ())}
    for member in dir(value):
        if not member.startswith("_") and member not in known:
            yield f"  {member}{_parameters(inspect.getattr_static(value, member))}"


def _parameters(value: Any) -> str:
    """The parameters, without annotations; empty if `value` is not callable, or takes anything or nothing."""
    function = getattr(value, "__func__", value)
    if not callable(function):
        return ""
    parameters = inspect.signature(function).parameters.values()
    shown = [_shown(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in parameters]
    text = str(inspect.Signature(shown))
    return "" if text in ("()", "(*args, **kwargs)") else text


class _Default:
    def __repr__(self) -> str:
        return "..."


def _shown(parameter: inspect.Parameter) -> inspect.Parameter:
    plain = (str, int, float, bool, tuple, type(None))
    is_plain = isinstance(parameter.default, plain) or parameter.default is inspect.Parameter.empty
    return parameter if is_plain else parameter.replace(default=_Default())


def test_calls() -> None:
    lines = []
    for path, names in CALLED.items():
        module = importlib.import_module(path)
        chosen = sorted(module.__all__) if names is None else names
        public = {getattr(module, name) for name in chosen}
        lines += [
            f"# {path}",
            *(line for name in chosen for line in called(name, getattr(module, name), public)),
        ]
    check("calls", lines)
