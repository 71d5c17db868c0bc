"""A connector class runs in both hosts, with either base class."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.vllm.engines import START_S, Site, VllmPlan
from tests.vllm.prompts import Single, prompts
from tests.vllm.test_readme import README


def test_the_readmes_connector_of_batons_base_class_runs_in_vllm(
    site: Site, single: Single, tmp_path: Path
) -> None:
    [program] = re.findall(
        r"^```python\n([^`]*class IdleConnector.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE
    )
    (tmp_path / "idle_connector.py").write_text(program)
    transfer = {
        "kv_connector": "IdleConnector",
        "kv_connector_module_path": "idle_connector",
        "kv_role": "kv_both",
    }
    server = site.cast("idle", VllmPlan("idle", transfer, path=(str(tmp_path),)))["idle"]
    for prompt in prompts()[:8]:
        assert server.tokens(prompt) == single.tokens(prompt)


IN_THE_EMBEDDED_ENGINE = """
import sys
from baton.core.config import CacheConfig, EngineConfig, KVTransferConfig
from baton.engine.api import SamplingParams
from baton.checkpoints.checkpoint import load_model_config
from baton.engine.llm import LLM

model, folder = sys.argv[1:]

def transfer(connector, module):
    return KVTransferConfig(
        kv_connector=connector,
        kv_connector_module_path=module,
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": f"{folder}/{connector}"},
    )

example = transfer("ExampleConnector", "vllm.distributed.kv_transfer.kv_connector.v1.example_connector")
tokens_first = transfer("TokensFirst", "tokens_first")
cache = CacheConfig(block_size=16, num_gpu_blocks=128)
prompts = [[(7 * i + length) % 1000 + 5 for i in range(length)] for length in (40, 77, 200)]
greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
answers = []
for given in (None, example, example, tokens_first, tokens_first):
    config = EngineConfig(
        model_config=load_model_config(model), cache_config=cache, kv_transfer_config=given
    )
    with LLM(config) as llm:
        answers.append(llm.generate(prompts, greedy))
tokens = [[completion.token_ids for completion in answer] for answer in answers]
assert tokens == [tokens[0]] * 5, tokens
moved = [[completion.num_transferred_tokens for completion in answer] for answer in answers]
assert moved == [[0, 0, 0], *[[0, 0, 0], [32, 64, 192]] * 2], moved
"""
TOKENS_FIRST = """
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

class TokensFirst(ExampleConnector):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config):
        return "NHD"

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        assert kv_layer.transpose(1, 2)[0].is_contiguous(), kv_layer.stride()
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
"""


def test_vllms_example_connector_runs_in_the_embedded_engine(site: Site, tmp_path: Path) -> None:
    """The connector runs as it is and with another layout; in another process, because this one has
    registered Baton's classes with vLLM.
    """
    (tmp_path / "tokens_first.py").write_text(TOKENS_FIRST)
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_EMBEDDED_ENGINE, str(site.model), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
