"""Models with recurrent states in a real vLLM: Granite's hybrid, and Mamba 2 without attention.

Without prefix caching: vLLM's CPU build ends at a prompt of such a model with it
(`docs/upstream/vllm-cpu-mamba2-prefix-caching.md`).
"""

from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from tests.vllm.engines import (
    BatonPlan,
    Server,
    Site,
    VllmPlan,
    check_at_once,
    check_handoffs,
    check_last_token,
    transfer,
)
from tests.vllm.prompts import Prompt, prompts

STATES = "states"
# Two float32 logits that differ by less are a tie; other logits of these models differ by a tenth.
TIE = 1e-4
ZEROED = """
from baton.connectors.pull.reads.cache_layout import is_of_states
from baton.hosts.vllm.connector import BatonPullConnector
from baton.hosts.vllm.states import with_states_as_bytes


class ZeroedPull(BatonPullConnector):
    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        as_bytes = with_states_as_bytes(kv_caches, self._kv_cache_config)
        self.states = [cache for cache in as_bytes.values() if is_of_states(cache)]

    def wait_for_save(self):
        for states in self.states:
            states.zero_()
        super().wait_for_save()
"""
UNCACHED = ("--no-enable-prefix-caching",)
IN_STEPS = (*UNCACHED, "--max-num-batched-tokens", "256")
SINGLE = VllmPlan("single", None, extra=UNCACHED)
P = VllmPlan("p", transfer("BatonPushConnector", "kv_producer", "p"), extra=IN_STEPS)
# A block of a state has as many tokens as `max_model_len`, which is 4096 elsewhere.
SHORTER = (*UNCACHED, "--max-model-len", "3000")
D = VllmPlan("d", transfer("BatonPushConnector", "kv_consumer", "d"), extra=SHORTER)
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


def test_a_single_vllm_equals_transformers(states: Site, expected: dict[Prompt, list[int]]) -> None:
    """Token by token; the first that differs must be a tie.

    `tests/engine_models/test_decoder.py` compares the embedded engine with a later release of transformers.
    """
    reference = AutoModelForCausalLM.from_pretrained(states.model, dtype=torch.float32)
    if (
        reference.config.model_type == "mamba2"
        and "group_size" not in signature(MambaRMSNormGated).parameters
    ):
        pytest.skip("this release of transformers normalises Mamba 2's groups together (mended in 5.23)")
    for prompt, answer in expected.items():
        tokens = list(prompt)
        for token in answer:
            with torch.inference_mode():
                logits = reference(torch.tensor([tokens])).logits[0, -1]
            best = int(logits.argmax())
            if best != token:
                assert float(logits[best] - logits[token]) < TIE, (len(prompt), len(tokens))
                break
            tokens.append(token)
        else:
            continue
        assert len(tokens) > len(prompt), "a tie at the first token of an answer would say nothing"


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


def test_a_zeroed_state_changes_the_tokens(
    states: Site, expected: dict[Prompt, list[int]], tmp_path: Path
) -> None:
    """P loses its states after each step. So D's tokens show that they come from the states of P."""
    (tmp_path / "zeroed_states.py").write_text(ZEROED)
    zeroed = {"kv_connector": "ZeroedPull", "kv_connector_module_path": "zeroed_states"}
    of_p = {**transfer("BatonPullConnector", "kv_producer", "zeroed"), **zeroed}
    plan = VllmPlan("zeroed", of_p, extra=UNCACHED, path=(str(tmp_path),))
    engines = states.cast(STATES, plan, D)
    p, d = engines["zeroed"], engines["d"]
    prompts_of_one_step = [prompt for prompt in ASKED if 16 <= len(prompt) <= 300]
    answers = {prompt: d.tokens(prompt, p.prefill(prompt)) for prompt in prompts_of_one_step}
    assert all(answer != expected[prompt] for prompt, answer in answers.items())


def test_a_stock_proxys_handoff_computes_one_token(
    engines: dict[str, Server], expected: dict[Prompt, list[int]]
) -> None:
    """P is told nothing about the first token: it leaves the last token out, and D computes it."""
    check_last_token(engines["p"], engines["d"], ASKED[1:], expected.__getitem__, "proxy")


def test_a_producer_of_two_ranks_hands_over_to_one(states: Site, expected: dict[Prompt, list[int]]) -> None:
    """Each rank has some heads' parts of a state. Last, because it ends the engines of the other tests."""
    of_p = transfer("BatonPushConnector", "kv_producer", "p-two")
    plan = VllmPlan("p-two", of_p, num_ranks=2, extra=IN_STEPS)
    engines = states.cast("two ranks", plan, D)
    p, d = engines["p-two"], engines["d"]
    for mode in ("pull", "push"):
        with states.router(p, d, mode) as router:
            check_handoffs(router, d, ASKED, expected.__getitem__)
