"""Modules, attributes and files that code, documents and scripts name in their texts exist.

Python notices an import that fails. It does not notice a module that a table of commands, a configuration, a
docstring or a guide names.
"""

import re
from functools import cache
from pathlib import Path

from tests.golden.golden import ROOT

PATTERNS = (
    *("baton/**/*.py", "lab/**/*.py", "tests/**/*.py", "examples/**/*.py"),
    *("README.md", "SECURITY.md", "CONTRIBUTING.md", "docs/*.md", "deploy/**/*", "examples/**/*.md"),
    *("pyproject.toml", "Makefile", "scripts/*", ".ci/*"),
)
EXCEPT = ("docs/log.md", "tests/golden/test_references.py")  # The first says what there was at the time.
NO_REFERENCES = (
    "baton.toml",  # A user's file.
    "baton.tokens",  # A variable of a test.
    "baton.assemble:nothing",  # A test of what is not there.
    "benchmarks.md",
    "chaos.md",
    "docs/soak.md",  # Written by `make soak`.
    "examples/disaggregated/",  # vLLM's files.
    "tests/v1/",
)

_DOTTED = re.compile(r"(?<![\w./-])(baton|lab)((?:\.[a-z]\w*)+)(?:[:.]([A-Za-z]\w*))?(?![\w-]|\.\d|\.__)")
_IMPORT = re.compile(
    r"\bfrom (baton|lab)((?:\.\w+)*) import (\([^()]*\)|\w+(?: as \w+)?(?:, \w+(?: as \w+)?)*)"
)
# A module that a text leaves to be filled in cannot be followed. An f-string has its values beside it.
_TEMPLATE = re.compile(r'(\bf"[^"\n]*)?((?:baton|lab)(?:\.\w+)*\.\{)')
_FOLDERS = "baton|lab|tests|docs|examples|scripts|deploy"
_PATH = re.compile(rf"(?<![\w./-])((?:{_FOLDERS})/[\w./-]+\.(?:py|md|toml|yaml|json|txt))\b")


def module_file(parts: list[str]) -> Path | None:
    folder = ROOT.joinpath(*parts)
    if (folder / "__init__.py").is_file():
        return folder / "__init__.py"
    file = folder.with_suffix(".py")
    return file if file.is_file() else None


@cache
def code_of(file: Path) -> str:
    """The file's text without comments and docstrings."""
    return re.sub(r'"{3}.*?"{3}|#[^\n]*', "", file.read_text(), flags=re.DOTALL)


def defines(file: Path, name: str) -> bool:
    """Whether the module has such a name: its own, an imported one, or one that `__getattr__` finds."""
    own = rf"(?:async def|def|class) {name}\b|(?:\w+, )*{name}(?:, \w+)*\s*[:=]"
    quoted = rf'(?:    |__all__ .*)"{name}"'
    imported = rf"(?:from \S+ )?import .*\b{name}\b|    {name},"
    return re.search(rf"^(?:{own}|{quoted}|{imported})", code_of(file), re.MULTILINE) is not None


@cache
def leads_somewhere(package: str, dotted: str, attribute: str | None) -> bool:
    """Up to two names after a module: what it defines, and a member of that."""
    parts = [package, *dotted[1:].split(".")]
    names = [attribute] if attribute else []
    while parts:
        file = module_file(parts)
        if file is not None:
            members = re.findall(r"\w+", code_of(file)) if len(names) == 2 else []
            return not names or (defines(file, names[0]) and len(names) <= 2 and set(names[1:]) <= {*members})
        names.insert(0, parts.pop())
    return False


def unresolved(text: str, folder: Path = ROOT) -> list[str]:
    """`folder`: of the text. Paths in it begin there, or at the root of the repository."""
    dotted = [found.group(0) for found in _DOTTED.finditer(text) if not leads_somewhere(*found.groups())]
    for package, module, names in _IMPORT.findall(text):
        members = re.findall(r"(\w+)(?: as \w+)?", re.sub(r"#[^\n]*", "", names))
        lost = (name for name in members if not leads_somewhere(package, f"{module}.{name}", None))
        dotted += [f"{package}{module}.{name}" for name in lost]
    dotted += [name for string, name in _TEMPLATE.findall(text) if not string]
    paths = [path for path in _PATH.findall(text) if not ((ROOT / path).exists() or (folder / path).exists())]
    return [name for name in dotted + paths if not name.startswith(NO_REFERENCES)]


def test_references() -> None:
    files = [file for pattern in PATTERNS for file in sorted(ROOT.glob(pattern)) if file.is_file()]
    assert len(files) > 500
    lost = {str(file.relative_to(ROOT)): unresolved(file.read_text(), file.parent) for file in files}
    assert {name: found for name, found in lost.items() if found and name not in EXCEPT} == {}


def test_what_leads_nowhere_is_noticed() -> None:
    assert unresolved("`baton.core.nothing`, baton.core.config.Nothing and docs/nothing.md") == [
        "baton.core.nothing",
        "baton.core.config.Nothing",
        "docs/nothing.md",
    ]
    program = (
        "from baton.core.config import EngineConfig, Nothing\nfrom baton.hosts.vllm.{module} import {name}"
    )
    assert unresolved(program) == ["baton.core.config.Nothing", "baton.hosts.vllm.{"]
    assert unresolved('import_module(f"baton.hosts.vllm.{module}")') == []
    assert unresolved("baton.core.config.EngineConfig.max_chunk, baton.cli:main. baton.ticket.1") == []
