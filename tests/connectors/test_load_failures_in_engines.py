"""Failed loads in real engines: the tokens are a single engine's, or the answer is an error.

No other request may find what was loaded badly: the cache's content is compared, and the prompt is repeated
without the connector.
"""

from pathlib import Path

import pytest

from baton.engine.api import SamplingParams
from baton.engine.llm import LLM
from tests.connectors.engine_world import (
    GREEDY,
    NO_STORE,
    SETTLE_S,
    Start,
    check_findable,
    faulty_store,
    forget,
    multi,
    prompt_of,
    run_counting,
    store,
    store_half,
)

PROMPT = prompt_of(30)  # Seven full blocks and two tokens.
SHARER = [*PROMPT[:24], *prompt_of(7, step=11)]
EVERYTHING, BEHIND_TWO = list(range(7)), [2]
HOW = [("async", "invalid"), ("async", "early"), ("async", "failed"), ("sync", "invalid")]


@pytest.fixture(scope="module", params=["recompute", "fail"])
def policy(request: pytest.FixtureRequest) -> str:
    policy: str = request.param
    return policy


@pytest.fixture(scope="module")
def storing(start: Start, policy: str, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """An engine whose connector has stored PROMPT. Under policy recompute it is a child of a Multi."""
    connector = faulty_store(tmp_path_factory.mktemp("store"))
    if policy == "recompute":
        connector = multi({"kv_connector": "BatonPullConnector"}, connector)
    llm = start({**connector, "kv_load_failure_policy": policy})
    llm.generate([PROMPT], GREEDY)
    forget(llm)
    return llm


def expected(alone: LLM, *prompts: list[int], sampling: SamplingParams = GREEDY) -> list[list[int]]:
    return [completion.token_ids for completion in alone.generate(prompts, sampling)]


def check_afterwards(llm: LLM, alone: LLM) -> None:
    """Checks that no later request is affected."""
    llm.settle(SETTLE_S)
    check_findable(llm, PROMPT, store_half(llm))
    replayed = llm.generate([PROMPT, SHARER], GREEDY, kv_transfer_params=[NO_STORE, NO_STORE])
    assert [completion.token_ids for completion in replayed] == expected(alone, PROMPT, SHARER)
    check_findable(llm, PROMPT, store_half(llm))
    llm.core.scheduler.kv_cache.assert_consistent()
    forget(llm)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_good_load_replaces_computation(storing: LLM, alone: LLM, mode: str) -> None:
    (loaded,) = storing.generate([PROMPT], GREEDY, kv_transfer_params=[store(mode=mode)])
    assert [loaded.token_ids] == expected(alone, PROMPT)
    assert loaded.num_transferred_tokens == 28
    assert check_findable(storing, PROMPT, store_half(storing)) == 7
    check_afterwards(storing, alone)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [EVERYTHING, BEHIND_TWO], ids=["total", "partial"])
@pytest.mark.parametrize(("mode", "how"), HOW, ids=["-".join(how) for how in HOW])
def test_a_failed_load_changes_no_answer(
    storing: LLM, alone: LLM, policy: str, mode: str, how: str, bad: list[int]
) -> None:
    """SHARER begins with the same blocks, and hits those that are being loaded within its first step."""
    fault = store(mode=mode, how=how, bad=bad)
    loaded, shared = storing.generate([PROMPT, SHARER], GREEDY, kv_transfer_params=[fault, NO_STORE])
    of_loaded, of_shared = expected(alone, PROMPT, SHARER)
    if policy == "recompute":
        assert loaded.token_ids == of_loaded
        num_valid = 0 if how == "failed" else 4 * bad[0]
        assert loaded.num_transferred_tokens == num_valid
    else:
        assert loaded.finish_reason == "error"
        assert loaded.error is not None
        assert "kv_load_failure_policy is 'fail'" in loaded.error.message
        assert not loaded.token_ids
    assert shared.token_ids == of_shared
    check_afterwards(storing, alone)


