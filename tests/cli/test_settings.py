"""Settings: precedence of origins, refusals, and protection of the secret."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cli.serve_settings import COMMAND, resolve
from baton.core.errors import ConfigError
from baton.server.settings import ServeSettings, parse_bytes

SECRET = "correct horse battery staple"
CONNECTOR = '{"kv_connector": "BatonPullConnector", "kv_role": "kv_both", "engine_id": "e0"}'


def write(folder: Path, text: str) -> str:
    path = folder / "baton.toml"
    path.write_text(text)
    return str(path)


STATE = {"XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}


def refusal(
    given: dict[str, Any] | None = None, environment: dict[str, str] | None = None, **more: Any
) -> str:
    with pytest.raises(ConfigError) as refused:
        resolve(given or {}, environment=environment or {}, **more)
    return str(refused.value)


def test_every_setting_has_a_section_and_only_one() -> None:
    listed = [name for names in COMMAND.sections.values() for name in names]
    assert sorted(listed) == sorted(COMMAND.settings)
    assert set(ServeSettings.__struct_fields__) <= COMMAND.settings.keys()


def test_command_line_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = write(tmp_path, "[cache]\nblock_size = 8\n[server]\nport = 1\n[scheduler]\nmax_num_seqs = 3\n")
    environment = {"BATON_PORT": "2", "BATON_MAX_NUM_SEQS": "4"}
    resolved = resolve({"max_num_seqs": 5}, environment=environment, config_file=file)
    settings = resolved.settings
    assert (settings.block_size, settings.port, settings.seed, resolved.values["max_num_seqs"]) == (
        8,
        2,
        0,
        5,
    )
    assert resolved.values.origins == {
        "block_size": f"file {file}",
        "port": "environment BATON_PORT",
        "max_num_seqs": "command line --max-num-seqs",
    }


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = write(tmp_path, '[model]\nmodel = "m"\n')
    assert resolve({}, environment={"BATON_CONFIG": file}).settings.model == "m"


def test_the_connector_is_json_on_the_command_line_and_a_table_in_the_file(tmp_path: Path) -> None:
    file = write(
        tmp_path, '[cluster.kv_transfer_config]\nkv_connector = "X"\nkv_role = "kv_both"\nengine_id = "e"\n'
    )
    from_file = resolve({}, environment=STATE, config_file=file).settings.kv_transfer_config
    text = '{"kv_connector": "X", "kv_role": "kv_both", "engine_id": "e"}'
    assert from_file == resolve({"kv_transfer_config": text}, environment=STATE).settings.kv_transfer_config
    assert (
        from_file
        == resolve({}, environment={**STATE, "BATON_KV_TRANSFER_CONFIG": text}).settings.kv_transfer_config
    )


@pytest.mark.parametrize(
    ("given", "environment", "words"),
    [
        ({"port": 70000}, {}, ["port", "command line --port"]),
        ({}, {"BATON_PORT": "http"}, ["port", "environment BATON_PORT"]),
        ({}, {"BATON_ENABLE_PREFIX_CACHING": "maybe"}, ["enable_prefix_caching", "environment"]),
        ({"dtype": "int3"}, {}, ["dtype", "command line --dtype"]),
        ({"register": "http://r:1"}, {}, ["register_role", "prefill, decode or both"]),
        ({"register": "r:1", "register_role": "both"}, {}, ["register", "command line --register"]),
        (
            {"register": "http://r:1", "register_role": "prefill", "host": "0.0.0.0"},
            {},
            ["register_url", "http://0.0.0.0:8000"],
        ),
        ({"register": "redis://r", "register_role": "decode", "register_ttl_s": 0.5}, {}, ["register_ttl_s"]),
        ({"kv_transfer_config": "{"}, {}, ["kv_transfer_config", "command line"]),
        ({"kv_transfer_config": '{"kv_conector": 1}'}, {}, ["kv_conector"]),
        ({"kv_events_config": '{"hwm": 0}'}, {}, ["kv_events_config.hwm", "at least 1"]),
        ({"kv_cache_memory": "lots"}, {}, ["kv_cache_memory", "512MiB"]),
        ({"kv_cache_memory": "1GiB", "num_blocks": 5}, {}, ["kv_cache_memory", "num_blocks"]),
        ({"max_model_len": 0}, {}, ["max_model_len"]),
        ({}, {"BATON_SECRET": "short"}, ["BATON_SECRET", "16 bytes"]),
        ({"secret_file": "/nonexistent"}, {}, ["secret_file", "/nonexistent"]),
    ],
)
def test_a_bad_value_names_setting_and_origin(
    given: dict[str, Any], environment: dict[str, str], words: list[str]
) -> None:
    message = refusal(given, environment)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\nprot = 1\n", ["server.prot", "port"]),
        ("[servers]\nport = 1\n", ["servers", "[server]"]),
        ("port = 1\n", ["port", "[server]"]),
        ("[server", ["TOML"]),
        ('[server]\nport = "x"\n', ["port", "file"]),
    ],
)
def test_a_typing_error_in_the_file_is_refused(tmp_path: Path, text: str, words: list[str]) -> None:
    message = refusal(config_file=write(tmp_path, text))
    assert all(word in message for word in words), message


def test_text_from_the_environment_gets_the_type_of_the_setting() -> None:
    environment = {
        "BATON_ENABLE_PREFIX_CACHING": "false",
        "BATON_SHUTDOWN_TIMEOUT_S": "1.5",
        "BATON_SEED": "7",
    }
    values = resolve({}, environment=environment).values
    assert [values[name] for name in ("enable_prefix_caching", "shutdown_timeout_s", "seed")] == [
        False,
        1.5,
        7,
    ]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("BATON_MAX_NUM_SEQ", "BATON_MAX_NUM_SEQS"),
        ("BATON_SECRETS", "BATON_SECRET"),
        ("BATON_FROBNICATE", "unset it"),
    ],
)
def test_a_misspelt_variable_is_refused_with_a_suggestion(name: str, hint: str) -> None:
    message = refusal(environment={name: "1"})
    assert name in message
    assert hint in message


def test_variables_of_other_commands_are_left_alone() -> None:
    resolve({}, environment={"BATON_ROUTE_MODE": "push", "BATON_BENCH_VLLM_PYTHON": "python", "HOME": "/"})


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "# num_blocks: 2048 (default)"),
        ({"kv_cache_memory": "1GiB"}, "# num_blocks: as many as kv_cache_memory holds"),
        ({}, "# drain_timeout_s: 0 (default of this role)"),
        ({"kv_transfer_config": CONNECTOR}, "# drain_timeout_s: 30 (default of this role)"),
        ({"tensor_parallel_size": 2}, "# executor: multiprocess (default for 2 ranks)"),
    ],
)
def test_defaults_are_shown(given: dict[str, Any], line: str) -> None:
    assert line in resolve(given, environment=STATE).shown().splitlines()


def test_an_empty_variable_counts_as_unset() -> None:
    assert resolve({}, environment={"BATON_PORT": ""}).settings.port == 8000


def test_a_secret_file_on_the_command_line_precedes_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET} of the file\n")
    environment = {"BATON_SECRET": SECRET}
    by_environment = resolve({}, environment=environment)
    assert by_environment.secret is not None
    assert by_environment.secret.key == SECRET.encode()
    typed = resolve({"secret_file": str(file)}, environment=environment)
    assert typed.secret is not None
    assert typed.secret.key == f"{SECRET} of the file".encode()
    in_config = write(tmp_path, f'[cluster]\nsecret_file = "{file}"\n')
    assert resolve({}, environment=environment, config_file=in_config).secret == by_environment.secret
    assert resolve({}, environment={}, config_file=in_config).secret == typed.secret


def test_the_secret_is_never_shown(tmp_path: Path) -> None:
    resolved = resolve({"model": "m"}, environment={"BATON_SECRET": SECRET})
    for shown in (resolved.shown(), repr(resolved), str(resolved)):
        assert SECRET not in shown
        assert "***" in shown


def test_the_output_of_show_config_is_a_file_with_the_same_settings(tmp_path: Path) -> None:
    given = {
        "model": 'a "b" é',
        "port": 1,
        "enable_prefix_caching": False,
        "kv_transfer_config": CONNECTOR,
        "kv_events_config": '{"enable_kv_cache_events": true}',
    }
    resolved = resolve(given, environment=STATE)
    shown = resolved.shown()
    assert "port = 1  # command line --port" in shown
    assert "# block_size: 16; with recurrent states" in shown
    again = resolve({}, environment=STATE, config_file=write(tmp_path, shown))
    assert again.settings == resolved.settings


def test_an_engine_registers_in_its_role_and_under_its_url() -> None:
    settings = resolve(
        {"register": "http://r:1, valkey://r:2/0", "register_role": "both", "register_weight": 0.5},
        environment={"BATON_REGISTER_KEY": "key-of-router"},
    )
    assert settings.register_key == "key-of-router"
    found = settings.settings.registrations("http://127.0.0.1:8100", "m")
    assert [(one.type, one.instance, one.model, one.weight) for one in found] == [
        ("prefill", "http://127.0.0.1:8100", "m", 0.5),
        ("decode", "http://127.0.0.1:8100", "m", 0.5),
    ]


def test_an_engine_that_moves_kv_without_a_secret_stays_on_the_loopback() -> None:
    given = {"host": "0.0.0.0", "kv_transfer_config": CONNECTOR}
    message = refusal(given, dict(STATE))
    assert "host" in message
    assert "BATON_SECRET" in message
    assert resolve(given, environment={"BATON_SECRET": SECRET}).settings.host == "0.0.0.0"
    assert resolve({"host": "0.0.0.0"}, environment={}).settings.host == "0.0.0.0"
    insecure = {**given, "insecure_no_secret": True}
    assert "host" in refusal(insecure)
    assert resolve({**insecure, "host": "::1"}, environment={}).secret is None
    for host in ("127.0.0.1", "127.3.2.1", "::1", "localhost"):
        assert resolve({**given, "host": host}, environment=STATE).settings.moves_kv


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("512MiB", 512 << 20),
        ("1.5 GiB", 3 << 29),
        ("2GB", 2 * 10**9),
        ("4kb", 4000),
        ("7", 7),
        ("3m", 3 * 10**6),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_bytes(text, field="f") == nbytes


@given(st.text(max_size=8))
def test_any_text_is_a_size_or_refused(text: str) -> None:
    with suppress(ConfigError):
        assert parse_bytes(text, field="f") >= 0
