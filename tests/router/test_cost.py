"""The placement with the least cost, beside a search of every placement."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.router.cost import HARM, Candidate, Placement, placements, prefill_s

CANDIDATES = st.builds(
    Candidate,
    num_queued_tokens=st.integers(0, 50_000),
    num_running=st.integers(0, 50),
    num_cached_tokens=st.integers(0, 30_000),
    prefill_tokens_per_s=st.sampled_from([3_000.0, 12_000.0]),
    token_s=st.sampled_from([0.0, 0.0002]),
    load_tokens_per_s=st.sampled_from([10_000.0, 75_000.0]),
)
IDLE = Candidate(0, 0, 0, 10_000.0, 0.0001, 100_000.0)


def choose(
    num_tokens: int, num_output: int, producers: list[Candidate], consumers: list[Candidate]
) -> Placement | None:
    found = placements(num_tokens, num_output, producers, consumers)
    return min(found, key=lambda one: one.cost_s, default=None)


def cost_of(producer: Candidate | None, consumer: Candidate, num_tokens: int, num_output: int) -> float:
    """As the module describes it, for one placement."""
    queue_s = consumer.num_queued_tokens / consumer.prefill_tokens_per_s
    later_s = num_output * consumer.token_s * consumer.num_running + HARM * queue_s
    if producer is not None:
        load_s = max(0, num_tokens - consumer.num_cached_tokens) / consumer.load_tokens_per_s
        return prefill_s(producer, num_tokens) + load_s + later_s
    alone_s = prefill_s(consumer, num_tokens)
    return alone_s + HARM * consumer.num_running * (alone_s - queue_s) + later_s


@given(
    producers=st.lists(CANDIDATES, max_size=4),
    consumers=st.lists(CANDIDATES, max_size=4),
    num_tokens=st.integers(1, 30_000),
    num_output=st.integers(1, 1000),
)
def test_no_placement_costs_less(
    producers: list[Candidate], consumers: list[Candidate], num_tokens: int, num_output: int
) -> None:
    chosen = choose(num_tokens, num_output, producers, consumers)
    if not consumers:
        assert chosen is None
        return
    assert chosen is not None
    every = [
        cost_of(producer, consumer, num_tokens, num_output)
        for consumer in consumers
        for producer in (None, *producers)
    ]
    assert chosen.cost_s <= min(every) * (1 + 1e-9)
    producer = None if chosen.producer is None else producers[chosen.producer]
    assert chosen.cost_s == cost_of(producer, consumers[chosen.consumer], num_tokens, num_output)
    assert chosen.ttft_s == prefill_s(producer or consumers[chosen.consumer], num_tokens)


def test_an_idle_decode_engine_computes_a_prompt_that_it_has() -> None:
    chosen = choose(8000, 100, [IDLE], [replace(IDLE, num_cached_tokens=7900)])
    assert chosen == Placement(None, 0, 0.01, 0.01)


def test_a_busy_decode_engine_does_not_compute_a_long_prompt() -> None:
    chosen = choose(8000, 100, [IDLE], [replace(IDLE, num_running=40)])
    assert chosen is not None
    assert (chosen.producer, chosen.ttft_s) == (0, 0.8)


def test_a_short_queue_is_better_than_a_cache_after_a_long_one() -> None:
    busy = replace(IDLE, num_queued_tokens=20_000, num_cached_tokens=8_000)
    chosen = choose(8000, 100, [busy, IDLE], [replace(IDLE, num_running=40)])
    assert chosen is not None
    assert chosen.producer == 1
    waiting = replace(busy, num_queued_tokens=2_000)
    chosen = choose(8000, 100, [waiting, IDLE], [replace(IDLE, num_running=40)])
    assert chosen is not None
    assert chosen.producer == 0
