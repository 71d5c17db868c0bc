"""Models whose layers have windows are handed over group by group, and only what the windows see moves.

`test_push_of_groups` has the cases of ranks and of a producer that is gone.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from baton.engine.api import EngineRequest
from baton.engine.llm import LLM
from tests.connectors.engine_world import (
    GREEDY,
    ONE_TOKEN,
    PATIENT,
    SETTLE_S,
    AnswerOf,
    ModelOf,
    Start,
    bytes_moved,
    config_of,
    hand_over,
    hands_over,
    prompt_of,
    start_in,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def start(model_of: ModelOf) -> Iterator[Start]:
    with ExitStack() as stack:

        def start_engine(
            family: str, engine_id: str, *, hybrid: str = "auto", wire: str = "local", **options: Any
        ) -> LLM:
            transfer = hands_over(engine_id, timers=PATIENT, transports=[wire])
            cache = {"hybrid_kv_cache": hybrid}
            return start_in(
                stack, config_of(model_of(family), transfer, num_blocks=200, cache=cache, **options)
            )

        yield start_engine


def counted_bytes(llm: LLM) -> list[int]:
    """The bytes of each transfer from now on; the list grows as transfers end."""
    moved: list[int] = []
    step = llm.core.step

    def counting_step() -> Any:
        outputs = step()
        stats = outputs.stats.kv_connector_stats if outputs.stats is not None else None
        moved.extend(record["bytes"] for record in (stats or {}).get("transfers", ()))
        return outputs

    llm.core.step = counting_step  # type: ignore[method-assign]
    return moved


def come_to_rest(*engines: LLM) -> None:
    for llm in engines:
        llm.settle(SETTLE_S)
        llm.core.scheduler.kv_cache.assert_empty()


@pytest.mark.parametrize(("family", "wire"), [("gemma3", "local"), ("gpt_oss", "nixl"), ("mistral", "tcp")])
def test_the_tokens_are_those_of_a_single_engine(
    start: Start, answer_of: AnswerOf, family: str, wire: str
) -> None:
    if wire == "nixl":
        pytest.importorskip("nixl")
    d = start(family, "d", wire=wire)
    moved = counted_bytes(d)
    for hybrid in ("auto", "off"):  # A producer that keeps everything serves one that does not.
        p = start(family, f"p-{hybrid}", hybrid=hybrid, wire=wire)
        assert p.core.scheduler.kv_cache.is_hybrid == (hybrid == "auto")
        assert d.core.scheduler.reset_prefix_cache()
        moved.clear()
        # D lacks only one token of the third prompt: its cache has the full blocks of the first one.
        for prompt in (prompt_of(70), prompt_of(3), prompt_of(69), [*prompt_of(60), 9, 9, 9]):
            decoded = hand_over(p, d, prompt)
            assert decoded.token_ids == answer_of(family, prompt)
            assert decoded.num_transferred_tokens > 0
        come_to_rest(p, d)
        # 70 tokens are 18 blocks; later tokens see the last ten, which lie in three or, one token
        # earlier, four.
        assert moved[0] == bytes_moved(d.core.scheduler.config, 70), "of layers with a window, their end"


@pytest.mark.parametrize(
    ("of_p", "of_d"), [({}, {"hybrid": "off"}), ({}, {"block_size": 8}), ({"block_size": 8}, {})]
)
def test_engines_that_differ_compute_for_themselves(
    start: Start, answer_of: AnswerOf, of_p: dict[str, Any], of_d: dict[str, Any]
) -> None:
    p, d = start("gemma3", "p", **of_p), start("gemma3", "d", **of_d)
    decoded = hand_over(p, d, prompt_of(70))
    assert decoded.token_ids == answer_of("gemma3", prompt_of(70))
    assert decoded.num_transferred_tokens == 0


def test_a_request_that_is_aborted_while_it_loads_leaves_nothing(start: Start, answer_of: AnswerOf) -> None:
    p, d = start("gemma3", "p"), start("gemma3", "d")
    prompt = prompt_of(70)
    (prefilled,) = p.generate([prompt], ONE_TOKEN, kv_transfer_params=[{"do_remote_decode": True}])
    d.core.add_request(
        EngineRequest(
            request_id="gone",
            prompt_token_ids=prompt,
            sampling_params=GREEDY,
            arrival_time_s=0.0,
            kv_transfer_params=prefilled.kv_transfer_params,
        )
    )
    d.core.step()
    d.core.abort("gone")
    come_to_rest(p, d)
    assert d.generate([prompt], GREEDY)[0].token_ids == answer_of("gemma3", prompt)
