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


def hook_of(tree: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, Any]:
    """The module and its hook, for a tree that has libraries of an earlier build."""
    interface = ModuleType(INTERFACE)
    interface.BuildHookInterface = Interface  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, INTERFACE, interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tree / "scripts").mkdir()
    for library in module.LIBRARIES.values():
        (tree / library).parent.mkdir(parents=True)
        (tree / library).write_text("earlier build")
    (tree / module.SCRIPT).write_text(script)
    (tree / module.SCRIPT).chmod(0o755)
    return module, module.LibraryBuildHook(tree)


@pytest.mark.parametrize("failing", [set(), {"decode"}, {"gather", "decode"}])
def test_a_library_is_built_whatever_becomes_of_the_other(
    failing: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A compiler may be too old for one of them."""
    script = f"#!/bin/sh\nfor name in {' '.join(failing)}; do [ $name != $1 ] || exit 1; done\n"
    module, hook = hook_of(tmp_path, script, monkeypatch)
    data: dict[str, Any] = {"artifacts": []}
    hook.initialize("standard", data)
    assert data["artifacts"] == [path for name, path in module.LIBRARIES.items() if name not in failing]
    assert len(hook.warnings) == len(failing)
    assert ("tag" in data) == (len(failing) < 2)


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("echo too old >&2; exit 1", "too old"), ("sleep 600 & wait", "the compiler has not ended in 1 s")],
)
def test_a_build_that_fails_leaves_the_library_of_other_environments(
    compiler: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Set-up of a second environment builds in the same tree, maybe on a machine that is too busy."""
    module, hook = hook_of(tmp_path, (ROOT / "scripts/build-library").read_text(), monkeypatch)
    (tmp_path / "cc").write_text(f'#!/bin/bash\nwhile [ $1 != -o ]; do shift; done\n>"$2"; {compiler}\n')
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    monkeypatch.setenv("BUILD_TIMEOUT_S", "1")
    monkeypatch.setenv("BATON_BUILD_REPORT", str(tmp_path / "report"))
    data: dict[str, Any] = {"artifacts": []}
    hook.initialize("editable", data)
    assert data["artifacts"] == []
    for library in module.LIBRARIES.values():
        assert (tmp_path / library).read_text() == "earlier build"
        assert [path.name for path in (tmp_path / library).parent.iterdir()] == [Path(library).name]
    report = (tmp_path / "report").read_text()
    assert report.splitlines() == hook.warnings
    assert report.count(reason) == report.count("an earlier build stays") == 2
