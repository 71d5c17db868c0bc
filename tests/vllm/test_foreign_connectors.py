"""A connector class runs in both hosts, with either base class."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


IN_THE_EMBEDDED_ENGINE = """
import sys
from baton.core.config import CacheConfig, EngineConfig, KVTransferConfig
from baton.engine.api import SamplingParams
from baton.engine.checkpoints.checkpoint import load_model_config
from baton.engine.llm import LLM

model, store, connector, module = sys.argv[1:]
cache = CacheConfig(block_size=16, num_gpu_blocks=128)
transfer = KVTransferConfig(
    kv_connector=connector,
    kv_connector_module_path=module,
    kv_role="kv_both",
    kv_connector_extra_config={"shared_storage_path": store},
)
prompts = [[(7 * i + length) % 1000 + 5 for i in range(length)] for length in (40, 77, 200)]
greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
answers = []
for given in (None, transfer, transfer):
    config = EngineConfig(
        model_config=load_model_config(model), cache_config=cache, kv_transfer_config=given
    )
    with LLM(config) as llm:
        answers.append(llm.generate(prompts, greedy))
alone, saved, loaded = ([completion.token_ids for completion in answer] for answer in answers)
assert alone == saved == loaded, (alone, saved, loaded)
moved = [[completion.num_transferred_tokens for completion in answer] for answer in answers]
assert moved == [[0, 0, 0], [0, 0, 0], [32, 64, 192]], moved
"""


EXAMPLE = "vllm.distributed.kv_transfer.kv_connector.v1.example_connector"
TOKENS_FIRST = f"""
from {EXAMPLE} import ExampleConnector

class TokensFirst(ExampleConnector):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config):
        return "NHD"

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        assert kv_layer.transpose(1, 2)[0].is_contiguous(), kv_layer.stride()
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
"""


@pytest.mark.parametrize(
    ("connector", "module"), [("ExampleConnector", EXAMPLE), ("TokensFirst", "tokens_first")]
)
def test_vllms_example_connector_runs_in_the_embedded_engine(
    site: Site, tmp_path: Path, connector: str, module: str
) -> None:
    """Run in another process: this one has registered Baton's classes with vLLM."""
    (tmp_path / "store").mkdir()
    (tmp_path / "tokens_first.py").write_text(TOKENS_FIRST)
    arguments = [str(site.model), str(tmp_path / "store"), connector, module]
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_EMBEDDED_ENGINE, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
