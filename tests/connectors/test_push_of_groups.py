"""Models whose layers have windows are read while they are computed, and only what the windows see moves."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest

from baton.core.config import (
    CacheConfig,
    ClusterSecret,
    EngineConfig,
    KVTransferConfig,
    ParallelConfig,
    SchedulerConfig,
)
from baton.engine.api import SamplingParams
from baton.engine.core.engine_core import EngineCore
from baton.engine.llm import Completion
from tests.connectors.engine_world import PATIENT, QUICK
from tests.connectors.test_push_in_engines import (
    GREEDY,
    PATIENCE_S,
    Legs,
    legs_of,
    one_token,
    prompt_of,
)
from tests.connectors.windowed_models import BLOCK, ModelOf, bytes_moved, model_of

__all__ = ["model_of"]

Start = Callable[..., EngineCore]
CHUNK = 16


@pytest.fixture
def start(model_of: ModelOf) -> Iterator[Start]:
    with ExitStack() as stack:

        def start_engine(
            engine_id: str | None = None,
            *,
            family: str = "gemma3",
            stream: str = "chunk",
            hybrid: str = "auto",
            num_blocks: int = 200,
            block_size: int = BLOCK,
            chunk: int = CHUNK,
            tp: int = 1,
            **extra: Any,
        ) -> EngineCore:
            transfer = None
            if engine_id is not None:
                transfer = KVTransferConfig(
                    kv_connector="BatonPushConnector",
                    kv_role="kv_both",
                    engine_id=engine_id,
                    kv_connector_extra_config={"stream": stream, "timers": PATIENT, **extra},
                )
            config = EngineConfig(
                model_config=model_of(family),
                cache_config=CacheConfig(
                    num_gpu_blocks=num_blocks,
                    block_size=block_size,
                    hybrid_kv_cache=hybrid,  # type: ignore[arg-type]
                ),
                scheduler_config=SchedulerConfig(max_num_batched_tokens=chunk),
                parallel_config=ParallelConfig(
                    tensor_parallel_size=tp, executor="multiprocess" if tp > 1 else "inprocess"
                ),
                kv_transfer_config=transfer,
                cluster_secret=ClusterSecret(b"sixteen bytes or more"),
            )
            core = EngineCore(config, "baton.assemble:connector_factory")
            stack.callback(core.shutdown)
            return core

        yield start_engine


class Handoffs:
    """Prompts from P to D, whose steps wait for each other: what is announced is read, then P goes on."""

    def __init__(self, p: EngineCore, d: EngineCore, alone: EngineCore) -> None:
        self.p, self.d = p, d
        self.alone = Legs(alone)
        self.legs = Legs(p, d)
        self.only_p, self.only_d = Legs(p), Legs(d)
        self.only_p.completions = self.only_d.completions = self.legs.completions
        self.only_d.transfers = self.legs.transfers
        self._count = 0

    def begin(self, prompt: list[int], sampling: SamplingParams = GREEDY) -> tuple[Completion, str]:
        self._count += 1
        name = f"r{self._count}"
        for_p, for_d = legs_of(self.p, name)
        decoded = self.legs.add(self.d, name, prompt, sampling, for_d)
        self.legs.add(self.p, name, prompt, one_token(sampling), for_p)
        return decoded, name

    def compute(self, num_steps: int, *, all_is_read: bool = True) -> None:
        """P takes so many steps, or as many as there are to take."""
        for _ in range(num_steps):
            if not self.p.scheduler.queues:
                return
            self.only_p.step()
            deadline = time.monotonic() + PATIENCE_S
            while all_is_read and _num_ordered(self.d) < _num_told(self.p):
                assert time.monotonic() < deadline, "what was announced is not read"
                self.only_d.step()

    def hand_over(self, prompt: list[int], sampling: SamplingParams = GREEDY) -> Completion:
        """With the assertion that the tokens are those of the engine alone."""
        decoded, name = self.begin(prompt, sampling)
        self.compute(1000)
        return self.end(decoded, name)

    def end(self, decoded: Completion, name: str) -> Completion:
        expected = self.alone.add(self.alone.cores[0], name, decoded.prompt_token_ids, GREEDY)
        self.alone.run()
        self.legs.run()
        assert decoded.token_ids == expected.token_ids
        return decoded

    def come_to_rest(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while any(core.has_requests for core in self.legs.cores):
            assert time.monotonic() < deadline, "an engine does not come to rest"
            self.legs.step()
        for core in self.legs.cores:
            core.scheduler.kv_cache.assert_empty()


def _half_of(core: EngineCore) -> Any:
    return core.scheduler._connector.half.scheduler_half  # type: ignore[attr-defined]


def _num_told(p: EngineCore) -> int:
    """Tokens that P has announced of what it computes."""
    return sum(prefill.num_ready for prefill in _half_of(p).announcer._prefills._prefills.values())


def _num_ordered(d: EngineCore) -> int:
    """Tokens that D has heard of and ordered to be read, as far as they move."""
    streams = _half_of(d)._agent.streams._streams.values()
    heard = [stream.latest for stream in streams if stream.pairs is not None]
    return sum(latest.num_tokens for latest in heard if latest is not None)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "mistral"])
@pytest.mark.parametrize("stream", ["off", "chunk", "layer"])
def test_the_tokens_are_those_of_a_single_engine(start: Start, family: str, stream: str) -> None:
    p, d = start("p", family=family, stream=stream), start("d", family=family)
    handoffs = Handoffs(p, d, start(family=family))
    assert d.scheduler.kv_cache.is_hybrid
    for prompt in (prompt_of(70), prompt_of(3), prompt_of(32, step=11), prompt_of(100, step=13)):
        decoded = handoffs.hand_over(prompt)
        assert decoded.num_transferred_tokens > 0
    handoffs.come_to_rest()
    moved = [record["bytes"] for record in handoffs.legs.transfers]
    assert moved[0] == bytes_moved(d.scheduler.config, 70)
    assert moved[3] == bytes_moved(d.scheduler.config, 100)
    early = [record["early_tokens"] for record in handoffs.legs.transfers]
    at_least = [64, 0, 16, 96]  # What steps before the last have computed.
    if stream == "off":
        at_least = [0, 0, 0, 0]
    elif family == "mistral":  # All layers have a window: what lies before it is not read at all.
        at_least = [64 - 60, 0, 0, 96 - 88]
    if stream == "layer":  # Of the last step too, as far as D has heard of its layers.
        assert all(num >= least for num, least in zip(early, at_least, strict=True))
    else:
        assert early == at_least


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["chunk", "layer"])
def test_two_ranks_hand_over_to_one(start: Start, stream: str) -> None:
    p, d = start("p", stream=stream, tp=2), start("d")
    handoffs = Handoffs(p, d, start())
    decoded = handoffs.hand_over(prompt_of(70))
    assert decoded.num_transferred_tokens > 0
    handoffs.come_to_rest()
    [record] = handoffs.legs.transfers
    assert record["early_tokens"] >= 64
    assert record["bytes"] == bytes_moved(d.scheduler.config, 70)


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["chunk", "layer"])
def test_what_either_side_has_cached_is_not_moved_again(start: Start, stream: str) -> None:
    p, d = start("p", stream=stream), start("d")
    handoffs = Handoffs(p, d, start())
    first = handoffs.hand_over(prompt_of(70))
    # P has 48 of them, D has what the windows see after the first prompt, which is of no use here.
    handoffs.hand_over([*prompt_of(48), *prompt_of(30, step=3)])
    # The next turn: D has the prompt and its own answer.
    turn = [*prompt_of(70), *first.token_ids, *prompt_of(30, step=17)]
    decoded = handoffs.hand_over(turn)
    handoffs.come_to_rest()
    num_at_d = len(turn) - decoded.num_transferred_tokens
    assert 70 < num_at_d <= 80
    records = handoffs.legs.transfers
    assert [record["tokens"] for record in records] == [70, 78, len(turn) - num_at_d]
    assert [record["bytes"] for record in records] == [
        bytes_moved(d.scheduler.config, 70),
        bytes_moved(d.scheduler.config, 78),
        bytes_moved(d.scheduler.config, len(turn), first_token=num_at_d),
    ]
    assert all(record["early_tokens"] > 0 for record in records)


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["chunk", "layer"])
def test_a_producer_short_of_blocks_preempts_and_the_answers_are_equal(start: Start, stream: str) -> None:
    """Blocks of the groups compete for one pool, and prefills lose theirs on the way."""
    p = start("p", stream=stream, chunk=4, num_blocks=34)
    d, alone = start("d"), start()
    legs = Legs(p, d, alone)
    long = msgspec.structs.replace(GREEDY, max_tokens=30)
    others = [legs.add(p, f"own{i}", prompt_of(8, step=3 + i), long) for i in range(2)]
    decoded, expected = [], []
    for index in range(3):
        prompt = prompt_of(40, step=5 + index)
        for_p, for_d = legs_of(p, f"t{index}")
        decoded.append(legs.add(d, f"r{index}", prompt, GREEDY, for_d))
        legs.add(p, f"r{index}", prompt, one_token(GREEDY), for_p)
        expected.append(legs.add(alone, f"r{index}", prompt, GREEDY))
    legs.run()
    assert [c.token_ids for c in decoded] == [c.token_ids for c in expected]
    assert all(c.finish_reason == "length" for c in others)
    assert legs.num_preempted[id(p)] > 0, "the pool was not short"


@pytest.mark.slow
def test_a_producer_that_decodes_on_lends_nothing_that_its_windows_have_left(start: Start) -> None:
    p, d = start("p"), start("d")
    handoffs = Handoffs(p, d, start())
    for_p, for_d = legs_of(p, "r")
    decoded = handoffs.legs.add(d, "r", prompt_of(70), GREEDY, for_d)
    on_p = handoffs.legs.add(p, "r", prompt_of(70), GREEDY, for_p)
    handoffs.compute(5)
    assert on_p.finish_reason is None
    handoffs.end(decoded, "r")
    assert decoded.num_transferred_tokens == 0
    assert on_p.token_ids == decoded.token_ids
    handoffs.come_to_rest()


@pytest.mark.slow
@pytest.mark.parametrize("side", ["p", "d"])
def test_a_request_that_is_aborted_while_it_streams_leaves_nothing(start: Start, side: str) -> None:
    p, d = start("p"), start("d")
    handoffs = Handoffs(p, d, start())
    decoded, name = handoffs.begin(prompt_of(70))
    handoffs.compute(3)
    assert _num_ordered(d) > 0
    (p if side == "p" else d).abort(name)
    if side == "p":
        handoffs.end(decoded, name)
        assert decoded.num_transferred_tokens == 0
    else:
        handoffs.legs.run()
        assert decoded.finish_reason == "abort"
    handoffs.come_to_rest()
    assert handoffs.hand_over(prompt_of(70, step=3)).num_transferred_tokens > 0
    handoffs.come_to_rest()


@pytest.mark.slow
def test_a_producer_that_is_gone_costs_time_and_no_token(start: Start) -> None:
    p, d = start("p"), start("d", timers={**QUICK, "grant_every_s": 0.2, "silence_s": 1.0})
    handoffs = Handoffs(p, d, start())
    decoded, name = handoffs.begin(prompt_of(70))
    handoffs.compute(3)
    p.shutdown()
    handoffs.legs.cores = (d,)
    del handoffs.legs.completions[id(p), name]
    handoffs.end(decoded, name)
    assert decoded.num_transferred_tokens == 0
    handoffs.come_to_rest()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "mistral"])
@pytest.mark.parametrize("stream", ["chunk", "layer"])
def test_a_producer_that_keeps_everything_is_read_early_as_far_as_windows_see(
    start: Start, family: str, stream: str
) -> None:
    p, d = start("p", family=family, stream=stream, hybrid="off"), start("d", family=family)
    handoffs = Handoffs(p, d, start(family=family))
    assert handoffs.hand_over(prompt_of(70)).num_transferred_tokens == 70
    handoffs.come_to_rest()
    [record] = handoffs.legs.transfers
    assert record["bytes"] == bytes_moved(d.scheduler.config, 70)
    assert record["early_tokens"] >= (64 if family == "gemma3" else 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_p", "of_d"), [({}, {"hybrid": "off"}), ({}, {"block_size": 8}), ({"block_size": 8}, {})]
)
def test_engines_that_differ_compute_for_themselves(
    start: Start, of_p: dict[str, Any], of_d: dict[str, Any]
) -> None:
    """Blocks that are announced of other tables, or of another size, are never read."""
    timers = {**QUICK, "ttl_s": 1.0, "hold_s": 12.0}  # No consumer claims the loan, so it ends by its lease.
    p, d = start("p", timers=timers, **of_p), start("d", timers=timers, **of_d)
    handoffs = Handoffs(p, d, start())
    decoded, name = handoffs.begin(prompt_of(70))
    handoffs.compute(1000, all_is_read=False)
    handoffs.end(decoded, name)
    assert decoded.num_transferred_tokens == 0
    assert handoffs.legs.transfers == []
    handoffs.come_to_rest()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_blocks_may_hold_all_layers_of_their_group(start: Start, family: str) -> None:
    """On either side; where both have them so, a block is one run of bytes."""
    descriptors = []
    for of_p, of_d in ((False, False), (True, False), (False, True), (True, True)):
        p = start(f"p{len(descriptors)}", family=family, stream="chunk", cross_layer_blocks=of_p)
        d = start(f"d{len(descriptors)}", family=family, cross_layer_blocks=of_d)
        handoffs = Handoffs(p, d, start(family=family))
        assert handoffs.hand_over(prompt_of(70)).num_transferred_tokens == 70
        handoffs.come_to_rest()
        [record] = handoffs.legs.transfers
        assert record["bytes"] == bytes_moved(d.scheduler.config, 70)
        assert record["early_tokens"] == 64
        descriptors.append(record["descriptors"])
    num_layers = {len(group.layers) for group in d.scheduler.kv_cache.groups}
    assert max(num_layers) > 1, "groups of one layer show nothing"
    assert descriptors[3] < descriptors[0] == descriptors[1] == descriptors[2]