@pytest.mark.slow
def test_an_error_in_the_middle_of_a_step_with_loads(storing: LLM, alone: LLM, policy: str) -> None:
    """All loads of the step count as failed."""
    fault = store(mode="sync", how="raise", bad=[0])
    loaded, other = storing.generate([PROMPT, SHARER], GREEDY, kv_transfer_params=[fault, NO_STORE])
    of_loaded, of_other = expected(alone, PROMPT, SHARER)
    assert loaded.token_ids == (of_loaded if policy == "recompute" else [])
    assert (loaded.error is None) == (policy == "recompute")
    assert other.token_ids == of_other
    check_afterwards(storing, alone)


@pytest.mark.slow
@pytest.mark.parametrize("in_a_multi", [False, True], ids=["alone", "in a multi"])
def test_a_background_load_that_is_never_reported(
    start: Start, alone: LLM, tmp_path: Path, in_a_multi: bool
) -> None:
    """The request ends with an error, and its blocks stay held, because a write may still arrive there."""
    llm = start(multi(faulty_store(tmp_path)) if in_a_multi else faulty_store(tmp_path))
    llm.generate([PROMPT], GREEDY)
    forget(llm)
    fault = store(mode="async", how="raise", bad=[0])
    loaded, other = llm.generate([PROMPT, SHARER], GREEDY, kv_transfer_params=[fault, NO_STORE])
    assert loaded.error is not None
    assert "connector" in loaded.error.message
    scheduler = llm.core.scheduler
    assert scheduler.remote.num_held == 1
    replayed = llm.generate([PROMPT, SHARER], GREEDY, kv_transfer_params=[NO_STORE, NO_STORE])
    tokens = [completion.token_ids for completion in (other, *replayed)]
    assert tokens == expected(alone, SHARER, PROMPT, SHARER)
    assert scheduler.remote.num_held == 1
    scheduler.kv_cache.assert_consistent()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_loads_fail_while_requests_are_preempted(start: Start, alone: LLM, tmp_path: Path, mode: str) -> None:
    """Four answers that do not fit at once; a resumed request badly loads what was computed before."""
    llm = start(faulty_store(tmp_path), num_blocks=26, budget=24)
    prompts = [prompt_of(21 + 3 * i, step=7 + 2 * i) for i in range(4)]
    sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    for prompt in prompts:
        llm.generate([prompt], sampling)
        forget(llm)
    faults = [store(mode=mode, bad=bad) for bad in ([3], [0], [], [1, 4])]
    answers, stats = run_counting(llm, prompts, sampling, faults)
    assert answers == expected(alone, *prompts, sampling=sampling)
    assert sum(of_step.num_preempted for of_step in stats) > 0
    assert sum(of_step.num_kv_load_failures for of_step in stats) >= 3
    llm.settle(SETTLE_S)
    for prompt, answer in zip(prompts, answers, strict=True):
        check_findable(llm, [*prompt, *answer[:-1]], store_half(llm))
    forget(llm)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("forked_programs")
def test_one_rank_of_two_fails(start: Start, alone: LLM, tmp_path: Path) -> None:
    """If one rank fails, the load fails; the other rank's good half of the same blocks is not used."""
    llm = start(multi(faulty_store(tmp_path)), tp_size=2)
    llm.generate([PROMPT], GREEDY)
    forget(llm)
    (good,) = llm.generate([PROMPT], GREEDY)
    assert [good.token_ids] == expected(alone, PROMPT)
    assert good.num_transferred_tokens == 28
    for rank, (mode, how) in zip((0, 1, 0, 1), HOW, strict=True):
        forget(llm)
        fault = store(mode=mode, how=how, bad=BEHIND_TWO, ranks=[rank])
        loaded, shared = llm.generate([PROMPT, SHARER], GREEDY, kv_transfer_params=[fault, NO_STORE])
        replayed = llm.generate([PROMPT, SHARER], GREEDY, kv_transfer_params=[NO_STORE, NO_STORE])
        of_prompt, of_sharer = expected(alone, PROMPT, SHARER)
        assert [c.token_ids for c in (loaded, shared, *replayed)] == [of_prompt, of_sharer] * 2
    llm.settle(SETTLE_S)
    llm.core.scheduler.kv_cache.assert_consistent()
