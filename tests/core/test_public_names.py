"""Public names of `from baton import ...`."""

import subprocess
import sys

import pytest

import baton

ENGINES_AND_TORCH = "print([m for m in sys.modules if m == 'torch' or m.startswith('baton.')])"


@pytest.mark.parametrize("name", baton._MODULES)
def test_every_public_name_is_found_and_listed(name: str) -> None:
    assert getattr(baton, name).__name__ == name
    assert name in dir(baton)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = baton.LMM


def test_importing_baton_loads_no_submodule() -> None:
    command = [sys.executable, "-c", f"import sys, baton; {ENGINES_AND_TORCH}"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == "[]"
