"""`baton check`: the table, the story, and the exit status."""

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.testing.contract.rules import RULES

EXAMPLE = "examples.prefix_store.prefix_store:PrefixStoreConnector"


def check(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", *arguments])
    return result.exit_code, result.output


def test_a_sound_connector_gets_a_table_of_all_rules(tmp_path: Path) -> None:
    status, output = check(EXAMPLE, "--config", f'{{"path": "{tmp_path}"}}', "--examples", "4")
    assert status == 0, output
    assert all(rule in output for rule in RULES)
    assert "BROKEN" not in output


def test_a_broken_connector_gets_its_story_and_status_1() -> None:
    status, output = check("tests.testing.broken.answers:AsyncNothing", "--examples", "5")
    assert status == 1
    assert "BROKEN" in output
    assert f"async-without-tokens: {RULES['async-without-tokens'].promise}" in output
    assert "answers (0, True)" in output


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("nowhere:Nothing",),
        ("BatonPullConnector", "--pair", "triple"),
        ("BatonPullConnector", "--config", "[]"),
        ("BatonPullConnector", "--executor", "abacus"),
        (EXAMPLE, "--executor", "vllm"),  # No class of vLLM's, or no vLLM.
        (EXAMPLE, "--break-files", "/no/such/folder"),
    ],
)
def test_a_class_that_cannot_be_checked_is_reported(arguments: tuple[str, ...]) -> None:
    status, output = check(*arguments)
    assert status == 2
    assert "Invalid value" in output or "must" in output


@pytest.mark.parametrize(
    ("source", "expected_text"),
    [
        (
            "import nothing_that_is_installed",
            "cannot import 'mine': No module named 'nothing_that_is_installed'",
        ),
        ("def broken(:", "cannot import 'mine': SyntaxError: "),
        ("\ntypo = undefined\n", "NameError: name 'undefined' is not defined (mine.py:2, in <module>)"),
        ("class Another: ...", "'mine' has no 'Mine'"),
        ("Mine = 3", "is no class"),
        ("class Mine: ...", "not a subclass of KVConnectorBase_V1"),
        (
            "from baton.contract import TwoHalves\nclass Mine(TwoHalves): ...",
            "does not define make_scheduler_half",
        ),
    ],
)
def test_a_module_without_a_connector_is_reported_and_breaks_no_rule(
    source: str, expected_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    status, output = check("mine:Mine")
    sys.modules.pop("mine", None)
    assert status == 2
    assert expected_text in " ".join(output.replace("│", " ").split())


@pytest.mark.parametrize("path", [":", "mine:", ":Mine", "Mine"])
def test_the_error_for_an_unknown_name_lists_the_known_ones(path: str) -> None:
    status, output = check(path)
    assert status == 2
    assert "package.module:Class" in output
    assert "BatonOffloadConnector" in output


def test_an_error_of_a_constructor_names_its_place() -> None:
    status, output = check(EXAMPLE, "--examples", "1")
    assert status == 1
    assert "starting raised KeyError: 'path' (prefix_store.py:" in output


def test_a_connector_that_needs_a_gpu_breaks_no_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "on_gpu.py").write_text(
        "import torch\n"
        "from baton.contract import NullSchedulerHalf, NullWorkerHalf, TwoHalves\n"
        "class Worker(NullWorkerHalf):\n"
        "    def register_kv_caches(self, kv_caches):\n"
        "        self.stream = torch.zeros(1, device='cuda')\n"
        "class OnGpu(TwoHalves):\n"
        "    make_scheduler_half = classmethod(lambda cls, config, cache: NullSchedulerHalf())\n"
        "    make_worker_half = classmethod(lambda cls, config, cache: Worker())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, output = check("on_gpu:OnGpu", "--examples", "1")
    sys.modules.pop("on_gpu", None)
    assert status == 2
    assert "needs CUDA, and torch finds no CUDA device" in " ".join(output.replace("│", " ").split())


def test_cut_files_are_a_broken_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.cli.check.TRIES", 5)
    options = ("--config", f'{{"path": "{tmp_path}"}}', "--break-files", str(tmp_path), "--examples")
    status, output = check(EXAMPLE, *options, "8")
    assert status == 0, output
    assert re.search(r"failed-load-unreported +│ kept", output)
    status, output = check("tests.testing.folder_stores:SaysNothingOfBadFiles", *options, "30")
    assert status == 1
    assert "failed-load-unreported: A failed load" in output


def test_a_long_check_reports_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.cli.check.TELL_EVERY_S", 0.0)
    status, output = check(EXAMPLE, "--config", f'{{"path": "{tmp_path}"}}', "--examples", "2")
    assert status == 0, output
    assert "PrefixStoreConnector: 1 examples" in output


def test_the_rules_in_the_docs_are_the_kits() -> None:
    text = (Path(__file__).parents[2] / "docs" / "connectors.md").read_text()
    for rule in RULES.values():
        assert f"| `{rule.name}` | {rule.promise} |" in text
