"""The command around the router: light, and clear about arguments that cannot work."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from baton.cli.route import app
from baton.http.connections import server_config

URLS = ["--prefill", "http://p:1/", "--decode", "http://d:1/"]


def test_the_router_needs_no_torch() -> None:
    script = (
        "import sys, baton.router.processes.app\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--prefill", "p:1", "--decode", "http://d:1"], "prefill_urls"),
        (["--prefill", "http://p:1", "--decode", "http://d:1/v1"], "decode_urls"),
        ([*URLS, "--policy", "best"], "policy"),
        ([*URLS, "--on-prefill-failure", "retry"], "on_prefill_failure"),
        ([*URLS, "--mode", "shove"], "mode"),
        ([*URLS, "--idle-timeout-s", "0"], "timeouts.idle_s"),
        ([*URLS, "--decode-leg", "never"], "decode_leg"),
        (["--prefill", "http://p:1"], "decode_urls"),
        ([*URLS, "--members", "dns:engines"], "role=decode"),
        ([*URLS, "--members", "dns:engines?role=decode&port=x"], "port"),
        ([*URLS, "--members", "dns:engines?roll=decode"], "roll"),
        ([*URLS, "--members", "kubernetes:default"], "selector"),
        ([*URLS, "--model-alias", "a=b", "--model-alias", "b=c"], "model_aliases"),
        ([*URLS, "--model-alias", "a"], "model_aliases"),
        ([*URLS, "--members", "etcd://10.0.0.1"], "kinds are dns, kubernetes"),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2
    assert complaint in result.output


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The settings of the routers that the command would have started."""
    seen: list[Any] = []

    def serve(settings: Any, **options: Any) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr("baton.router.processes.run.serve", serve)
    return seen


def test_flags_go_over_the_environment_and_that_over_the_file(tmp_path: Path, started: list[Any]) -> None:
    config = tmp_path / "route.toml"
    config.write_text(
        '[route]\nprefill = ["http://p:1"]\ndecode = ["http://d:1", "http://d:2"]\n'
        'mode = "push"\npolicy = "round_robin"\nidle_timeout_s = 7\nfirst_token = false\n'
    )
    result = CliRunner().invoke(
        app,
        ["--config", str(config), "--policy", "prefix_affinity"],
        env={"BATON_ROUTE_POLICY": "least_in_flight", "BATON_ROUTE_IDLE_TIMEOUT_S": "8"},
    )
    assert result.exit_code == 0, result.output
    (settings,) = started
    assert settings.decode_urls == ("http://d:1", "http://d:2")
    assert (settings.mode, settings.first_token) == ("push", False)
    assert settings.policy == "prefix_affinity"
    assert settings.timeouts.idle_s == 8


