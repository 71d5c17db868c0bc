"""Texts of what users, other engines and stored files depend on. A changed text is a change that they notice.

    WRITE_GOLDEN=1 pytest tests/golden        rewrites the texts; review the difference as an interface change

The tests compare names, values and bytes, and never where the code stands. A move or a rename inside the code
changes imports of the tests at most, and no text.
"""

import os
import re
from collections.abc import Iterable, Mapping
from difflib import unified_diff
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXTS = Path(__file__).with_name("texts")
REWRITE = "WRITE_GOLDEN"  # An environment variable. Continuous integration does not set it.


def check(name: str, lines: Iterable[str]) -> None:
    """Fails the test unless `lines` are those of the text called `name`."""
    path, found = TEXTS / f"{name}.txt", list(lines)
    assert all("\n" not in line for line in found), "one line each"
    if os.environ.get(REWRITE):
        path.write_text("".join(f"{line}\n" for line in found))
    pinned = path.read_text().splitlines() if path.exists() else []
    if found != pinned:
        difference = "\n".join(unified_diff(pinned, found, "pinned", "found", n=1, lineterm=""))
        pytest.fail(f"not as in {path.relative_to(ROOT)} (see CONTRIBUTING.md):\n{difference}", pytrace=False)


def check_values(name: str, values: Mapping[str, object]) -> None:
    """`check`, with a line for each value; bytes are written as hexadecimal digits."""
    check(
        name,
        (f"{key}: {value.hex() if isinstance(value, bytes) else value}" for key, value in values.items()),
    )


@cache
def source(*folders: str) -> str:
    """The text of every module below these folders of the repository."""
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    return "\n".join(file.read_text() for file in files)


@cache
def literals(*folders: str) -> frozenset[str]:
    """What stands between double quotes in one line there, which are all that the code's formatter uses.

    What an f-string has in braces is left out.
    """
    quoted = re.findall(r'"((?:[^"\\\n]|\\.)*)"', source(*folders))
    return frozenset(re.sub(r"\{[^{}]*\}", "{}", text) for text in quoted)
