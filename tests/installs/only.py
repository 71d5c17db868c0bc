"""Runs a program with the packages of one install only: `python only.py EXTRAS PROGRAM`.

Packages outside the install are neither imported nor found by `importlib.metadata`, as if they were absent.
EXTRAS are separated by commas. `host:NAME` adds a package that the host of the base install brings.
"""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(extras: list[str]) -> set[str]:
    """Return every distribution that pip installs for these extras, with those of the host."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    hosts = [extra.removeprefix("host:") for extra in extras if extra.startswith("host:")]
    todo = [Requirement(line) for line in [*project["dependencies"], *hosts]]
    own = [extra for extra in extras if not extra.startswith("host:")]
    todo += [Requirement(line) for extra in own for line in project["optional-dependencies"][extra]]
    found, done = {"kv-baton"}, set()
    while todo:
        wanted = todo.pop()
        key = (normal(wanted.name), frozenset(wanted.extras))
        if key in done:
            continue
        done.add(key)
        found.add(key[0])
        for line in importlib.metadata.requires(wanted.name) or ():
            needed = Requirement(line)
            environments = [{"extra": extra} for extra in ("", *wanted.extras)]
            if needed.marker is None or any(needed.marker.evaluate(each) for each in environments):
                todo.append(needed)
    return found


class Only:
    """A finder of modules and distributions that does not see those outside the install."""

    def __init__(self, finder: Any, hidden: set[str], installed: set[str]) -> None:
        self._finder, self._hidden, self._installed = finder, hidden, installed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in self._hidden:
            return None
        return self._finder.find_spec(name, path, target)

    def find_distributions(self, *arguments: Any) -> Any:
        for found in self._finder.find_distributions(*arguments):
            if normal(found.metadata["Name"]) in self._installed:
                yield found


def hide_others(installed: set[str]) -> None:
    owners = importlib.metadata.packages_distributions()
    hidden = {module for module, names in owners.items() if not installed & set(map(normal, names))}
    sys.meta_path[:] = [
        Only(finder, hidden, installed) if hasattr(finder, "find_distributions") else finder
        for finder in sys.meta_path
    ]
    for name in list(sys.modules):
        if name.partition(".")[0] in hidden:
            del sys.modules[name]


if __name__ == "__main__":
    extras, program = sys.argv[1:]
    sys.path[0] = str(ROOT)
    hide_others(closure([extra for extra in extras.split(",") if extra]))
    sys.argv[1:] = []
    exec(program)