def test_engines_may_be_named_by_the_environment(started: list[Any]) -> None:
    env = {"BATON_ROUTE_PREFILL": "http://p:1 http://p:2", "BATON_ROUTE_DECODE": "http://d:1"}
    result = CliRunner().invoke(app, [], env=env)
    assert result.exit_code == 0, result.output
    assert started[0].prefill_urls == ("http://p:1", "http://p:2")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[route]\nmodes = 1\n", "route.modes"),
        ("[serve]\n", "[route]"),
        ("route = 1\n", "[route]"),
        ("[", "TOML"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    config = tmp_path / "route.toml"
    config.write_text(text)
    result = CliRunner().invoke(app, ["--config", str(config), *URLS], env={"COLUMNS": "300", "TERM": "dumb"})
    assert result.exit_code == 2
    assert complaint in result.output


@pytest.mark.parametrize(
    ("given", "environment", "complaint"),
    [
        ([], {"BATON_ROUTE_POLICE": "cost"}, "BATON_ROUTE_POLICE: is set in the environment"),
        ([], {"BATON_ROUTE_POLICE": "cost"}, "did you mean BATON_ROUTE_POLICY?"),
        (["--polcy", "cost"], {}, "--policy"),
        (["--config", "{config}"], {}, "route.polcy: unknown in {config}; did you mean policy?"),
        (["--mode", "shove"], {}, "one of pull, push (command line --mode)"),
        ([], {"BATON_ROUTE_PORT": "http"}, "port: Expected `int`, got `str` (environment BATON_ROUTE_PORT)"),
        (["--idle-timeout-s", "0"], {}, "timeouts.idle_s: must be positive (command line --idle-timeout-s)"),
        ([], {"BATON_ROUTE_PORT": "70000"}, "port: must be in [0, 65535]; 0 selects a free one (environment"),
    ],
)
def test_an_error_names_the_origin_and_what_was_meant(
    tmp_path: Path, given: list[str], environment: dict[str, str], complaint: str
) -> None:
    config = tmp_path / "route.toml"
    config.write_text('[route]\npolcy = "cost"\n')
    given = [argument.replace("{config}", str(config)) for argument in given]
    wide = {"COLUMNS": "300", "TERM": "dumb"}
    result = CliRunner().invoke(app, [*URLS, *given], env={**wide, **environment})
    assert result.exit_code == 2
    assert complaint.replace("{config}", str(config)) in result.output


def test_texts_of_the_environment_get_the_types_of_the_settings(tmp_path: Path, started: list[Any]) -> None:
    config = tmp_path / "route.toml"
    config.write_text(
        '[route]\nprefill = ["http://p:1/"]\ndecode = ["http://d:1"]\nlimits = { body_s = 5 }\n'
    )
    environment = {
        "BATON_ROUTE_CONFIG": str(config),
        "BATON_ROUTE_FIRST_TOKEN": "no",
        "BATON_ROUTE_LOG_LEVEL": "INFO",
        "BATON_ROUTE_MODEL_ALIAS": "a=b c=b",
        "BATON_ROUTE_OUTLIER_DETECTION": '{"consecutive_5xx": 3}',
    }
    result = CliRunner().invoke(app, [], env=environment)
    assert result.exit_code == 0, result.output
    (settings,) = started
    assert (settings.prefill_urls, settings.reread_roles) == (("http://p:1",), ("prefill", "decode"))
    assert (settings.first_token, settings.doors.body_s) == (False, 5)
    assert settings.model_aliases == {"a": "b", "c": "b"}
    assert settings.outlier_detection.consecutive_5xx == 3


def test_idle_connections_are_closed_by_clients_first(started: list[Any]) -> None:
    """Else a request sent when the router closes meets a reset; aiohttp keeps them for 15 s, nginx for 60."""
    assert CliRunner().invoke(app, URLS).exit_code == 0
    assert server_config(None, started[0].doors).timeout_keep_alive > 60


def test_keys_hosts_and_limits_reach_the_doors(tmp_path: Path, started: list[Any]) -> None:
    (tmp_path / "keys").write_text("# of the team\nfirst-key-000\nsecond-key-00\n")
    (tmp_path / "keys").chmod(0o600)
    given = [*URLS, "--api-key-file", str(tmp_path / "keys"), "--limits", '{"body_s": 5}']
    result = CliRunner().invoke(
        app, [*given, "--allowed-hosts", "a.example, b.example"], env={"BATON_ENGINE_API_KEY": "engine-key"}
    )
    assert result.exit_code == 0, result.output
    (settings,) = started
    assert settings.doors.api_keys == ("first-key-000", "second-key-00")
    assert settings.engine_api_key == "engine-key"
    assert settings.doors.body_s == 5
    assert settings.checked_hosts == ("a.example", "b.example")


def test_a_key_of_registrations_needs_keys_of_others(tmp_path: Path, started: list[Any]) -> None:
    (tmp_path / "keys").write_text("key-of-engines")
    given = [*URLS, "--register-api-key-file", str(tmp_path / "keys")]
    wide = {"COLUMNS": "300", "TERM": "dumb"}
    result = CliRunner().invoke(app, given, env=wide)
    assert result.exit_code == 2
    assert "register_api_key_file" in result.output
    result = CliRunner().invoke(app, given, env={**wide, "BATON_ADMIN_API_KEY": "key-of-admin"})
    assert result.exit_code == 0, result.output
    doors = started[0].doors
    assert (doors.register_keys, doors.key_files.register_keys) == (("key-of-engines",), given[-1])


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["--limits", '{"body_s": 0}'], "limits.body_s: must be positive"),
        (["--limits", "{"], "limits: is not JSON"),
        (["--policy", "cost", "--kv-events", "http://p:1"], "must be URL=ENDPOINT"),
        (["--policy", "cost", "--kv-events", "http://p:9=tcp://p:1"], "is no engine of this router"),
        (["--policy", "cost", "--kv-events", "http://p:1=p:1"], "is no endpoint of ZeroMQ"),
        (["--tokenizer", "/nowhere"], "has no tokenizer.json"),
        (["--limits", '{"bodies": 1}'], "bodies"),
        (["--api-key-file", "/nowhere"], "api_key_file"),
    ],
)
def test_door_options_that_cannot_work_are_refused_by_name(given: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, [*URLS, *given], env={"COLUMNS": "300", "TERM": "dumb"})
    assert result.exit_code == 2
    assert complaint in result.output


def test_what_is_shown_is_a_file_that_says_the_same(tmp_path: Path, started: list[Any]) -> None:
    given = [*URLS, "--mode", "push", "--no-first-token"]
    shown = CliRunner().invoke(app, [*given, "--show-config"], env={"BATON_ROUTE_POLICY": "round_robin"})
    assert started == []
    assert 'mode = "push"  # command line' in shown.output
    assert 'policy = "round_robin"  # environment' in shown.output
    assert "port = 8000  # default" in shown.output
    (tmp_path / "route.toml").write_text(shown.output)
    environment = {"BATON_ROUTE_POLICY": "round_robin"}
    for arguments in (given, ["--config", str(tmp_path / "route.toml")]):
        assert CliRunner().invoke(app, arguments, env=environment).exit_code == 0
    first, second = started
    assert second.reread_roles == ("prefill", "decode")
    assert msgspec.structs.replace(first, reread_roles=second.reread_roles) == second
