"""Updates of the weights of embedded engines with connectors: KV is used with its own weights only."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoints.checkpoint import load_model_config
from baton.checkpoints.random_model import write_checkpoint
from baton.core.config import ModelConfig
from baton.engine.core.weights_update import prepare_update
from baton.engine.llm import LLM
from tests.connectors.engine_world import (
    GREEDY,
    ONE_TOKEN,
    PATIENT,
    SETTLE_S,
    Stepped,
    add_pair,
    config_of,
    hand_over,
    hands_over,
    multi,
    prompt_of,
    run_all,
    start_in,
    step_all,
)

pytestmark = pytest.mark.slow
PREFILL = [{"do_remote_decode": True}]
UNCACHED = {"cache": {"enable_prefix_caching": False}}
Answer = Callable[[str, list[int]], list[int]]
OFFLOAD = {"kv_connector": "BatonOffloadConnector", "kv_connector_extra_config": {"cpu_gib": 0.05}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelConfig]:
    root = tmp_path_factory.mktemp("versions")
    shape = {"hidden": 64, "layers": 3, "heads": 4, "kv_heads": 2, "vocab": 512}
    folders = {
        name: write_checkpoint(root / name, seed=seed, **shape) for seed, name in enumerate(("one", "two"))
    }
    return {name: load_model_config(folder, max_model_len=256) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def answer(models: dict[str, ModelConfig]) -> Iterator[Answer]:
    """Answers of an engine that never had other weights."""
    with ExitStack() as stack:
        alone = {name: start_in(stack, config_of(model)) for name, model in models.items()}
        yield lambda name, prompt: alone[name].generate([prompt], GREEDY)[0].token_ids


@pytest.fixture
def start(models: dict[str, ModelConfig]) -> Iterator[Callable[..., LLM]]:
    with ExitStack() as stack:
        yield lambda *args, **options: start_in(stack, config_of(models["one"], *args, **options))


def update(llm: LLM, model: ModelConfig, version: str | None = None) -> None:
    llm.update_weights(model.model, version)


@pytest.mark.parametrize("version", [None, "v2"])
def test_a_mixed_pair_computes_and_an_equal_one_hands_over_again(
    start: Any, models: dict[str, ModelConfig], answer: Answer, version: str | None
) -> None:
    p, d = start(hands_over("p", timers=PATIENT)), start(hands_over("d", timers=PATIENT))
    decoded = hand_over(p, d, prompt_of(30))
    assert decoded.token_ids == answer("one", prompt_of(30))
    assert decoded.num_transferred_tokens

    update(p, models["two"], version)
    decoded = hand_over(p, d, prompt_of(30, step=11))
    assert decoded.token_ids == answer("one", prompt_of(30, step=11))
    assert decoded.num_transferred_tokens == 0

    update(d, models["two"], version)
    for step in (11, 13):
        decoded = hand_over(p, d, prompt_of(30, step=step))
        assert decoded.token_ids == answer("two", prompt_of(30, step=step))
    assert decoded.num_transferred_tokens

    for llm in (p, d):
        update(llm, models["one"])
    decoded = hand_over(p, d, prompt_of(30))
    assert decoded.token_ids == answer("one", prompt_of(30))
    assert decoded.num_transferred_tokens
    assert not any(llm.core.scheduler.connector.is_retired for llm in (p, d))


def test_a_loan_from_before_is_for_the_old_weights_only(
    start: Any, models: dict[str, ModelConfig], answer: Answer
) -> None:
    p, d = start(hands_over("p", timers=PATIENT)), start(hands_over("d", timers=PATIENT))
    lent = [
        p.generate([prompt_of(30, step=step)], ONE_TOKEN, kv_transfer_params=PREFILL)[0].kv_transfer_params
        for step in (7, 11)
    ]
    update(p, models["two"])
    p.generate([prompt_of(100, step=13)], GREEDY)  # This prompt would overwrite blocks that are not lent.
    (old,) = d.generate([prompt_of(30)], GREEDY, kv_transfer_params=lent[:1])
    assert old.token_ids == answer("one", prompt_of(30))
    update(d, models["two"])
    (new,) = d.generate([prompt_of(30, step=11)], GREEDY, kv_transfer_params=lent[1:])
    assert new.token_ids == answer("two", prompt_of(30, step=11))
    assert new.num_transferred_tokens == 0


@pytest.mark.parametrize("mode", ["keep", "wait"])
@pytest.mark.parametrize(("kind", "num_steps"), [("Pull", 1), ("Pull", 3), ("Push", 3), ("Push", 9)])
def test_an_update_during_handoffs(
    start: Any, models: dict[str, ModelConfig], answer: Answer, kind: str, mode: str, num_steps: int
) -> None:
    p = start(hands_over("p", kind, timers=PATIENT), budget=8)
    d = start(hands_over("d", kind, timers=PATIENT), budget=8)
    on_p, on_d = Stepped(p.core), Stepped(d.core)
    prompts = [prompt_of(40 + i, step=7 + 2 * i) for i in range(3)]
    if kind == "Push":
        decoded = [add_pair(on_p, on_d, f"r{i}", prompt) for i, prompt in enumerate(prompts)]
    else:
        params = [
            p.generate([prompt], ONE_TOKEN, kv_transfer_params=PREFILL)[0].kv_transfer_params
            for prompt in prompts
        ]
        decoded = [
            on_d.add(f"r{i}", prompt, params=of)
            for i, (prompt, of) in enumerate(zip(prompts, params, strict=True))
        ]
    for _ in range(num_steps):
        step_all(on_p, on_d)
    for llm in (d, p):
        llm.core.begin_update(
            prepare_update(llm.core.config.model_config, models["two"].model, None, mode, 600.0)
        )
    run_all(on_p, on_d)
    for completion, prompt in zip(decoded, prompts, strict=True):
        got = completion.token_ids
        assert len(got) == GREEDY.max_tokens
        if mode == "wait":
            assert got == answer("one", prompt)
            continue
        old = answer("one", prompt)
        splits = [n for n in range(len(got) + 1) if got[:n] == old[:n]]
        assert any(got[n:] == answer("two", prompt + old[:n])[: len(got) - n] for n in splits)
    for llm in (p, d):
        llm.settle(SETTLE_S)
        assert not llm.core.scheduler.connector.is_retired
        assert llm.generate(prompts[:1], GREEDY)[0].token_ids == answer("two", prompts[0])


@pytest.mark.parametrize("transfer", [OFFLOAD, "storage", "multi"], ids=["offload", "storage", "multi"])
def test_stores_find_the_kv_of_a_version_again_when_it_comes_back(
    start: Any, models: dict[str, ModelConfig], answer: Answer, tmp_path: Path, transfer: Any
) -> None:
    storage = {
        "kv_connector": "BatonSharedStorageConnector",
        "kv_connector_extra_config": {"path": str(tmp_path), "recompute_if_faster_by_s": None},
    }
    chosen = {"storage": storage, "multi": multi(OFFLOAD, storage)}.get(
        transfer if isinstance(transfer, str) else "", transfer
    )
    llm = start(chosen, **UNCACHED)
    prompt = prompt_of(40)

    def ask(name: str) -> int:
        (completion,) = llm.generate([prompt], GREEDY)
        assert completion.token_ids == answer(name, prompt)
        llm.settle(SETTLE_S)
        return completion.num_transferred_tokens

    def loads(name: str) -> bool:
        """Files are written in the background."""
        return any(ask(name) for _ in range(200))

    assert ask("one") == 0
    assert loads("one")
    update(llm, models["two"])
    assert ask("two") == 0
    assert loads("two")
    update(llm, models["one"])
    assert ask("one") > 0
    assert not llm.core.scheduler.connector.is_retired
