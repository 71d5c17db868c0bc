"""One connector class in both hosts, whichever base class it has."""

import json
import os
import re
import sys
from pathlib import Path

from baton.cli.processes import free_ports
from tests.vllm.engines import START_S, Server, Site
from tests.vllm.prompts import Single, prompts
from tests.vllm.test_readme import ON_CPU, README


def test_the_readmes_connector_of_batons_base_class_runs_in_vllm(
    site: Site, single: Single, tmp_path: Path
) -> None:
    site.dismiss()
    [program] = re.findall(
        r"^```python\n([^`]*class IdleConnector.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE
    )
    (tmp_path / "idle_connector.py").write_text(program)
    transfer = {
        "kv_connector": "IdleConnector",
        "kv_connector_module_path": "idle_connector",
        "kv_role": "kv_both",
    }
    [port] = free_ports(1)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(site.model)]
    command += ["--port", str(port), "--kv-transfer-config", json.dumps(transfer), *ON_CPU]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    child = site.fleet.start("idle", command, env={"VLLM_CPU_OMP_THREADS_BIND": "0", "PYTHONPATH": path})
    try:
        site.fleet.wait_ready({child: f"http://127.0.0.1:{port}/health"}, timeout_s=START_S)
        server = Server("idle", f"http://127.0.0.1:{port}", child)
        for prompt in prompts()[:8]:
            assert server.tokens(prompt) == single.tokens(prompt)
        server.client.close()
    finally:
        site.end(child)
