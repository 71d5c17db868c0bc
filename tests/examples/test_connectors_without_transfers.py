"""Examples that move no KV: prompts filled with made-up KV, and hidden states in files."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from baton.core.config import DeviceConfig, SchedulerConfig
from baton.testing.contract.case import ConnectorCase
from baton.testing.contract.check import check_connector
from tests.connectors.engine_world import GREEDY, SETTLE_S, config_of, prompt_of, start_in, three_layers

LAYERS = [0, 1, 3]  # A model of three has the embeddings, the first output, and the last.


def transfer(name: str, module: str, **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_connector_module_path": f"examples.{module}",
        "kv_connector_extra_config": extra,
    }


@pytest.mark.parametrize("path", ["decode_bench:DecodeBenchConnector", "hidden_states:HiddenStatesConnector"])
def test_they_pass_the_conformance_kit(path: str, tmp_path: Path) -> None:
    saves = "Hidden" in path
    extra = {"path": str(tmp_path), "layer_ids": [0, 2]} if saves else {}
    case = ConnectorCase(path=f"examples.{path}", extra_config=extra, speaks_text=saves)
    check_connector(case, examples=4, seed=0).raise_if_broken()
    assert any(tmp_path.iterdir()) == saves


@pytest.mark.slow
def test_only_the_last_token_of_a_synthetic_prompt_is_computed(tmp_path: Path) -> None:
    with ExitStack() as stack:
        config = config_of(three_layers(tmp_path), transfer("DecodeBenchConnector", "decode_bench"))
        llm = start_in(stack, config)
        prompt = prompt_of(50)
        first, second = (llm.generate([prompt], GREEDY)[0] for _ in range(2))
        assert first.num_transferred_tokens == 49
        assert first.kv_transfer_params == {"synthetic_tokens": 49}
        assert first.token_ids == second.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("graph_mode", ["off", "full"])
def test_hidden_states_equal_those_of_transformers(tmp_path: Path, graph_mode: Any) -> None:
    from transformers import AutoModelForCausalLM

    saves = transfer("HiddenStatesConnector", "hidden_states", path=str(tmp_path), layer_ids=LAYERS)
    model = three_layers(tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(model.model, dtype=torch.float32)
    config = config_of(
        model,
        saves,
        # Prompts take several steps, one after the other, in blocks that the one before has freed.
        scheduler_config=SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=1),
        device_config=DeviceConfig(graph_mode=graph_mode),
    )
    # The third has the beginning of the first, which is in the prefix cache.
    prompts = [prompt_of(37), prompt_of(21, step=11), [*prompt_of(24), 9, 9, 9]]
    with ExitStack() as stack:
        llm = start_in(stack, config)
        completions = llm.generate(prompts, GREEDY)
        llm.settle(SETTLE_S)
    assert completions[2].num_cached_tokens >= 20
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.kv_transfer_params is not None
        saved = load_file(completion.kv_transfer_params["hidden_states_path"])
        assert saved["token_ids"].tolist() == prompt
        with torch.inference_mode():
            states = theirs(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        expected = torch.stack([states[layer][0] for layer in LAYERS], dim=1)
        torch.testing.assert_close(saved["hidden_states"], expected, atol=1e-4, rtol=1e-4)
