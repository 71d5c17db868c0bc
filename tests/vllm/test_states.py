"""Models with recurrent states in a real vLLM: Granite's hybrid, and Mamba 2 without attention.

Without prefix caching: vLLM's CPU build ends at a prompt of such a model with it
(`docs/upstream/vllm-cpu-mamba2-prefix-caching.md`).
"""

from collections.abc import Callable, Iterator

import pytest

from tests.vllm.engines import (
    TRANSFERS,
    BatonPlan,
    Server,
    Site,
    VllmPlan,
    check_at_once,
    check_handoffs,
    transfer,
)
from tests.vllm.prompts import Prompt, prompts

STATES = "states"
UNCACHED = ("--no-enable-prefix-caching",)
IN_STEPS = (*UNCACHED, "--max-num-batched-tokens", "256")
SINGLE = VllmPlan("single", None, extra=UNCACHED)
P = VllmPlan("p", transfer("BatonPushConnector", "kv_producer", "p"), extra=IN_STEPS)
D = VllmPlan("d", transfer("BatonPushConnector", "kv_consumer", "d"), extra=UNCACHED)
BATON_P = BatonPlan("baton-p", transfer("BatonPushConnector", "kv_producer", "baton-p"))
BATON_D = BatonPlan("baton-d", transfer("BatonPushConnector", "kv_consumer", "baton-d"))
PAIRS = [("p", "d"), ("p", "baton-d"), ("baton-p", "d")]
_LONG = next(prompt for prompt in prompts() if len(prompt) == 1500)
ASKED = [(7 + length, *_LONG[:length]) for length in (1, 7, 16, 100, 254, 255, 256, 300, 600)]
FAMILIES = {"granite_hybrid": ("--layers", "4"), "mamba2": ("--layers", "3")}


@pytest.fixture(scope="module", params=FAMILIES)
def states(site_of: Callable[..., Site], request: pytest.FixtureRequest) -> Iterator[Site]:
    site = site_of("--family", request.param, *FAMILIES[request.param])
    yield site
    site.dismiss()


@pytest.fixture(scope="module")
def expected(states: Site) -> dict[Prompt, list[int]]:
    """The answers of a single vLLM."""
    engine = states.cast("single", SINGLE)["single"]
    answers = {prompt: engine.tokens(prompt) for prompt in ASKED}
    states.dismiss()
    return answers


@pytest.fixture(scope="module")
def engines(states: Site, expected: dict[Prompt, list[int]]) -> dict[str, Server]:
    return states.cast(STATES, P, D, BATON_P, BATON_D)


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("names", PAIRS, ids=" to ".join)
def test_tokens_equal_a_single_vllms(
    states: Site,
    engines: dict[str, Server],
    expected: dict[Prompt, list[int]],
    names: tuple[str, str],
    mode: str,
) -> None:
    p, d = (engines[name] for name in names)
    with states.router(p, d, mode) as router:
        check_handoffs(router, d, ASKED, expected.__getitem__)
        check_at_once(router, ASKED, expected.__getitem__)


def test_a_stock_proxys_handoff_computes_one_token(
    engines: dict[str, Server], expected: dict[Prompt, list[int]]
) -> None:
    """Without a word about the first token P leaves the last token out, and D computes it."""
    p, d = engines["p"], engines["d"]
    for prompt in ASKED[1:]:
        before = d.metric(TRANSFERS)
        computed = d.metric("vllm:prompt_tokens_by_source_total", source="local_compute")
        params = p.prefill(prompt)
        assert params["remote_num_tokens"] == len(prompt) - 1
        assert d.tokens(prompt, params) == expected[prompt]
        d.wait_metric(TRANSFERS, lambda num, before=before: num == before + 1)
        by_d = d.metric("vllm:prompt_tokens_by_source_total", source="local_compute") - computed
        assert by_d == 1, "D computes the last token of the prompt"
