"""Demo of connectors that store KV: the processes it starts, the requests it sends, and its verdict."""

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from baton.cli.demo import app
from baton.cli.demo_prompts import DemoPrompt
from baton.cli.demo_report import make_rounds_table, print_rounds_summary
from baton.cli.demo_rounds import NO_PREFIX_CACHE, Answer, RoundsOutcome, RoundsPlan, plan_rounds
from baton.cli.demo_run import choose_family
from baton.cli.system import EngineArguments, HandoffArguments

ARGUMENTS = EngineArguments(Path("m"), block_size=16)
GOOD = RoundsOutcome(
    prompt=DemoPrompt("below one block", tuple(range(2600))),
    must_load=True,
    expected=(1, 2, 3),
    first=Answer((1, 2, 3), 1.2345, {"pull": 123_456_789}),
    second=Answer((1, 2, 3), 0.1234, {"offload": 123_456_789}),
    stores=("offload",),
)


def plan(connector: str, mode: str = "pull") -> RoundsPlan:
    return plan_rounds(connector, ARGUMENTS, folder=Path("/kv"), handoff=HandoffArguments(mode))


def names(transfer: Mapping[str, Any] | None) -> list[str]:
    assert transfer is not None
    listed = transfer["kv_connector_extra_config"].get("connectors", [transfer])
    return [child["kv_connector"] for child in listed]


def test_one_engine_stores_for_itself() -> None:
    planned = plan("offload")
    engine, single = planned.engines
    assert names(engine.transfer_config) == ["BatonOffloadConnector"]
    assert NO_PREFIX_CACHE in engine.command()
    assert NO_PREFIX_CACHE not in single.command(), "the reference engine keeps its prefix cache"
    assert single.transfer_config is None
    assert planned.first_url == planned.second_url == engine.url


def test_files_are_read_by_another_engine_than_wrote_them() -> None:
    planned = plan("shared-storage")
    writer, reader, _ = planned.engines
    assert (planned.first_url, planned.second_url) == (writer.url, reader.url)
    for engine in (writer, reader):
        assert engine.transfer_config is not None
        extra = engine.transfer_config["kv_connector_extra_config"]
        assert (extra["path"], extra["chunk_tokens"]) == ("/kv", 16)


def test_a_tiered_engine_is_restarted_between_the_rounds() -> None:
    planned = plan("tiered")
    engine, _ = planned.engines
    assert planned.restarts
    assert planned.storing == (engine,)
    assert engine.transfer_config is not None
    tiers = engine.transfer_config["kv_connector_extra_config"]["tiers"]
    assert [tier["type"] for tier in tiers] == ["host", "files"]


@pytest.mark.parametrize(
    ("mode", "handoff"), [("pull", "BatonPullConnector"), ("push", "BatonPushConnector")]
)
def test_both_engines_of_a_pair_store_and_hand_over(mode: str, handoff: str) -> None:
    planned = plan("multi", mode)
    prefill, decode, _ = planned.engines
    assert names(prefill.transfer_config) == ["BatonOffloadConnector", handoff]
    assert names(decode.transfer_config) == ["BatonOffloadConnector", handoff]
    assert prefill.transfer_config is not None
    assert prefill.transfer_config["engine_id"] != (decode.transfer_config or {})["engine_id"]
    assert planned.system is not None
    assert planned.first_url == planned.second_url == planned.system.router_url
    assert planned.storing == (prefill, decode)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--connector", "nonsense"], "must be one of pull, push, offload, shared-storage, tiered, multi"),
        (["--connector", "push", "--mode", "pull"], "is 'push', and --mode is 'pull'"),
        (["--connector", "offload", "--mode", "pull"], "transfers no KV between engines"),
        (["--connector", "multi", "--prefill-tp", "2"], "needs equal engines"),
        (["--connector", "pull", "--stream", "layer"], "is only for --mode push"),
        (["--family", "deepseek"], "must be one of llama, mistral"),
    ],
)
def test_conflicting_options_are_refused(options: list[str], complaint: str) -> None:
    ended = CliRunner().invoke(app, options, env={"COLUMNS": "200", "TERM": "dumb"})
    assert ended.exit_code == 2
    assert complaint in " ".join(ended.output.split())


def test_a_checkpoint_has_a_family_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    ended = CliRunner().invoke(
        app, ["--model", str(tmp_path), "--family", "llama"], env={"COLUMNS": "200", "TERM": "dumb"}
    )
    assert ended.exit_code == 2
    assert "omit --family" in ended.output


@pytest.mark.parametrize(
    ("name", "family"), [(None, "qwen3"), ("deepseek-v3", "deepseek_v3"), ("gpt_oss", "gpt_oss")]
)
def test_a_family_is_named_with_either_sign(name: str | None, family: str) -> None:
    assert choose_family(name) == family


def shown(*outcomes: RoundsOutcome) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(make_rounds_table(outcomes, title=plan("multi").title))
    print_rounds_summary(console, outcomes, took_s=28.0, log_folder=Path("logs"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_row_fits_into_eighty_columns_uncut() -> None:
    text = shown(*[GOOD] * 20)
    assert "…" not in text
    row = ["20", "below", "one", "block", "2,600", "123.5", "MB", "1234", "123.5", "MB", "123", "yes"]
    assert row in [line.split() for line in text.splitlines()]
    assert "20 of 20 answers equal" in text
    assert "20 prompts were loaded from the store" in text


@pytest.mark.parametrize(
    ("outcome", "complaint"),
    [
        (replace(GOOD, first=Answer((1, 9, 3), 1.0, {})), "in the first round, at token 1: 9 instead of 2"),
        (replace(GOOD, second=Answer((1,), 1.0, {"offload": 1})), "in the second round, at its length: 1"),
        (replace(GOOD, second=Answer((1, 2, 3), 1.0, {"pull": 5})), "#1 was not loaded"),
    ],
)
def test_a_bad_outcome_is_named(outcome: RoundsOutcome, complaint: str) -> None:
    assert not outcome.is_good
    text = " ".join(shown(outcome).split())
    assert complaint in text
    assert "logs are in logs" in text


def test_nothing_loaded_is_good_where_nothing_is_kept() -> None:
    assert replace(GOOD, must_load=False, second=Answer((1, 2, 3), 1.0, {})).is_good
