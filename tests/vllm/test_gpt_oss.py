"""A small GPT-OSS in a real vLLM: attention sinks, experts, and every other layer with a window."""

from collections.abc import Callable

import pytest

from tests.vllm.engines import Server, Site, VllmPlan, check_handoffs, transfer
from tests.vllm.prompts import Prompt, prompts

BLOCK, WINDOW, LAYERS = 32, 100, 4
SIZES = ("--block-size", str(BLOCK))
P = VllmPlan("p", transfer("BatonPushConnector", "kv_producer", "p"), extra=SIZES)
D = VllmPlan("d", transfer("BatonPushConnector", "kv_consumer", "d"), extra=SIZES)
ASKED = [prompt for prompt in prompts() if len(prompt) in (8, 129, 300, 777)]


@pytest.fixture(scope="module")
def sinks(site_of: Callable[..., Site]) -> Site:
    shape = ("--layers", str(LAYERS), "--sliding-window", str(WINDOW))
    return site_of("--family", "gpt_oss", *shape, "--rope-scaling", "yarn")  # vLLM supports no other GPT-OSS.


@pytest.fixture(scope="module")
def alone(sinks: Site) -> dict[Prompt, list[int]]:
    """Answers of one vLLM, which has ended."""
    engine = sinks.cast("alone", VllmPlan("alone", None, extra=SIZES))["alone"]
    answered = {prompt: engine.tokens(prompt) for prompt in ASKED}
    sinks.dismiss()
    return answered


@pytest.fixture(scope="module")
def pair(sinks: Site, alone: object) -> tuple[Server, Server]:
    servers = sinks.cast("sinks", P, D)
    return servers["p"], servers["d"]


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_tokens_equal_a_single_vllms(
    sinks: Site, pair: tuple[Server, Server], alone: dict[Prompt, list[int]], mode: str
) -> None:
    with sinks.router(*pair, mode) as router:
        check_handoffs(router, pair[1], ASKED, alone.__getitem__)
