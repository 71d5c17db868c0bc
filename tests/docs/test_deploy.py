"""The deployment files name commands and options that `baton` has."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from baton.cli.main import app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SECRET = "0123456789abcdef0123456789abcdef"
VERIFY_S = 60.0


def shown(command: list[str]) -> str:
    """What `baton COMMAND --show-config` prints. It checks every option and starts nothing."""
    done = CliRunner().invoke(app, [*command, "--show-config"], env={"BATON_SECRET": SECRET})
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("service", ["prefill", "decode"])
def test_the_engines_of_the_compose_file_start_with_what_it_says(service: str) -> None:
    config = shown(SERVICES[service]["command"])
    assert "port = 8100  # command line --port" in config
    assert f'advertise_host = "{service}"' in config or f'"advertise_host" = "{service}"' in config
    assert "environment BATON_SECRET" in config


def test_the_router_of_the_compose_file_asks_these_engines() -> None:
    config = shown(SERVICES["router"]["command"])
    for service in ("prefill", "decode"):
        assert f"http://{service}:8100" in config
        assert SERVICES["router"]["depends_on"][service] == {"condition": "service_healthy"}


def test_engines_get_more_time_to_stop_than_they_take() -> None:
    config = shown(SERVICES["prefill"]["command"])
    drain_s = float(re.findall(r"# drain_timeout_s: (\d+)", config)[0])
    shutdown_s = float(re.findall(r"shutdown_timeout_s = ([\d.]+)", config)[0])
    for service in ("prefill", "decode"):
        assert float(SERVICES[service]["stop_grace_period"].removesuffix("s")) > drain_s + shutdown_s
    for unit in UNITS:
        [stop_s] = re.findall(r"^TimeoutStopSec=(\d+)$", unit.read_text(), re.MULTILINE)
        assert float(stop_s) > drain_s + shutdown_s


def test_the_image_runs_the_wheel() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert "kv_baton-*.whl" in text
    assert 'ENTRYPOINT ["baton"]' in text


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_units_run_commands_that_baton_has(unit: Path) -> None:
    [start] = re.findall(r"^ExecStart=(.+)$", unit.read_text(), re.MULTILINE)
    program, command, option, _ = shlex.split(start)
    assert program == "/opt/baton/bin/baton"
    assert option == "--config"
    assert option in CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_understands_the_units(unit: Path, tmp_path: Path) -> None:
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed")
    # It also looks whether the program exists.
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/baton/bin/baton", "/bin/true"))
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        timeout=VERIFY_S,
        check=False,
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if unit.name in line]) == (0, [])
