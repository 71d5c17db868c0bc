"""The commands of the README's section "With vLLM", run as printed."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from baton.cli.processes import Child, is_port_free
from tests.vllm.engines import API_SERVER, ON_CPU, ROUTER_START_S, START_S, Server, Site, wait_introduced
from tests.vllm.prompts import Single, prompts

README = Path(__file__).parents[2] / "README.md"
PORTS = (8000, 8100, 8200)


def commands() -> list[list[str]]:
    [block] = re.findall(r"^```vllm\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for line in block.replace("\\\n", "").splitlines()]


def start(site: Site, name: str, command: list[str]) -> Child:
    program, verb, *rest = command
    if program == "baton":
        return site.fleet.start(name, [sys.executable, "-m", "baton.cli", verb, *rest])
    assert (program, verb, rest[0]) == ("vllm", "serve", "MODEL")
    return site.fleet.start(name, [*API_SERVER, "--model", str(site.model), *rest[1:], *ON_CPU])


@pytest.mark.skipif(
    not all(is_port_free("127.0.0.1", port) for port in PORTS),
    reason="a port that the README names is in use",
)
def test_the_readmes_commands_for_vllm_work(site: Site, single: Single) -> None:
    site.dismiss()
    producer, consumer, route = commands()
    started = {
        start(site, "readme-p", producer): "http://127.0.0.1:8100/health",
        start(site, "readme-d", consumer): "http://127.0.0.1:8200/health",
    }
    try:
        site.fleet.wait_ready(started, timeout_s=START_S)
        router = start(site, "readme-router", route)
        started[router] = "http://127.0.0.1:8000/health"
        site.fleet.wait_ready({router: started[router]}, timeout_s=ROUTER_START_S)
        server = Server("readme", "http://127.0.0.1:8000", router)
        wait_introduced(server, of_prefill=True)
        asked = [prompt for prompt in prompts() if len(prompt) in (200, 1000)]
        for prompt in asked:
            assert server.tokens(prompt) == single.tokens(prompt)
        assert server.metric("baton:router_prefills_total", where="remote") == len(asked)
        server.client.close()
    finally:
        site.end(*started)
