"""fp8 caches in a real vLLM: the content of blocks moves as it is, between caches of one dtype."""

from collections.abc import Callable

import pytest

from tests.vllm.engines import Server, Site, VllmPlan, check_handoffs, transfer
from tests.vllm.prompts import Prompt, prompts

FP8 = ("--dtype", "bfloat16", "--kv-cache-dtype", "fp8")
_LONG = next(prompt for prompt in prompts() if len(prompt) == 1500)
ASKED = [(9 + length, *_LONG[:length]) for length in (8, 31, 100, 127, 128, 300, 600)]


@pytest.fixture(scope="module")
def llama(site_of: Callable[..., Site]) -> Site:
    return site_of("--family", "llama")


@pytest.fixture(scope="module")
def engines(llama: Site) -> dict[str, Server]:
    plans = [VllmPlan("single", None, extra=FP8)]
    for name, role in (("p", "kv_producer"), ("d", "kv_consumer")):
        plans.append(VllmPlan(name, transfer("BatonPushConnector", role, name), extra=FP8))
    return llama.cast("fp8", *plans)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_tokens_equal_a_single_vllms(llama: Site, engines: dict[str, Server], mode: str) -> None:
    expected: dict[Prompt, list[int]] = {prompt: engines["single"].tokens(prompt) for prompt in ASKED}
    with llama.router(engines["p"], engines["d"], mode) as router:
        check_handoffs(router, engines["d"], ASKED, expected.__getitem__)
