"""A small GPT-OSS in a real vLLM: attention sinks, experts, and every other layer with a window.

Includes hidden states, whose layer has its own KV-cache group here, with blocks of another size.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.vllm.engines import Server, Site, VllmPlan, check_handoffs, transfer
from tests.vllm.prompts import Prompt, prompts
from tests.vllm.test_hidden_states import States, saving, speculating, states_of

BLOCK, WINDOW, LAYERS = 32, 100, (0, 2, 4)
SIZES = ("--block-size", str(BLOCK))
P = VllmPlan("p", transfer("BatonPushConnector", "kv_producer", "p"), extra=SIZES)
D = VllmPlan("d", transfer("BatonPushConnector", "kv_consumer", "d"), extra=SIZES)
ASKED = [prompt for prompt in prompts() if len(prompt) in (8, 129, 300, 777)]


@pytest.fixture(scope="module")
def sinks(site_of: Callable[..., Site]) -> Site:
    shape = ("--layers", str(LAYERS[-1]), "--sliding-window", str(WINDOW))
    return site_of("--family", "gpt_oss", *shape, "--rope-scaling", "yarn")  # vLLM supports no other GPT-OSS.


@pytest.fixture(scope="module")
def alone(sinks: Site, tmp_path_factory: pytest.TempPathFactory) -> dict[Prompt, tuple[Any, list[int]]]:
    """Hidden states and answers of one vLLM, which has ended."""
    folder = tmp_path_factory.mktemp("states")
    plan = VllmPlan("states", saving(folder), extra=(*SIZES, *speculating(LAYERS)))
    engine = sinks.cast("states", plan)[plan.name]
    answered = {prompt: states_of(engine, prompt) for prompt in ASKED}
    sinks.dismiss()
    return answered


@pytest.fixture(scope="module")
def pair(sinks: Site, alone: object) -> tuple[Server, Server]:
    servers = sinks.cast("sinks", P, D)
    return servers["p"], servers["d"]


def test_hidden_states_in_a_group_of_their_own_are_saved(
    sinks: Site, alone: dict[Prompt, tuple[Any, list[int]]]
) -> None:
    """Compare all layers only for a short prompt; otherwise only the embeddings, which tell tokens apart.

    In later layers vLLM 0.32 on a CPU deviates from transformers, more with the length of the prompt.
    """
    expected = States(sinks.model, LAYERS)
    for prompt, (saved, _) in alone.items():
        states, right = saved["hidden_states"], expected(prompt)
        assert saved["token_ids"].tolist() == list(prompt)
        assert states.shape == right.shape
        torch.testing.assert_close(states[:, 0], right[:, 0])
        if len(prompt) == 8:
            torch.testing.assert_close(states, right, atol=0.05, rtol=0.0)  # The values are about 10.


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_tokens_equal_a_single_vllms(
    sinks: Site, pair: tuple[Server, Server], alone: dict[Prompt, tuple[Any, list[int]]], mode: str
) -> None:
    with sinks.router(*pair, mode) as router:
        check_handoffs(router, pair[1], ASKED, lambda prompt: alone[prompt][1])
