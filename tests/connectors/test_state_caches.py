"""Recurrent states are handed over: with every prompt length, TP size, block size, and either last token."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from baton.core.config import KVTransferConfig, ModelConfig
from baton.core.errors import ConfigError
from baton.core.states import state_bytes
from baton.engine.api import SamplingParams
from baton.engine.llm import LLM
from baton.engine.step import SchedulerOutput
from tests.connectors import offload_world
from tests.connectors.engine_world import (
    BLOCK,
    GREEDY,
    ONE_TOKEN,
    SETTLE_S,
    AnswerOf,
    ModelOf,
    config_of,
    core_in,
    hand_over,
    pair_in,
    prompt_of,
    push_all,
)
from tests.connectors.storage_world import fill, starting, storage

pytestmark = pytest.mark.slow

# One of each kind of state; tests/engine_models compares every family.
FAMILIES = ["mamba2", "granite_hybrid", "qwen3_next"]
# The prompts have no common beginnings, so that no cache has a part of them.
LENGTHS = (2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1, 70)
PROMPTS = [[3 + index, *prompt_of(length - 1)] for index, length in enumerate(LENGTHS)]


def count_tokens(llm: LLM) -> list[int]:
    """Tokens that each step with any computes from now on."""
    counts: list[int] = []
    schedule = llm.core.scheduler.schedule

    def counting() -> SchedulerOutput:
        output = schedule()
        counts.extend([output.total_num_scheduled_tokens] if output.num_scheduled_tokens else [])
        return output

    llm.core.scheduler.schedule = counting  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("block_of_p", "block_of_d"), [(4, 16), (16, 4)])
def test_d_computes_the_last_token_of_a_pulled_prompt(
    stack: ExitStack, model_of: ModelOf, answer_of: AnswerOf, family: str, block_of_p: int, block_of_d: int
) -> None:
    p, d = pair_in(stack, model_of(family), block_sizes=(block_of_p, block_of_d))
    computed = count_tokens(d)
    for prompt in PROMPTS:
        (prefilled,) = p.generate([prompt], ONE_TOKEN, kv_transfer_params=[{"do_remote_decode": True}])
        assert prefilled.token_ids == [], "what follows the shortened prompt is no answer"
        computed.clear()
        (decoded,) = d.generate([prompt], GREEDY, kv_transfer_params=[prefilled.kv_transfer_params])
        assert decoded.token_ids == answer_of(family, prompt)
        assert decoded.num_transferred_tokens > 0
        assert set(computed) == {1}, "each step of D has one token, the first that of the prompt"
    p.settle(SETTLE_S)
    d.settle(SETTLE_S)


def test_blocks_of_states_alone_may_be_very_unlike(
    stack: ExitStack, model_of: ModelOf, answer_of: AnswerOf
) -> None:
    """Two vLLMs with another `max_model_len` have such blocks."""
    p, d = pair_in(stack, model_of("mamba2"), block_sizes=(4, 250))
    for prompt in PROMPTS:
        decoded = hand_over(p, d, prompt)
        assert decoded.token_ids == answer_of("mamba2", prompt)
        assert decoded.num_transferred_tokens == len(prompt) - 1


@pytest.mark.parametrize("family", FAMILIES)
def test_d_continues_after_the_token_of_p(
    stack: ExitStack, model_of: ModelOf, answer_of: AnswerOf, family: str
) -> None:
    p, d = pair_in(stack, model_of(family))
    ask = {"do_remote_decode": True, "baton_continue": True}
    for prompt in (*PROMPTS, prompt_of(1)):
        (prefilled,) = p.generate([prompt], ONE_TOKEN, kv_transfer_params=[dict(ask)])
        assert prefilled.token_ids == answer_of(family, prompt)[:1]
        (decoded,) = d.generate([prompt], GREEDY, kv_transfer_params=[prefilled.kv_transfer_params])
        assert decoded.token_ids == answer_of(family, prompt)
        assert decoded.num_transferred_tokens > 0
    # A consumer that would sample in another way cannot use the token, nor the state after the prompt.
    (prefilled,) = p.generate([PROMPTS[-1]], ONE_TOKEN, kv_transfer_params=[dict(ask)])
    other = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, repetition_penalty=1.0001)
    (decoded,) = d.generate([PROMPTS[-1]], other, kv_transfer_params=[prefilled.kv_transfer_params])
    (alone,) = d.generate([PROMPTS[-1]], other)
    assert decoded.token_ids == alone.token_ids


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("stream", "continues"), [("off", True), ("chunk", False), ("layer", True)])
def test_a_pushed_prompt_gets_the_tokens_of_a_single_engine(
    stack: ExitStack, model_of: ModelOf, answer_of: AnswerOf, family: str, stream: str, continues: bool
) -> None:
    params = {"baton_continue": True} if continues else {}
    check_push(stack, model_of(family), answer_of, family, stream=stream, params=params)


@pytest.mark.processes
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize(
    ("family", "tp_of_p", "tp_of_d"),
    [("mamba2", 2, 1), ("granite_hybrid", 1, 2), ("qwen3_next", 2, 1), ("qwen3_next", 1, 2)],
)
def test_ranks_read_the_units_that_they_hold(
    stack: ExitStack, model_of: ModelOf, answer_of: AnswerOf, family: str, tp_of_p: int, tp_of_d: int
) -> None:
    sizes: dict[str, Any] = {"tp_sizes": (tp_of_p, tp_of_d), "block_of_d": 2 * BLOCK}
    check_push(stack, model_of(family), answer_of, family, stream="layer", **sizes)


def check_push(
    stack: ExitStack, model: ModelConfig, answer_of: AnswerOf, family: str, **options: Any
) -> None:
    decoded, transfers = push_all(stack, model, PROMPTS, **options)
    assert [one.token_ids for one in decoded] == [answer_of(family, prompt) for prompt in PROMPTS]
    assert all(one.num_transferred_tokens > 0 for one in decoded)
    _, tp_of_d = options.get("tp_sizes", (1, 1))
    of_states = len(model.state_layers) * sum(
        state_bytes(model.state_parts, tp_rank=rank, tp_size=tp_of_d) for rank in range(tp_of_d)
    )
    least = min(transfer["bytes"] for transfer in transfers)
    assert least > 0.9 * of_states, "every layer's state is read"


@pytest.mark.parametrize("family", FAMILIES)
def test_offloaded_states_are_loaded_again(
    stack: ExitStack, model_of: ModelOf, answer_of: AnswerOf, family: str
) -> None:
    """The state at the last end of a block is loaded; a longer prompt goes on from there."""
    transfer = {"kv_connector": "BatonOffloadConnector", "kv_connector_extra_config": {"cpu_gib": 0.01}}
    engine = offload_world.Engine(
        core_in(stack, config_of(model_of(family), transfer, num_blocks=120, budget=16))
    )
    for prompt in PROMPTS:
        assert engine.tokens(prompt, sampling=GREEDY) == answer_of(family, prompt)
    for prompt in [*PROMPTS, [*PROMPTS[-1], *prompt_of(30)]]:
        engine.forget()
        again = engine.ask(prompt, GREEDY)
        assert again.token_ids == answer_of(family, prompt)
        known = min(len(prompt), max(LENGTHS))
        assert again.num_transferred_tokens == (known - 1) // BLOCK * BLOCK
    assert engine.counts["hit_tokens"] > 100
    engine.assert_whole()


@pytest.mark.parametrize("family", FAMILIES)
def test_one_engine_reads_the_files_of_another(
    model_of: ModelOf, answer_of: AnswerOf, tmp_path: Path, family: str
) -> None:
    """Files of tokens for each block, one of the state at the end of the last block."""
    prompt = prompt_of(3 * BLOCK + 2)
    with starting(model_of(family)) as start:
        a, b = (start(storage(tmp_path, chunk_tokens=BLOCK)) for _ in range(2))
        num_files = 1 if family == "mamba2" else 4
        of_a = fill(a, tmp_path, prompt, num_files)
        assert of_a == answer_of(family, prompt)[: len(of_a)]
        for asked in (prompt, [*prompt, 7, 8, 9]):
            assert b.core.scheduler.reset_prefix_cache()
            (by_b,) = b.generate([asked], GREEDY)
            assert by_b.token_ids == answer_of(family, asked)
            assert by_b.num_transferred_tokens == 3 * BLOCK


def test_a_state_needs_chunks_of_one_block(model_of: ModelOf, tmp_path: Path) -> None:
    with starting(model_of("mamba2")) as start:
        with pytest.raises(ConfigError, match="chunk_tokens: must be the block size"):
            start(storage(tmp_path, chunk_tokens=2 * BLOCK))
        transfer = KVTransferConfig(
            kv_connector="BatonOffloadConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_gib": 0.01, "blocks_per_chunk": 2},
        )
        with pytest.raises(ConfigError, match="blocks_per_chunk: must be 1 for a model with recurrent"):
            start(transfer)


def test_a_chunk_gets_its_state_from_a_later_request(
    stack: ExitStack, model_of: ModelOf, answer_of: AnswerOf
) -> None:
    """A long prompt stores tokens of blocks within which it ends no step; a short one ends there."""
    transfer = {"kv_connector": "BatonOffloadConnector", "kv_connector_extra_config": {"cpu_gib": 0.01}}
    engine = offload_world.Engine(
        core_in(stack, config_of(model_of("granite_hybrid"), transfer, num_blocks=120))
    )
    long, short = PROMPTS[-1], PROMPTS[-1][: 3 * BLOCK + 1]
    engine.tokens(long)
    engine.forget()
    assert engine.ask(short).num_transferred_tokens == 0, "no state at a length that it could use"
    engine.forget()
    again = engine.ask(short, GREEDY)
    assert again.num_transferred_tokens == 3 * BLOCK
    assert again.token_ids == answer_of("granite_hybrid", short)
    engine.assert_whole()
