"""Correct connectors pass the kit, and the examples really contain the events that could fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baton.testing import connector_suite
from baton.testing.contract import ConnectorCase, check_connector
from tests.testing.enough import check_enough
from tests.testing.sound import MemoryConnector, lose_everything

EXAMPLES = 2000  # Many times what it takes to find a fault.

TestMemory = connector_suite(MemoryConnector, examples=10, patience_s=0.0)


def test_a_sound_pair_passes() -> None:
    case = ConnectorCase(path="tests.testing.sound_pair:PairConnector", pairing="pull", patience_s=0.0)
    check_enough(case, {"loads in the background": 5}, examples=6)


def test_a_sound_connector_of_several_groups_passes() -> None:
    case = ConnectorCase(
        path="tests.testing.sound_groups:GroupsConnector", patience_s=0.0, break_store=lose_everything
    )
    wanted = {"engines with several KV-cache groups": 5, "loads in the background": 5}
    check_enough(case, wanted, examples=6)


@pytest.mark.parametrize("loads_async", [True, False])
def test_a_sound_connector_passes_with_all_faults(loads_async: bool) -> None:
    case = ConnectorCase(
        path="tests.testing.sound:MemoryConnector",
        extra_config={"async": loads_async},
        patience_s=0.0,
        break_store=lose_everything,
    )
    wanted = {
        "loads in the background" if loads_async else "loads in a step": 5,
        "failed loads": 5,
        "delayed frees": 5,
        "preemptions": 5,
        "steps without tokens": 5,
        "steps after one in flight": 5,
    }
    if loads_async:
        wanted["aborts while loading"] = 3
    verdict = check_enough(case, wanted, examples=8)
    results = {rule: result for rule, result, _ in verdict.rows()}
    assert results["wrong-bytes"] == results["lookup-has-side-effects"] == "kept"
    assert "BROKEN" not in results.values()
    check_enough(replace(case, break_store=None), {"failed writes": 5}, examples=6)


def test_files_of_an_earlier_run_do_not_fail_this_one(tmp_path: Path) -> None:
    """An author repairs a connector, and runs the check again on the same folder."""
    config = {"path": str(tmp_path)}
    faulty = ConnectorCase(path="tests.testing.folder_stores:SavesZeros", extra_config=config)
    assert check_connector(faulty, examples=EXAMPLES, tries=5).broken_rule == "wrong-bytes"
    assert any(tmp_path.iterdir())
    fixed = ConnectorCase(path="examples.prefix_store.prefix_store:PrefixStoreConnector", extra_config=config)
    check_enough(fixed, {"loads in a step": 3}, examples=15)


def test_a_connector_gets_the_layout_that_it_requires(tmp_path: Path) -> None:
    config = {"path": str(tmp_path)}
    case = ConnectorCase(path="tests.testing.folder_stores:TokensFirst", extra_config=config)
    check_enough(case, {"loads in a step": 3}, examples=15)
    without = ConnectorCase(path="tests.testing.folder_stores:BlocksInside", extra_config=config)
    verdict = check_connector(without, examples=1)
    assert "BlocksInside requires the KV cache layout 'LHBNC'" in str(verdict.broken)


def test_a_fault_that_does_not_repeat_is_reported(tmp_path: Path) -> None:
    case = ConnectorCase(path="tests.testing.folder_stores:WearsOut", extra_config={"path": str(tmp_path)})
    verdict = check_connector(case, examples=EXAMPLES, tries=20)
    assert verdict.broken_rule in ("raised", "empty-step-raised"), verdict.broken
    assert "OSError: worn out (folder_stores.py:" in str(verdict.broken)


@pytest.mark.parametrize("loads_async", [True, False])
def test_a_connector_may_raise_the_error_of_a_failed_write(loads_async: bool) -> None:
    case = ConnectorCase(
        path="tests.testing.sound:RaisingConnector", extra_config={"async": loads_async}, patience_s=0.0
    )
    check_enough(case, {"failed writes": 1}, examples=10)
