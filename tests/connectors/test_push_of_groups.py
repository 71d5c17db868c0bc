"""Models whose layers have windows are read while they are computed, and only what the windows see moves."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest

from baton.engine.llm import Completion
from tests.connectors.engine_world import (
    GREEDY,
    PATIENT,
    QUICK,
    AnswerOf,
    ModelOf,
    StartCore,
    Stepped,
    add_pair,
    bytes_moved,
    config_of,
    core_in,
    hands_over,
    prompt_of,
    run_all,
    run_until,
)

pytestmark = pytest.mark.slow
CHUNK = 16


@pytest.fixture
def start(model_of: ModelOf) -> Iterator[StartCore]:
    with ExitStack() as stack:

        def start_engine(
            engine_id: str,
            family: str = "gemma3",
            stream: str = "chunk",
            *,
            hybrid: str = "auto",
            timers: dict[str, float] = PATIENT,
            cross_layer_blocks: bool = False,
            **options: Any,
        ) -> Stepped:
            extra = {"stream": stream, "timers": timers, "cross_layer_blocks": cross_layer_blocks}
            options = {"num_blocks": 200, "budget": CHUNK, "cache": {"hybrid_kv_cache": hybrid}, **options}
            config = config_of(model_of(family), hands_over(engine_id, "Push", **extra), **options)
            return Stepped(core_in(stack, config))

        yield start_engine


class Handoffs:
    """Prompts from P to D, whose steps wait for each other: what is announced is read, then P goes on."""

    def __init__(self, p: Stepped, d: Stepped, answer_of: AnswerOf, family: str = "gemma3") -> None:
        self.p, self.d = p, d
        self.answer_of, self.family = answer_of, family
        self._count = 0

    def begin(self, prompt: list[int]) -> tuple[Completion, str]:
        self._count += 1
        name = f"r{self._count}"
        return add_pair(self.p, self.d, name, prompt), name

    def compute(self, num_steps: int, *, all_is_read: bool = True) -> None:
        """P takes so many steps, or as many as there are to take."""
        for _ in range(num_steps):
            if not self.p.core.scheduler.queues:
                return
            self.p.step()
            if all_is_read:
                run_until(lambda: _num_ordered(self.d) >= _num_told(self.p), self.d)

    def hand_over(self, prompt: list[int]) -> Completion:
        """Hands the prompt over, and asserts that the tokens are those of the engine alone."""
        decoded, _ = self.begin(prompt)
        self.compute(1000)
        return self.end(decoded)

    def end(self, decoded: Completion) -> Completion:
        run_all(self.p, self.d)
        assert decoded.token_ids == self.answer_of(self.family, decoded.prompt_token_ids)
        return decoded

    def come_to_rest(self) -> None:
        engines = (self.p, self.d)
        run_until(lambda: not any(engine.core.has_requests for engine in engines), *engines)
        for engine in engines:
            engine.core.scheduler.kv_cache.assert_empty()


def _half_of(engine: Stepped) -> Any:
    return engine.core.scheduler.connector.half


def _num_told(p: Stepped) -> int:
    """Tokens that P has announced of what it computes."""
    return sum(prefill.num_ready for prefill in _half_of(p).announcer._prefills._prefills.values())


def _num_ordered(d: Stepped) -> int:
    """Tokens that D has heard of and ordered to be read, as far as they move."""
    streams = _half_of(d)._agent.streams._streams.values()
    heard = [stream.latest for stream in streams if stream.pairs is not None]
    return sum(latest.num_tokens for latest in heard if latest is not None)


@pytest.mark.parametrize(
    ("family", "stream"),
    [
        ("gemma3", "off"),
        ("gemma3", "layer"),
        ("gpt_oss", "chunk"),
        ("mistral", "chunk"),
        ("mistral", "layer"),
    ],
)
def test_the_tokens_are_those_of_a_single_engine(
    start: StartCore, answer_of: AnswerOf, family: str, stream: str
) -> None:
    p, d = start("p", family, stream), start("d", family)
    handoffs = Handoffs(p, d, answer_of, family)
    assert d.core.scheduler.kv_cache.is_hybrid
    for prompt in (prompt_of(70), prompt_of(3), prompt_of(32, step=11), prompt_of(100, step=13)):
        decoded = handoffs.hand_over(prompt)
        assert decoded.num_transferred_tokens > 0
    handoffs.come_to_rest()
    moved = [record["bytes"] for record in d.transfers]
    assert moved[0] == bytes_moved(d.core.scheduler.config, 70)
    assert moved[3] == bytes_moved(d.core.scheduler.config, 100)
    early = [record["early_tokens"] for record in d.transfers]
    at_least = [64, 0, 16, 96]  # What steps before the last have computed.
    if stream == "off":
        at_least = [0, 0, 0, 0]
    elif family == "mistral":  # All layers have a window: tokens before it are not read at all.
        at_least = [64 - 60, 0, 0, 96 - 88]
    if stream == "layer":  # D also reads tokens of the last step, as far as it has heard of its layers.
        assert all(num >= least for num, least in zip(early, at_least, strict=True))
    else:
        assert early == at_least


@pytest.mark.processes
@pytest.mark.usefixtures("forked_programs")
def test_two_ranks_hand_over_to_one(start: StartCore, answer_of: AnswerOf) -> None:
    p, d = start("p", stream="layer", tp_size=2, cross_layer_blocks=True), start("d")
    handoffs = Handoffs(p, d, answer_of)
    assert handoffs.hand_over(prompt_of(70)).num_transferred_tokens > 0
    handoffs.come_to_rest()
    [record] = d.transfers
    assert record["early_tokens"] >= 64
    assert record["bytes"] == bytes_moved(d.core.scheduler.config, 70)


@pytest.mark.parametrize("stream", ["chunk", "layer"])
def test_what_either_side_has_cached_is_not_moved_again(
    start: StartCore, answer_of: AnswerOf, stream: str
) -> None:
    p, d = start("p", stream=stream), start("d")
    handoffs = Handoffs(p, d, answer_of)
    first = handoffs.hand_over(prompt_of(70))
    # P has 48 of them, D has what the windows see after the first prompt, which is of no use here.
    handoffs.hand_over([*prompt_of(48), *prompt_of(30, step=3)])
    # The next turn: D has the prompt and its own answer.
    turn = [*prompt_of(70), *first.token_ids, *prompt_of(30, step=17)]
    decoded = handoffs.hand_over(turn)
    handoffs.come_to_rest()
    num_at_d = len(turn) - decoded.num_transferred_tokens
    assert 70 < num_at_d <= 80
    records = d.transfers
    assert [record["tokens"] for record in records] == [70, 78, len(turn) - num_at_d]
    assert [record["bytes"] for record in records] == [
        bytes_moved(d.core.scheduler.config, 70),
        bytes_moved(d.core.scheduler.config, 78),
        bytes_moved(d.core.scheduler.config, len(turn), first_token=num_at_d),
    ]
    assert all(record["early_tokens"] > 0 for record in records)


@pytest.mark.parametrize("stream", ["chunk", "layer"])
def test_a_producer_short_of_blocks_preempts_and_the_answers_are_equal(
    start: StartCore, answer_of: AnswerOf, stream: str
) -> None:
    """Blocks of the groups compete for one pool, and prefills lose theirs on the way."""
    p, d = start("p", stream=stream, budget=4, num_blocks=34), start("d")
    long = msgspec.structs.replace(GREEDY, max_tokens=30)
    others = [p.add(f"own{i}", prompt_of(8, step=3 + i), long) for i in range(2)]
    prompts = [prompt_of(40, step=5 + index) for index in range(3)]
    decoded = [add_pair(p, d, f"r{index}", prompt) for index, prompt in enumerate(prompts)]
    run_all(p, d)
    assert [c.token_ids for c in decoded] == [answer_of("gemma3", prompt) for prompt in prompts]
    assert all(c.finish_reason == "length" for c in others)
    assert p.num_preempted > 0, "the pool was not short"


def test_a_producer_that_decodes_on_lends_nothing_that_its_windows_have_left(
    start: StartCore, answer_of: AnswerOf
) -> None:
    p, d = start("p"), start("d")
    handoffs = Handoffs(p, d, answer_of)
    decoded = add_pair(p, d, "r", prompt_of(70), on_p=GREEDY)
    on_p = p.completions["r"]
    handoffs.compute(5)
    assert on_p.finish_reason is None
    handoffs.end(decoded)
    assert decoded.num_transferred_tokens == 0
    assert on_p.token_ids == decoded.token_ids
    handoffs.come_to_rest()


@pytest.mark.parametrize("side", ["p", "d"])
def test_a_request_that_is_aborted_while_it_streams_leaves_nothing(
    start: StartCore, answer_of: AnswerOf, side: str
) -> None:
    # If P hears that D has left before it lends, no consumer claims the loan, and it ends by its lease.
    p, d = start("p", timers={**PATIENT, "ttl_s": 8.0}), start("d")
    handoffs = Handoffs(p, d, answer_of)
    decoded, name = handoffs.begin(prompt_of(70))
    handoffs.compute(3)
    assert _num_ordered(d) > 0
    (p if side == "p" else d).core.abort(name)
    if side == "p":
        handoffs.end(decoded)
        assert decoded.num_transferred_tokens == 0
    else:
        run_all(p, d)
        assert decoded.finish_reason == "abort"
    handoffs.come_to_rest()
    assert handoffs.hand_over(prompt_of(70, step=3)).num_transferred_tokens > 0
    handoffs.come_to_rest()


def test_a_producer_that_is_gone_costs_time_and_no_token(start: StartCore, answer_of: AnswerOf) -> None:
    p, d = start("p"), start("d", timers={**QUICK, "grant_every_s": 0.2, "silence_s": 1.0})
    handoffs = Handoffs(p, d, answer_of)
    decoded, _ = handoffs.begin(prompt_of(70))
    handoffs.compute(3)
    p.core.shutdown()
    handoffs.p = d  # Only D is stepped from now on.
    handoffs.end(decoded)
    assert decoded.num_transferred_tokens == 0
    handoffs.come_to_rest()


@pytest.mark.parametrize(("family", "stream"), [("gemma3", "layer"), ("mistral", "chunk")])
def test_a_producer_that_keeps_everything_is_read_early_as_far_as_windows_see(
    start: StartCore, answer_of: AnswerOf, family: str, stream: str
) -> None:
    p, d = start("p", family, stream, hybrid="off"), start("d", family)
    handoffs = Handoffs(p, d, answer_of, family)
    assert handoffs.hand_over(prompt_of(70)).num_transferred_tokens == 70
    handoffs.come_to_rest()
    [record] = d.transfers
    assert record["bytes"] == bytes_moved(d.core.scheduler.config, 70)
    assert record["early_tokens"] >= (64 if family == "gemma3" else 4)


@pytest.mark.parametrize(
    ("of_p", "of_d"), [({}, {"hybrid": "off"}), ({}, {"block_size": 8}), ({"block_size": 8}, {})]
)
def test_engines_that_differ_compute_for_themselves(
    start: StartCore, answer_of: AnswerOf, of_p: dict[str, Any], of_d: dict[str, Any]
) -> None:
    """Blocks that are announced of other tables, or of another size, are never read."""
    timers = {**QUICK, "ttl_s": 1.0, "hold_s": 12.0}  # No consumer claims the loan, so it ends by its lease.
    p, d = start("p", timers=timers, **of_p), start("d", timers=timers, **of_d)
    handoffs = Handoffs(p, d, answer_of)
    decoded, _ = handoffs.begin(prompt_of(70))
    handoffs.compute(1000, all_is_read=False)
    handoffs.end(decoded)
    assert decoded.num_transferred_tokens == 0
    assert d.transfers == []
    handoffs.come_to_rest()


def test_blocks_may_hold_all_layers_of_their_group(start: StartCore, answer_of: AnswerOf) -> None:
    """Blocks may do so on either side; where both sides have such blocks, a block is one run of bytes."""
    descriptors = []
    ps, ds = ([start(f"{name}{i}", cross_layer_blocks=bool(i)) for i in range(2)] for name in "pd")
    for index, (p, d) in enumerate([(ps[0], ds[0]), (ps[1], ds[0]), (ps[0], ds[1]), (ps[1], ds[1])]):
        d.stats.clear()
        handoffs = Handoffs(p, d, answer_of)
        assert handoffs.hand_over(prompt_of(70, step=5 + index)).num_transferred_tokens == 70
        handoffs.come_to_rest()
        [record] = d.transfers
        assert record["bytes"] == bytes_moved(d.core.scheduler.config, 70)
        assert record["early_tokens"] == 64
        descriptors.append(record["descriptors"])
    num_layers = {len(group.layers) for group in d.core.scheduler.kv_cache.groups}
    assert max(num_layers) > 1, "groups of one layer show nothing"
    assert descriptors[3] < descriptors[0] == descriptors[1] == descriptors[2]
