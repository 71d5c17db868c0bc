"""Each extra of the package brings what its commands import, and no more than it should."""

import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from baton.cli.extras import COMMANDS, MODULES
from baton.cli.main import COMMANDS as ALL_COMMANDS
from tests.installs.only import ROOT, closure, normal

CONNECTORS = """
import baton.connectors.multi, baton.connectors.pull, baton.connectors.push
import baton.connectors.storage.connectors
import baton.contract, baton.protocol.introduction
import baton.transport.local.transport, baton.transport.tcp.transport
import baton.hosts.vllm, baton.hosts.vllm.identity, baton.hosts.vllm.self_test
"""
HELP = """
from typer.testing import CliRunner
from baton.cli.main import app
for command in {commands}:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0, (command, result.exception)
"""
ROUTER = """
import asyncio, urllib.request
from baton.router.values.settings import RouterSettings
from baton.router.processes import run, worker
from baton.router.shell import index_process
from baton.router.processes.app import Router

async def answers():
    router = Router(RouterSettings(prefill_urls=("http://127.0.0.1:9",), decode_urls=("http://127.0.0.1:9",)))
    port = await router.listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{port}/version"
    answer = await asyncio.to_thread(urllib.request.urlopen, url, timeout=10)
    await router.close()
    return answer.status

assert asyncio.run(answers()) == 200
"""
PROGRAMS = {
    "host:torch": CONNECTORS,
    "router": HELP.format(commands=["route"]) + ROUTER,
    "engine": HELP.format(commands=["bench", "doctor", "model", "serve"])
    + "import baton.server.run, baton.server.app, baton.engine.llm, baton.engine.core, baton.assemble\n"
    + "import baton.checkpoints.random_model, baton.engine.models.loading, baton.cli.processes\n",
    "engine,router": HELP.format(commands=["demo", "up"]) + "import baton.cli.demo_run\n",
    "check": HELP.format(commands=["check"]) + "import baton.testing.contract.ours, baton.testing.contract\n",
    "cli": HELP.format(commands=["cache", "top"]) + "import httpx\n",
}


def run_only(extras: str, program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(__file__).with_name("only.py")), extras, program]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)


@pytest.mark.processes
@pytest.mark.parametrize("extras", PROGRAMS)
def test_an_install_has_what_it_is_for(extras: str) -> None:
    done = run_only(extras, PROGRAMS[extras])
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_base_install_is_what_connectors_need() -> None:
    assert len(closure([])) <= 12
    assert not {"torch", "typer", "starlette"} & closure([])


def test_the_router_needs_no_torch_and_few_packages() -> None:
    found = closure(["router"])
    assert "torch" not in found
    assert len(found) <= 30, sorted(found)


def test_every_command_names_its_extra() -> None:
    assert set(COMMANDS) == set(ALL_COMMANDS)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    owners = packages_distributions()
    for extra, modules in MODULES.items():
        brought = {normal(Requirement(line).name) for line in extras[extra]}
        assert {normal(name) for module in modules for name in owners[module]} == brought


@pytest.mark.processes
@pytest.mark.parametrize(
    ("installed", "arguments", "error"),
    [
        (
            "cli",
            ["route", "--help"],
            "baton route needs kv-baton[router]: "
            "pip install 'kv-baton[router]' (no module named 'httptools')",
        ),
        (
            "router",
            ["serve", "m"],
            "baton serve needs kv-baton[engine]: pip install 'kv-baton[engine]' (no module named 'httpx')",
        ),
        ("", ["--help"], "baton needs kv-baton[cli]: pip install 'kv-baton[cli]' (no module named 'typer')"),
    ],
)
def test_a_command_without_its_extra_names_it(installed: str, arguments: list[str], error: str) -> None:
    done = run_only(installed, f"sys.argv[1:] = {arguments}; from baton.cli import main; main()")
    assert (done.returncode, done.stderr.strip()) == (1, error)
