"""Weights that change while vLLM runs: no answer is computed from KV of other weights.

WEIGHT_UPDATES=40 python -m pytest -s tests/vllm/test_weights.py -k under_load      the long form
"""

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.vllm.engines import ANSWER_S, TRANSFERS, Prompt, Server, Site, VllmPlan, transfer
from tests.vllm.prompts import prompts

HERE = Path(__file__).parents[2]
NUM_UPDATES = int(os.environ.get("WEIGHT_UPDATES", "6"))
SEEDS = (0, 1, 2)
ASKED = [prompt for prompt in prompts() if 500 <= len(prompt) <= 1500]
CHANGES = ("--worker-extension-cls", "tests.vllm.other_weights.OtherWeights")
REFUSED = "baton:kv_tickets_refused_total"


def plan(connector: str, role: str, name: str, **extra: object) -> VllmPlan:
    return VllmPlan(name, transfer(connector, role, name, extra=extra), extra=CHANGES, path=(str(HERE),))


def post(engine: Server, path: str, **body: object) -> object:
    answer = engine.client.post(f"{engine.url}/{path}", json=body)
    assert answer.status_code == 200, f"{path}: {answer.text}\n{engine.child.log_tail()}"
    return answer.json()


def use_weights(engine: Server, seed: int) -> None:
    post(engine, "collective_rpc", method="use_weights", args=[str(seed)])


def reset(engine: Server) -> None:
    assert post(engine, "reset_prefix_cache?reset_external=true") == {"success": True}


def name(engine: Server, seed: int) -> None:
    post(engine, "update_weight_version", new_version=f"v{seed}" if seed else "default")


def update(engine: Server, seed: int, *, is_named: bool = True) -> None:
    """Updates as a trainer does: drain, change the weights, name them, go on."""
    deadline_s = time.monotonic() + ANSWER_S
    # The call fails while blocks are lent.
    while engine.client.post(f"{engine.url}/pause?mode=wait").status_code != 200:
        assert time.monotonic() < deadline_s, engine.child.log_tail()
    use_weights(engine, seed)
    if is_named:
        name(engine, seed)
    post(engine, "resume")


@pytest.fixture(scope="module")
def answers(site: Site) -> dict[int, dict[Prompt, list[int]]]:
    """What a single engine answers with the weights of each seed."""
    engine = site.cast("weights single", VllmPlan("w", None, extra=CHANGES, path=(str(HERE),)))["w"]
    found: dict[int, dict[Prompt, list[int]]] = {}
    for seed in SEEDS:
        use_weights(engine, seed)
        assert post(engine, "reset_prefix_cache") == {"success": True}
        found[seed] = {prompt: engine.tokens(prompt) for prompt in ASKED}
    assert all(found[0][prompt] != found[1][prompt] for prompt in ASKED)
    return found


Answers = dict[int, dict[Prompt, list[int]]]


@pytest.mark.parametrize("connector", ["BatonSharedStorageConnector", "BatonOffloadConnector"])
def test_stored_kv_of_old_weights_is_not_loaded(
    site: Site, answers: Answers, connector: str, tmp_path: Path
) -> None:
    extra = {"path": str(tmp_path)} if "Storage" in connector else {"cpu_gib": 0.25}
    engine = site.cast(connector, plan(connector, "kv_both", "s", **extra))["s"]
    for change in ("reset", "rpc"):
        for seed in (0, 1):
            use_weights(engine, seed)
            if change == "reset":
                reset(engine)
            else:
                assert post(engine, "reset_prefix_cache") == {"success": True}
            for _ in range(2):
                assert [engine.tokens(prompt) for prompt in ASKED] == [*answers[seed].values()]


def test_named_weights_that_come_back_find_their_chunks(site: Site, answers: Answers, tmp_path: Path) -> None:
    extra = {"path": str(tmp_path)}
    engine = site.cast("names", plan("BatonSharedStorageConnector", "kv_both", "n", **extra))["n"]
    for seed in (0, 1):
        update(engine, seed)
        assert [engine.tokens(prompt) for prompt in ASKED] == [*answers[seed].values()]
    loaded = "baton:storage_loaded_chunks_total"
    num = engine.metric(loaded)
    for seed in (0, 1):
        update(engine, seed)
        assert [engine.tokens(prompt) for prompt in ASKED] == [*answers[seed].values()]
        num = engine.wait_metric(loaded, num.__lt__)


