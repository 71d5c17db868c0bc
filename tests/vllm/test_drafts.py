"""Speculative decoding: D's draft model has layers that P lacks, and the reverse. The target's are loaded.

The draft is the model itself, so that every token it drafts is accepted if its KV of the prompt is there. An
EAGLE head with random weights shows the layers of such drafts; its tokens are not accepted.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.vllm.engines import Server, Site, VllmPlan, check_handoffs, transfer
from tests.vllm.prompts import Prompt, prompts

DRAFTS = "drafts"
ASKED = [prompt for prompt in prompts() if len(prompt) in (8, 128, 129, 300, 513)]
NUM_DRAFTED = 3
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


def speculating(method: str, model: Path) -> tuple[str, str]:
    config = {"method": method, "model": str(model), "num_speculative_tokens": NUM_DRAFTED}
    return "--speculative-config", json.dumps(config)


def engine(name: str, role: str, *extra: str) -> VllmPlan:
    return VllmPlan(name, transfer("BatonPushConnector", role, name), extra=extra)


def new_eagle(model: Path, folder: Path) -> Path:
    """A head of one layer with random weights, of the form that vLLM's `llama_eagle.py` reads."""
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "fc": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj": (queries, hidden),
        "layers.0.self_attn.k_proj": (keys, hidden),
        "layers.0.self_attn.v_proj": (keys, hidden),
        "layers.0.self_attn.o_proj": (hidden, queries),
        "layers.0.mlp.gate_proj": (inner, hidden),
        "layers.0.mlp.up_proj": (inner, hidden),
        "layers.0.mlp.down_proj": (hidden, inner),
    }
    random = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.weight": 0.05 * torch.randn(shape, generator=random) for name, shape in shapes.items()
    }
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden)
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def expected(site: Site) -> dict[Prompt, list[int]]:
    """The answers of a single vLLM without drafts, which has ended."""
    single = site.cast("single", VllmPlan("single", None))["single"]
    return {prompt: single.tokens(prompt) for prompt in ASKED}


@pytest.fixture(scope="module")
def engines(site: Site, expected: object, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Server]:
    draft = speculating("draft_model", site.model)
    eagle = speculating("eagle", new_eagle(site.model, tmp_path_factory.mktemp("model") / "eagle"))
    return site.cast(
        DRAFTS,
        engine("p", "kv_producer"),
        engine("p-draft", "kv_producer", *draft),
        engine("d", "kv_consumer"),
        engine("d-draft", "kv_consumer", *draft),
        engine("d-eagle", "kv_consumer", *eagle),
    )


@pytest.fixture
def hand_over(
    site: Site, engines: dict[str, Server], expected: dict[Prompt, list[int]]
) -> Callable[[str, str, str], float]:
    def run(producer: str, consumer: str, mode: str) -> float:
        """Compare the tokens. Return the share of accepted drafts."""
        p, d = engines[producer], engines[consumer]
        before = {name: d.metric(name) for name in (DRAFTED, ACCEPTED)}
        # vLLM pads a step of one prompt token, and no other, as if it had drafted tokens, and counts these.
        padding = 0 if consumer == "d" else NUM_DRAFTED
        with site.router(p, d, mode, "--no-first-token") as router:
            check_handoffs(router, d, ASKED, expected.__getitem__, padding=padding)
        d.tokens(ASKED[0][:6], cache_salt="steps")  # Counts arrive with a later step.
        counts = {name: d.metric(name) - num for name, num in before.items()}
        num_drafted = counts[DRAFTED] - padding * len(ASKED)
        return counts[ACCEPTED] / num_drafted if num_drafted else 0.0

    return run


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_draft_that_p_lacks_costs_accepted_tokens_and_no_prompt(
    hand_over: Callable[[str, str, str], float], mode: str
) -> None:
    """The draft's KV of the prompt is zeroed, so that it drafts without knowing the prompt. Tokens that are
    accepted follow from the part of the prompt that D computes.
    """
    assert hand_over("p", "d-draft", mode) < 0.1
    hand_over("p", "d-eagle", mode)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_draft_of_both_keeps_its_kv(hand_over: Callable[[str, str, str], float], mode: str) -> None:
    assert hand_over("p-draft", "d-draft", mode) == 1.0


def test_another_draft_of_p_is_not_read(hand_over: Callable[[str, str, str], float]) -> None:
    hand_over("p-draft", "d-eagle", "pull")


def test_a_draft_that_only_p_has_is_left_out(hand_over: Callable[[str, str, str], float]) -> None:
    assert hand_over("p-draft", "d", "pull") == 0.0


def test_a_prefix_with_a_zeroed_draft_gives_the_same_tokens(
    engines: dict[str, Server], expected: dict[Prompt, list[int]]
) -> None:
    """A later request hits blocks in D's cache whose draft layers were zeroed."""
    p, d = engines["p"], engines["d-draft"]
    prompt = ASKED[-1]
    for params in (p.prefill(prompt, cache_salt="hit"), None):
        hits = d.metric("vllm:prefix_cache_hits_total")
        assert d.tokens(prompt, params, cache_salt="hit") == expected[prompt]
    d.wait_metric("vllm:prefix_cache_hits_total", lambda count: count > hits)
