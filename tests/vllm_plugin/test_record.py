"""The connector forwards every method that a recorded vLLM has, with its parameters. Without vLLM."""

import ast
from pathlib import Path

import pytest

import baton.vllm_plugin
from baton.vllm_plugin.drift import EXTENDED, RECORDS, describe, differences, load_record, members_of
from baton.vllm_plugin.versions import TESTED

BASE = EXTENDED[0]
HMA = EXTENDED[1]
OURS_ALONE = {"role"}  # Of the base class, which knows it as well as we do.


@pytest.fixture(scope="module")
def forwarded() -> dict[str, str]:
    source = Path(baton.vllm_plugin.__file__).with_name("forwarding.py").read_text()
    [connector] = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "ForwardingConnector"
    ]
    return members_of(connector)


def test_every_version_that_is_let_start_is_recorded() -> None:
    assert {record.stem for record in RECORDS.glob("*.json")} == set(TESTED)


@pytest.mark.parametrize("release", TESTED)
def test_each_method_is_forwarded_by_name_with_its_parameters(
    release: str, forwarded: dict[str, str]
) -> None:
    record = load_record(release)
    for name, called in (record[BASE] | record[HMA]).items():
        if name in OURS_ALONE:
            continue
        assert forwarded.get(name) == called.replace("abstractmethod ", ""), name


def test_what_differs_is_named() -> None:
    before = {"base.py:Base": {"gone": "(self)", "kept": "(self)", "changed": "(self, a)"}}
    now = {"base.py:Base": {"kept": "(self)", "changed": "(self, a, b=)", "new": "property (self)"}}
    assert differences(before, now) == [
        "Base.changed: believed (self, a), is (self, a, b=)",
        "Base.gone: believed (self), is not there",
        "Base.new: believed not there, is property (self)",
    ]


def test_sources_are_read_without_being_imported(tmp_path: Path) -> None:
    record = load_record(TESTED[0])
    for name in record:
        path, _, class_name = name.partition(":")
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        text = file.read_text() if file.exists() else "raise AssertionError('imported')\n"
        file.write_text(
            text + f"class {class_name}:\n    @property\n    def role(self, a, b=1, *c, d, e=2, **f): ...\n"
        )
    found = describe(tmp_path)
    assert found[BASE] == {"role": "property (self, a, b=, *c, d, e=, **f)"}
    assert set(found["v1/core/block_pool.py:BlockPool"].values()) == {"missing"}
