"""The placement with the least cost, beside a search of every placement."""

from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.router.fleet.cost import (
    AWAY,
    HARM,
    KEYS,
    STORE_TOKENS_PER_S,
    Candidate,
    LoadTime,
    Placement,
    placements,
    prefill_s,
    usual_load_s,
)

CANDIDATES = st.builds(
    Candidate,
    num_queued_tokens=st.integers(0, 50_000),
    num_running=st.integers(0, 50),
    num_cached_tokens=st.integers(0, 30_000),
    prefill_tokens_per_s=st.sampled_from([3_000.0, 12_000.0]),
    token_s=st.sampled_from([0.0, 0.0002]),
    step_s=st.sampled_from([0.0, 0.015, 0.03]),
)
IDLE = Candidate(0, 0, 0, 10_000.0, 0.0, 0.0001)


def choose(
    num_tokens: int,
    num_output: int,
    producers: list[Candidate],
    consumers: list[Candidate],
    load_s: LoadTime = usual_load_s,
    *,
    is_push: bool = False,
    home: int = 0,
) -> Placement | None:
    found = placements(num_tokens, num_output, producers, consumers, load_s, is_push=is_push, home=home)
    return min(found, key=lambda one: one.cost_s, default=None)


def cost_of(
    producer: Candidate | None,
    consumer: Candidate,
    num_tokens: int,
    num_output: int,
    load_s: float,
    *,
    is_push: bool,
) -> float:
    """Cost of one placement in seconds, as the module describes it."""
    queue_s = consumer.num_queued_tokens / consumer.prefill_tokens_per_s
    token_s = consumer.step_s + consumer.token_s * consumer.num_running
    later_s = num_output * token_s + HARM * queue_s
    if producer is not None:
        ttft_s = prefill_s(producer, num_tokens)
        if is_push:
            load_s = max(0.0, load_s - (ttft_s - producer.num_queued_tokens / producer.prefill_tokens_per_s))
        return ttft_s + load_s + later_s
    alone_s = prefill_s(consumer, num_tokens)
    return alone_s + HARM * consumer.num_running * (alone_s - queue_s) + later_s


@given(
    producers=st.lists(CANDIDATES, max_size=4),
    consumers=st.lists(CANDIDATES, max_size=4),
    # Base time and tokens per second, for each consumer.
    wires=st.lists(
        st.tuples(st.sampled_from([0.0, 0.01]), st.sampled_from([1e4, 7.5e4])), min_size=4, max_size=4
    ),
    num_tokens=st.integers(1, 30_000),
    num_output=st.integers(1, 1000),
    is_push=st.booleans(),
    home=st.integers(0, KEYS - 1),
)
def test_no_placement_costs_less(
    producers: list[Candidate],
    consumers: list[Candidate],
    wires: list[tuple[float, float]],
    num_tokens: int,
    num_output: int,
    is_push: bool,
    home: int,
) -> None:
    num_at_home = KEYS * len(producers) / max(1, len(producers) + len(consumers))

    def load_s(producer: int, consumer: int, num_tokens: int) -> float:
        base_s, tokens_per_s = wires[consumer]
        return base_s + num_tokens / tokens_per_s

    def whole_s(producer: int | None, consumer: int) -> float:
        num_loaded = max(0, num_tokens - consumers[consumer].num_cached_tokens)
        is_away = home and (producer is None) == (home < num_at_home)
        away_s = AWAY * num_tokens / consumers[consumer].prefill_tokens_per_s if is_away else 0.0
        return away_s + cost_of(
            None if producer is None else producers[producer],
            consumers[consumer],
            num_tokens,
            num_output,
            load_s(0, consumer, num_loaded),
            is_push=is_push,
        )

    chosen = choose(num_tokens, num_output, producers, consumers, load_s, is_push=is_push, home=home)
    if not consumers:
        assert chosen is None
        return
    assert chosen is not None
    first = min(
        range(len(producers)), key=lambda number: prefill_s(producers[number], num_tokens), default=None
    )
    numbers = range(len(consumers))
    every = [whole_s(producer, number) for number in numbers for producer in {None, first}]
    # A slower producer may cost less in push because it hides more of the load. The soonest one is used.
    if not is_push:
        every += [whole_s(producer, number) for number in numbers for producer in range(len(producers))]
    assert chosen.cost_s <= min(every) + 1e-9
    assert abs(chosen.cost_s - whole_s(chosen.producer, chosen.consumer)) < 1e-9
    computer = consumers[chosen.consumer] if chosen.producer is None else producers[chosen.producer]
    assert chosen.ttft_s == prefill_s(computer, num_tokens)


@given(num_ahead=st.integers(0, 20_000), num_cached=st.integers(0, 8_000))
def test_a_prompt_waits_for_the_engine_with_its_prefix_if_that_is_sooner(
    num_ahead: int, num_cached: int
) -> None:
    has_it = replace(IDLE, num_queued_tokens=num_ahead, num_cached_tokens=num_cached)
    busy = replace(IDLE, num_running=40)  # An engine too busy to compute this prompt.
    chosen = choose(8_000, 100, [IDLE, has_it], [busy])
    assert chosen is not None
    assert chosen.producer == (1 if num_ahead < min(num_cached, 7_999) else 0)
    chosen = choose(8_000, 100, [], [IDLE, has_it])  # The same where no prompt is handed over.
    assert chosen is not None
    waits = num_ahead + HARM * num_ahead < min(num_cached, 7_999)
    assert chosen.consumer == (1 if waits else 0)


