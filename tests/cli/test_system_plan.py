"""Plans of `baton up` and `baton demo`: the processes they will start."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli.processes import free_ports
from baton.cli.system import EngineArguments, HandoffArguments, SystemPlan, plan_system
from baton.core.errors import ConfigError
from baton.http.tls import TlsFiles

MODEL = Path("m")


def option(command: list[str], name: str) -> str | None:
    return command[command.index(name) + 1] if name in command else None


def plan(handoff: HandoffArguments, **fields: Any) -> SystemPlan:
    prefill = EngineArguments(MODEL, tp=2, block_size=16)
    return plan_system(
        EngineArguments(MODEL, block_size=32),
        num_prefill=1,
        num_decode=1,
        num_single=1,
        handoff=handoff,
        prefill_arguments=prefill,
        **fields,
    )


def test_push_is_told_to_engines_and_router() -> None:
    planned = plan(HandoffArguments("push", "layer"))
    p, d, single = (engine.command() for engine in planned.engines)
    configs = [json.loads(option(command, "--kv-transfer-config") or "null") for command in (p, d, single)]
    assert [c and (c["kv_connector"], c["kv_role"]) for c in configs] == [
        ("BatonPushConnector", "kv_producer"),
        ("BatonPushConnector", "kv_consumer"),
        None,
    ]
    assert configs[0]["kv_connector_extra_config"] == {"stream": "layer"}
    assert option(planned.router_command(), "--mode") == "push"


def test_prefill_engines_may_have_other_ranks_and_block_sizes() -> None:
    p, d, single = (engine.command() for engine in plan(HandoffArguments()).engines)
    assert [option(c, "--tensor-parallel-size") for c in (p, d, single)] == ["2", "1", "1"]
    assert [option(c, "--block-size") for c in (p, d, single)] == ["16", "32", "32"]
    assert json.loads(option(p, "--kv-transfer-config") or "")["kv_connector"] == "BatonPullConnector"


def test_the_router_may_have_tls() -> None:
    planned = plan(HandoffArguments(), router_tls=TlsFiles(cert="c", key="k"), router_port=8000)
    assert planned.router_url == "https://127.0.0.1:8000"
    command = planned.router_command()
    assert (option(command, "--tls-cert"), option(command, "--tls-key")) == ("c", "k")


@pytest.mark.parametrize(
    ("given", "problem"),
    [(["--tls-cert", "c"], "needed together"), (["--tls-cert", "/no", "--tls-key", "/no"], "No such file")],
)
def test_files_of_tls_that_do_not_fit_are_refused(given: list[str], problem: str, tmp_path: Path) -> None:
    from baton.cli.main import app

    (tmp_path / "config.json").write_text("{}")
    wide = {"COLUMNS": "300", "TERM": "dumb"}
    result = CliRunner().invoke(app, ["up", str(tmp_path), "--port", str(free_ports(1)[0]), *given], env=wide)
    assert result.exit_code == 2
    assert problem in result.output


def test_engines_are_told_their_device_and_the_users_own_options() -> None:
    arguments = EngineArguments(MODEL, device="cuda", extra=("--max-num-seqs", "4"))
    commands = [engine.command() for engine in plan_system(arguments, num_prefill=1, num_decode=1).engines]
    assert [option(command, "--device") for command in commands] == ["cuda", "cuda"]
    assert all(command[-2:] == ["--max-num-seqs", "4"] for command in commands)
    assert option(EngineArguments(MODEL).command(1, None), "--device") is None


@pytest.mark.parametrize(
    ("mode", "stream", "field"),
    [("shove", None, "mode"), ("push", "all", "stream"), ("pull", "layer", "stream")],
)
def test_conflicting_settings_are_refused(mode: str, stream: str | None, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        HandoffArguments(mode, stream)


@pytest.mark.parametrize("command", ["up", "demo"])
def test_the_commands_refuse_it_before_anything_starts(command: str, tmp_path: Path) -> None:
    from baton.cli.main import app

    (tmp_path / "config.json").write_text("{}")
    model = [str(tmp_path)] if command == "up" else ["--model", str(tmp_path)]
    result = CliRunner().invoke(app, [command, *model, "--stream", "layer"])
    assert result.exit_code == 2
    assert "stream" in result.output