@pytest.fixture(scope="module")
def pair(site: Site, answers: Answers) -> tuple[Server, Server]:
    servers = site.cast(
        "weights pair",
        plan("BatonPushConnector", "kv_producer", "p"),
        plan("BatonPushConnector", "kv_consumer", "d"),
    )
    return servers["p"], servers["d"]


def test_engines_of_other_weights_hand_nothing_over(pair: tuple[Server, Server], answers: Answers) -> None:
    p, d = pair

    def ask(prompt: Prompt, seed: int, salt: str, *, is_handed_over: bool) -> None:
        before, refused = d.metric(TRANSFERS), d.metric(REFUSED, reason="weights")
        params = p.prefill(prompt, cache_salt=salt)
        assert d.tokens(prompt, params, cache_salt=salt) == answers[seed][prompt]
        if is_handed_over:
            d.wait_metric(TRANSFERS, lambda num: num == before + 1)
        else:
            d.wait_metric(REFUSED, lambda num: num == refused + 1, reason="weights")

    first = ASKED[0]
    ask(first, 0, "0", is_handed_over=True)
    update(p, 1)
    ask(first, 0, "1", is_handed_over=False)
    update(d, 1)
    ask(first, 1, "2", is_handed_over=True)
    update(p, 1, is_named=False)
    ask(first, 1, "3", is_handed_over=False)
    for engine in pair:
        update(engine, 0)
    ask(first, 0, "4", is_handed_over=True)


def change_under_load(
    ask: Callable[[Prompt], list[int]], engines: Sequence[Server], answers: Answers, rng: random.Random
) -> str:
    """Change the weights while four clients ask; the last engine gives the answers. Returns what was done."""
    *_, consumer = engines
    for engine in engines:
        update(engine, 0)
    history = [0]  # The consumer's weights, with an update that has begun.
    num_over = [0]  # The number of old entries of `history` that no request can still use.
    is_over = threading.Event()
    wrong: list[tuple[int, list[int], list[int]]] = []
    num_answers = [0]

    def ask_on(index: int) -> None:
        while not is_over.is_set():
            prompt = ASKED[(index + num_answers[0]) % len(ASKED)]
            first = num_over[0]
            answer = ask(prompt)
            possible = {*history[first:]}
            num_answers[0] += 1
            if not any(answers[seed][prompt] == answer for seed in possible):
                wrong.append((len(prompt), sorted(possible), answer))

    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask_on, index) for index in range(4)]
        try:
            for _ in range(NUM_UPDATES):
                seed = rng.choice(SEEDS)
                for engine in rng.sample(engines, len(engines)):
                    if engine is consumer:
                        history.append(seed)
                    update(engine, seed, is_named=rng.random() < 0.8)
                    if engine is consumer:
                        num_over[0] = len(history) - 1
                    done = num_answers[0] + 4
                    deadline_s = time.monotonic() + ANSWER_S
                    while num_answers[0] < done and not any(one.done() for one in asking):
                        assert time.monotonic() < deadline_s
        finally:
            is_over.set()
        for one in asking:
            one.result()
    assert not wrong, wrong[:3]
    return f"{num_answers[0]} answers during {NUM_UPDATES * len(engines)} updates, none wrong"


@pytest.mark.timeout(300 + 60 * NUM_UPDATES)
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_updates_under_load(site: Site, pair: tuple[Server, Server], answers: Answers, mode: str) -> None:
    rng = random.Random(mode)
    with site.router(*pair, mode) as router:
        done = change_under_load(
            lambda prompt: router.tokens(prompt, cache_salt=f"{mode} {rng.random()}"), pair, answers, rng
        )
    print(f"{mode}: {done}")


@pytest.mark.timeout(300 + 60 * NUM_UPDATES)
@pytest.mark.parametrize("connector", ["BatonSharedStorageConnector", "BatonOffloadConnector"])
def test_updates_of_an_engine_with_a_store_under_load(
    site: Site, answers: Answers, connector: str, tmp_path: Path
) -> None:
    extra = {"path": str(tmp_path)} if "Storage" in connector else {"cpu_gib": 0.25}
    engine = site.cast(f"load {connector}", plan(connector, "kv_both", "l", **extra))["l"]
    done = change_under_load(engine.tokens, [engine], answers, random.Random(connector))
    # Chance decides which prompts met which weights, so that perhaps none of them came back to its KV.
    for seed in (0, 1, 0):
        update(engine, seed)
        assert [engine.tokens(prompt) for prompt in ASKED] == [*answers[seed].values()]
    num_loaded = engine.metric("vllm:external_prefix_cache_hits_total")
    assert num_loaded > 0
    print(f"{connector}: {done}; {num_loaded:g} tokens loaded")
