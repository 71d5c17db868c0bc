"""The build hook, with a stand-in for hatchling, which only builds have."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
INTERFACE = "hatchling.builders.hooks.plugin.interface"


class Interface:
    """BuildHookInterface."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.app = self
        self.warnings: list[str] = []

    def __class_getitem__(cls, _: Any) -> type:
        return cls

    def display_warning(self, text: str) -> None:
        self.warnings.append(text)


@pytest.mark.parametrize("failing", [set(), {"decode"}, {"gather", "decode"}])
def test_a_library_is_built_whatever_becomes_of_the_other(
    failing: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A compiler may be too old for one of them."""
    interface = ModuleType(INTERFACE)
    interface.BuildHookInterface = Interface  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, INTERFACE, interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "scripts").mkdir()
    for library in module.LIBRARIES.values():
        (tmp_path / library).parent.mkdir(parents=True)
        (tmp_path / library).write_text("of an older source")
    script = tmp_path / module.SCRIPT
    script.write_text(f"#!/bin/sh\nfor name in {' '.join(failing)}; do [ $name != $1 ] || exit 1; done\n")
    script.chmod(0o755)
    hook, data = module.LibraryBuildHook(tmp_path), {"artifacts": []}
    hook.initialize("standard", data)
    left = [library for library in module.LIBRARIES.values() if (tmp_path / library).exists()]
    assert len(left) == 2 - len(failing)
    assert data["artifacts"] == left
    assert len(hook.warnings) == len(failing)
    assert ("tag" in data) == bool(left)
