"""The README's commands and programs, run unchanged."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from baton.cli.processes import Fleet, is_port_free
from baton.contract import KVConnectorBase_V1

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
START_S = 240.0  # Also beside two other suites on two cores.

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def block_with(language: str, text: str) -> str:
    [block] = [block for block in blocks(language) if text in block]
    return block


def commands(block: str) -> list[list[str]]:
    return [shlex.split(line, comments=True) for line in block.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader types: `baton` is on the path and `my-model` is made by the first command."""
    folder = tmp_path_factory.mktemp("reader")
    new_model, _ = commands(block_with("sh", "baton model new"))
    run(new_model, folder)
    return folder


def environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    return {**own, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment(), timeout=START_S, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_python(program: str, folder: Path) -> str:
    return run([sys.executable, "-W", "error::DeprecationWarning:baton", "-c", program], folder)


def skip_unless_free(port: int) -> None:
    if not is_port_free("127.0.0.1", port):
        pytest.skip(f"port {port}, which the README names, is in use on this machine")


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    typed = re.findall(r"^    make (\w+)$", README, re.MULTILINE)
    assert typed == ["demo", "test"]
    for target in typed:
        assert f"scripts/{target}" in run(["make", "--dry-run", target], ROOT)
        assert os.access(ROOT / "scripts" / target, os.X_OK)


def test_a_system_comes_up_and_the_openai_client_talks_to_it(folder: Path, tmp_path: Path) -> None:
    skip_unless_free(8000)
    _, up = commands(block_with("sh", "baton model new"))
    with Fleet(tmp_path, env=environment()) as fleet:
        child = fleet.start("up", ["/usr/bin/env", "-C", str(folder), *up])
        fleet.wait_ready({child: "http://127.0.0.1:8000/health"}, timeout_s=START_S)
        assert run_python(block_with("python", "from openai import OpenAI"), folder).strip("\n")


def test_the_engine_runs_inside_python(folder: Path) -> None:
    printed = run_python(block_with("python", "from baton import LLM"), folder)
    assert len(re.findall(r"\d+", printed)) == 8


def test_the_smallest_connector_is_one(folder: Path) -> None:
    program = block_with("python", "class IdleConnector")
    names: dict[str, type] = {}
    exec(program, names)
    assert issubclass(names["IdleConnector"], KVConnectorBase_V1)
    assert not getattr(names["IdleConnector"], "__abstractmethods__", None)
    (folder / "idle_connector.py").write_text(program)
    run_python(
        "import msgspec\n"
        "from baton.core.config import EngineConfig, KVTransferConfig\n"
        "from baton.engine.api import SamplingParams\n"
        "from baton.checkpoints.checkpoint import load_model_config\n"
        "from baton.engine.llm import LLM\n"
        "transfer = KVTransferConfig(kv_connector='IdleConnector', kv_role='kv_both',\n"
        "                            kv_connector_module_path='idle_connector')\n"
        "config = EngineConfig(model_config=load_model_config('my-model'), kv_transfer_config=transfer)\n"
        "with LLM(config) as llm:\n"
        "    assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))[0].token_ids) == 4\n",
        folder,
    )


def test_the_kit_judges_it_as_shown(folder: Path) -> None:
    (folder / "idle_connector.py").write_text(block_with("python", "class IdleConnector"))
    [check] = commands(block_with("sh", "baton check"))
    run(check, folder)
    names: dict[str, type] = {}
    exec(block_with("python", "connector_suite"), names)  # `tests/testing` runs such a class.
    assert "test_it_keeps_the_contract" in vars(names["TestIdle"])


def test_an_engine_keeps_blocks_in_host_memory_as_shown(folder: Path, tmp_path: Path) -> None:
    skip_unless_free(8300)
    [serve] = [shlex.split(block_with("sh", "BatonOffloadConnector"))]
    with Fleet(tmp_path, env=environment()) as fleet:
        child = fleet.start("serve", ["/usr/bin/env", "-C", str(folder), *serve])
        fleet.wait_ready({child: "http://127.0.0.1:8300/health"}, timeout_s=START_S)
