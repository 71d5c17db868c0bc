"""Requests with prompt embeddings and adapters: D uses P's KV only if both have computed from the same."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.vllm.engines import TRANSFERS, Server, Site, VllmPlan, transfer
from tests.vllm.prompts import prompts

REFUSED = "baton:kv_tickets_refused_total"
ASKED = [prompt for prompt in prompts() if 129 <= len(prompt) <= 640][:4]
LAYER = "base_model.model.model.layers.0.self_attn"


def write_adapter(folder: Path, model: Path, seed: int) -> str:
    config = json.loads((model / "config.json").read_text())
    hidden, rank, generator = config["hidden_size"], 4, torch.Generator().manual_seed(seed)
    width = config["num_key_value_heads"] * config["head_dim"]
    weights = {
        f"{LAYER}.{name}.lora_{part}.weight": torch.randn(shape, generator=generator)
        for name in ("k_proj", "v_proj")
        for part, shape in (("A", (rank, hidden)), ("B", (width, rank)))
    }
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    described = {"r": rank, "lora_alpha": 8, "target_modules": ["k_proj", "v_proj"], "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return str(folder)


@pytest.fixture(scope="module")
def pair(site: Site, tmp_path_factory: pytest.TempPathFactory) -> tuple[Server, Server]:
    """P and D, with an adapter that is the same on both, and one that has other weights on each."""
    plans = []
    for seed, (name, role) in enumerate((("p", "kv_producer"), ("d", "kv_consumer"))):
        host = tmp_path_factory.mktemp(name)
        same, other = (write_adapter(host / str(n), site.model, n) for n in (9, seed))
        extra = ("--enable-prompt-embeds", "--enable-lora", "--lora-modules", f"same={same}", f"x={other}")
        plans.append(VllmPlan(name, transfer("BatonPushConnector", role, name), extra=extra))
    servers = site.cast("requests", *plans)
    return servers["p"], servers["d"]


# --- Adapters ---------------------------------------------------------------------------------------


def own(engine: Server, model: str) -> list[list[int]]:
    return [engine.tokens(prompt, model=model, cache_salt="own") for prompt in ASKED]


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_an_adapter_with_other_weights_on_p_is_computed_by_d(
    site: Site, pair: tuple[Server, Server], mode: str
) -> None:
    p, d = pair
    assert all(ours != theirs for ours, theirs in zip(own(d, "x"), own(p, "x"), strict=True))
    with site.router(p, d, mode) as router:
        before = d.metric(TRANSFERS)
        for model, num_transfers in (("x", 0), ("same", len(ASKED))):
            answers = [router.tokens(prompt, model=model, cache_salt=mode) for prompt in ASKED]
            assert answers == own(d, model)
            d.wait_metric(TRANSFERS, lambda num, wanted=before + num_transfers: num >= wanted)
            assert d.metric(TRANSFERS) == before + num_transfers


# --- Embeddings -------------------------------------------------------------------------------------


def embeds_of(model: Path, seed: int) -> str:
    """Return embeddings of 100 positions, as a client sends them."""
    hidden = json.loads((model / "config.json").read_text())["hidden_size"]
    file = io.BytesIO()
    torch.save(torch.randn(100, hidden, generator=torch.Generator().manual_seed(seed)), file)
    return base64.b64encode(file.getvalue()).decode()


def chat(engine: Server, embeds: str, params: Any = None, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": "Go on: "}, {"type": "prompt_embeds", "data": embeds}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 12, "temperature": 0, **fields}
    body |= {"ignore_eos": True} | ({} if params is None else {"kv_transfer_params": params})
    answer = engine.client.post(f"{engine.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, f"{answer.text}\n{engine.child.log_tail()}"
    found: dict[str, Any] = answer.json()
    return found


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_the_ticket_of_other_embeddings_is_refused(site: Site, pair: tuple[Server, Server]) -> None:
    p, d = pair
    a, b = (embeds_of(site.model, seed) for seed in (1, 2))
    of_a, of_b = (text_of(chat(d, embeds, cache_salt="own")) for embeds in (a, b))
    assert of_a != of_b
    before, refused = d.metric(TRANSFERS), d.metric(REFUSED, reason="prompt")

    def lent(embeds: str) -> Any:
        asked = {"do_remote_decode": True}
        return chat(p, embeds, asked, max_tokens=1, cache_salt="pull")["kv_transfer_params"]

    assert text_of(chat(d, b, lent(a), cache_salt="pull")) == of_b
    d.wait_metric(REFUSED, lambda num: num == refused + 1, reason="prompt")
    assert text_of(chat(d, b, cache_salt="pull")) == of_b, "its prefix cache has the answer's own blocks"
    assert text_of(chat(d, a, lent(a), cache_salt="pull")) == of_a
    d.wait_metric(TRANSFERS, lambda num: num == before + 1)


def test_a_prefill_of_other_embeddings_is_not_followed(site: Site, pair: tuple[Server, Server]) -> None:
    p, d = pair
    a, b = (embeds_of(site.model, seed) for seed in (3, 4))
    of_a, of_b = (text_of(chat(d, embeds, cache_salt="own")) for embeds in (a, b))
    introduced = p.complete(ASKED[0], {"baton_introduce": True}, max_tokens=1).json()["kv_transfer_params"]
    before = d.metric(TRANSFERS)
    for embeds, expected, name, num_transfers in ((b, of_b, "1", 0), (a, of_a, "2", 1)):
        chat(p, a, {"do_remote_decode": True, "transfer_id": name}, max_tokens=1, cache_salt="push")
        asked = {
            "do_remote_prefill": True,
            "transfer_id": name,
            "baton_introduction": introduced["baton_introduction"],
            "remote_engine_id": introduced["remote_engine_id"],
        }
        assert text_of(chat(d, embeds, asked, cache_salt="push")) == expected
        d.wait_metric(TRANSFERS, lambda num, wanted=before + num_transfers: num >= wanted)
        assert d.metric(TRANSFERS) == before + num_transfers