def test_a_slow_wire_keeps_a_prompt_where_it_is_decoded() -> None:
    busy = replace(IDLE, num_running=20)
    for tokens_per_s, producer in ((100_000.0, 0), (1_000.0, None)):
        chosen = choose(8_000, 100, [IDLE], [busy], lambda *ends: ends[2] / tokens_per_s)  # noqa: B023
        assert chosen is not None
        assert chosen.producer == producer
    chosen = choose(8_000, 100, [IDLE], [busy], lambda *ends: ends[2] / 1e4, is_push=True)
    assert chosen is not None
    assert chosen.producer == 0  # KV moves while it is computed.


ROUNDING_S = 1e-9


def test_an_idle_decode_engine_computes_a_prompt_that_it_has() -> None:
    chosen = choose(8000, 100, [IDLE], [replace(IDLE, num_cached_tokens=7900)])
    assert chosen == Placement(None, 0, 0.01, 0.01)


@example(num_gpu=1, num_host=384, num_stored=1925, rate=1e6)  # The sums round differently.
@given(
    num_gpu=st.integers(0, 4_000),
    num_host=st.integers(1, 2_000),
    num_stored=st.integers(0, 2_000),
    rate=st.sampled_from([2_000.0, 10_000.0, 1e6]),
)
def test_a_hit_in_a_tier_costs_a_load_and_never_more_than_computing(
    num_gpu: int, num_host: int, num_stored: int, rate: float
) -> None:
    num_cached = num_gpu + num_host + num_stored
    in_tiers = Candidate(
        num_cached_tokens=num_cached,
        num_host_tokens=num_host,
        num_stored_tokens=num_stored,
        prefill_tokens_per_s=rate,
    )
    times_s = [
        prefill_s(candidate, 10_000)
        for candidate in (
            replace(in_tiers, num_host_tokens=0, num_stored_tokens=0),
            in_tiers,
            replace(in_tiers, num_host_tokens=0, num_stored_tokens=num_host + num_stored),
            replace(in_tiers, num_cached_tokens=num_gpu, num_host_tokens=0, num_stored_tokens=0),
        )
    ]
    assert times_s[0] < times_s[1] <= times_s[2] + ROUNDING_S
    assert times_s[2] <= times_s[3] + ROUNDING_S
    assert times_s[2] < times_s[3] or rate > STORE_TOKENS_PER_S


def test_a_prompt_goes_to_the_engine_that_loads_it_unless_another_has_it_cached() -> None:
    loads = replace(IDLE, num_cached_tokens=7_000, num_host_tokens=7_000)
    for other, producer in ((IDLE, 1), (replace(IDLE, num_cached_tokens=7_000), 0)):
        chosen = choose(8_000, 100, [other, loads], [replace(IDLE, num_running=40)])
        assert chosen is not None
        assert chosen.producer == producer


def test_what_a_decode_engine_has_in_its_tiers_is_read_from_the_prefill_engine() -> None:
    for in_host, loaded in ((0, 1_000), (7_000, 8_000)):
        asked: list[int] = []
        busy = replace(IDLE, num_running=40, num_cached_tokens=7_000, num_host_tokens=in_host)
        choose(8_000, 100, [IDLE], [busy], lambda *ends: asked.append(ends[2]) or 0.0)  # noqa: B023
        assert asked == [loaded]


def test_a_short_queue_is_better_than_a_cache_after_a_long_one() -> None:
    busy = replace(IDLE, num_queued_tokens=20_000, num_cached_tokens=8_000)
    chosen = choose(8000, 100, [busy, IDLE], [replace(IDLE, num_running=40)])
    assert chosen is not None
    assert chosen.producer == 1
    waiting = replace(busy, num_queued_tokens=2_000)
    chosen = choose(8000, 100, [waiting, IDLE], [replace(IDLE, num_running=40)])
    assert chosen is not None
    assert chosen.producer == 0


def test_a_prompt_goes_home_unless_that_takes_much_longer() -> None:
    """The share of prompts whose home is a producer is the share of producers: one of three engines here."""
    for home, producer in ((1, 0), (KEYS // 3 - 2**40, 0), (KEYS // 3 + 2**40, None), (KEYS - 1, None)):
        chosen = choose(8_000, 100, [IDLE], [IDLE, IDLE], home=home)
        assert chosen is not None
        assert chosen.producer == producer
    waiting = replace(IDLE, num_queued_tokens=8_000)
    for home, producers, consumers, producer in ((1, waiting, IDLE, None), (KEYS - 1, IDLE, waiting, 0)):
        chosen = choose(8_000, 100, [producers], [consumers], home=home)
        assert chosen is not None
        assert chosen.producer == producer
