"""The `baton` command: output and exit status, and that help imports nothing heavy."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

import baton
from baton.bench.command import BENCHMARKS
from baton.cli.main import COMMANDS, app


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env=environment)
    return result.exit_code, result.output


def test_the_version_is_the_packages() -> None:
    assert run("--version") == (0, f"baton {baton.__version__}\n")


@pytest.mark.parametrize("module", BENCHMARKS.values())
def test_every_benchmark_is_a_program_too(module: str) -> None:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert 'if __name__ == "__main__":' in Path(spec.origin).read_text()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_listed_and_explains_itself(command: str) -> None:
    assert command in run("--help")[1]
    status, output = run(command, "--help")
    assert status == 0
    assert f"{command} " in output
    assert "--install-completion" not in output


def test_help_and_show_config_import_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from baton.cli.main import app, COMMANDS\n"
        "helps = [['--help'], *([command, '--help'] for command in COMMANDS)]\n"
        "for arguments in [*helps, ['serve', 'm', '--show-config']]:\n"
        "    assert CliRunner().invoke(app, arguments).exit_code == 0, arguments\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'uvicorn', 'zmq', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "[]\n"


def test_show_config_prints_values_with_origins_and_starts_nothing() -> None:
    status, output = run("serve", "/nowhere", "--show-config", BATON_PORT="9", BATON_SECRET="x" * 20)
    assert status == 0
    assert 'model = "/nowhere"  # command line --model' in output
    assert "port = 9  # environment BATON_PORT" in output
    assert "# cluster secret: *** (environment BATON_SECRET)" in output
    assert "x" * 20 not in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve"], ["model", "baton serve MODEL"]),
        (["serve", "/nowhere"], ["model", "/nowhere"]),
        (["serve", "m", "--port", "70000"], ["port", "command line"]),
        (["serve", "m", "--config", "/nowhere.toml"], ["config", "/nowhere.toml"]),
        (["model", "new", "{folder}", "--family", "gpt9"], ["family", "gpt9"]),
    ],
)
def test_wrong_settings_exit_with_2_and_advice(
    arguments: list[str], words: list[str], tmp_path: Path
) -> None:
    status, output = run(*(argument.replace("{folder}", str(tmp_path)) for argument in arguments))
    assert status == 2
    assert all(word in output for word in words), output


@pytest.mark.processes
def test_a_router_that_is_told_to_stop_ends_with_status_0() -> None:
    command = [sys.executable, "-m", "baton.cli", "route", "--port", "0"]
    command += ["--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:9"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as router:
        assert router.stderr is not None
        for line in router.stderr:
            if "listening on" in line:
                break
        router.terminate()
        router.stderr.read()
    assert router.returncode == 0
