"""Hidden states saved by vLLM equal those that transformers computes for the same tokens."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.connectors.hidden_states import load_hidden_states
from tests.vllm.engines import ANSWER_S, Server, Site, VllmPlan, transfer
from tests.vllm.prompts import prompts

LENGTHS = (8, 129, 300, 513, 777, 2000, 3900)  # The last two take more than one step.
ASKED = [next(prompt for prompt in prompts() if len(prompt) == length) for length in LENGTHS]
TOLERANCE = 2e-4  # For values of about 1; both compute in float32, in different orders.


def saving(folder: Path) -> dict[str, Any]:
    settings = {"shared_storage_path": str(folder)}
    return transfer("BatonHiddenStatesConnector", "kv_producer", "states", extra=settings)


def speculating(layers: Sequence[int]) -> tuple[str, str]:
    """The option with which vLLM extracts these layers' states."""
    config = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
    }
    return "--speculative-config", json.dumps(config)


class States:
    """States that transformers computes from a checkpoint; the last layer's before the final norm."""

    def __init__(self, model: Path, layers: Sequence[int]) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._layers = layers
        assert layers[-1] == self._model.config.num_hidden_layers

    def __call__(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[tokens, layers, hidden size]."""
        before_norm: list[torch.Tensor] = []
        hook = self._model.model.norm.register_forward_pre_hook(
            lambda _, given: before_norm.append(given[0][0])
        )
        with torch.inference_mode():
            states = self._model(torch.tensor([list(token_ids)]), output_hidden_states=True).hidden_states
        hook.remove()
        return torch.stack([*(states[layer][0] for layer in self._layers[:-1]), before_norm[0]], dim=1)


LAYERS = (0, 2, 4)  # The embeddings, one in the middle, and the last.


@pytest.fixture(scope="module")
def expected(model: Path) -> States:
    return States(model, LAYERS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def engine(site: Site, folder: Path) -> Server:
    plan = VllmPlan("states", saving(folder), extra=speculating(LAYERS))
    return site.cast("states", plan)[plan.name]


def states_of(engine: Server, prompt: Sequence[int], params: Any = None) -> tuple[dict[str, Any], list[int]]:
    """Return the saved states and the tokens of the answer."""
    answer = engine.complete(prompt, params).raise_for_status().json()
    saved = load_hidden_states(answer["kv_transfer_params"]["hidden_states_path"], ANSWER_S)
    return saved, answer["choices"][0]["token_ids"]


def assert_equal(saved: dict[str, Any], token_ids: Sequence[int], expected: torch.Tensor) -> None:
    assert saved["token_ids"].tolist() == list(token_ids)
    torch.testing.assert_close(saved["hidden_states"], expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_states_of_concurrent_prompts_equal_transformers(engine: Server, expected: States) -> None:
    with ThreadPoolExecutor(len(ASKED)) as asking:
        saved = list(asking.map(lambda prompt: states_of(engine, prompt)[0], ASKED))
    for prompt, states in zip(ASKED, saved, strict=True):
        assert_equal(states, prompt, expected(prompt))


def test_a_prefix_cache_hit_has_its_states(engine: Server, expected: States) -> None:
    longer = [*ASKED[-2], *ASKED[0]]
    states_of(engine, ASKED[-2])
    before = engine.metric("vllm:prefix_cache_hits_total")
    saved, _ = states_of(engine, longer)
    engine.wait_metric("vllm:prefix_cache_hits_total", lambda count: count > before + 1000)
    assert_equal(saved, longer, expected(longer))


def test_output_tokens_are_saved_on_request(engine: Server, expected: States) -> None:
    saved, answered = states_of(engine, ASKED[2], {"include_output_tokens": True})
    tokens = [*ASKED[2], *answered[:-1]]
    assert_equal(saved, tokens, expected(tokens))


def test_bad_params_cost_only_the_file(engine: Server, folder: Path) -> None:
    for params in ({"hidden_states_path": str(folder / "mine.safetensors")}, {"include_output_tokens": 7}):
        answer = engine.complete(ASKED[0], params)
        assert answer.status_code == 200
        assert answer.json()["kv_transfer_params"] is None
    assert not (folder / "mine.safetensors").exists()
    assert engine.is_healthy()


def test_saved_files_are_counted(engine: Server, folder: Path) -> None:
    states_of(engine, ASKED[0])
    engine.tokens(ASKED[0])  # Counts arrive with a later step.
    engine.wait_metric("baton:hidden_states_files_total", lambda count: count >= 1)
    assert engine.metric("baton:hidden_states_lost_files_total") == 0
