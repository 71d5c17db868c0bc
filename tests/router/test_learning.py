"""Samples of speeds: which legs give one, and of what."""

import pytest

from baton.router.fleet.block_index import Match
from baton.router.fleet.cost import EXPECTED_OUTPUT
from baton.router.fleet.engine import Engine
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.notes import EngineLoad
from baton.router.fleet.pairs import Pairs
from baton.router.fleet.policies import RoutedRequest, prefix_holder
from baton.router.request.answers import PROMPT_HEADER, LegAnswer
from baton.router.request.events import Leg
from baton.router.request.learning import (
    SAMPLE_CHUNKS,
    SAMPLE_EVERY_S,
    loaded,
    note_answer,
    note_chunks,
    note_closed,
    note_start,
)
from baton.router.values.rates import BASE_POINTS_MIN
from baton.router.values.settings import Role, RouterSettings

PREFILL, DECODE = ("http://p0", "http://p1"), ("http://d0", "http://d1")


def new_fleet() -> Fleet:
    return Fleet(RouterSettings(prefill_urls=PREFILL, decode_urls=DECODE, policy="cost"))


def begin(
    fleet: Fleet, engine: Engine, num_tokens: int, now_s: float = 0.0, *, shows_first: bool = True
) -> Leg:
    role: Role = engine.role
    leg = Leg(role, engine, {}, 1.0, now_s, not engine.load, num_tokens, engine.queued_tokens)
    note_start(leg, now_s, shows_first=shows_first)
    fleet.note_start(engine, num_tokens)
    return leg


def end_prompt(fleet: Fleet, leg: Leg, answer: LegAnswer, now_s: float) -> None:
    note_answer(leg, answer, now_s)
    fleet.note_computed(leg.engine, leg.num_queued_tokens)
    leg.num_queued_tokens = 0


def counted(total: int, local: int = 0, transferred: int = 0) -> LegAnswer:
    counts = f"total={total}; local={local}; transferred={transferred}"
    return LegAnswer(200, {PROMPT_HEADER: counts}, b"", is_stream=True)


def with_usage(details: str) -> LegAnswer:
    return LegAnswer(
        200, {}, b'{"usage": {"prompt_tokens": 1000, "prompt_tokens_details": %s}}' % details.encode()
    )


@pytest.mark.parametrize(
    ("answer", "num_computed"),
    [
        (counted(1000, 600), 400),
        (counted(1000, 100, 500), 400),
        (with_usage('{"cached_tokens": 600}'), 400),
        (with_usage("null"), 2000),  # Number that the router expected.
        (LegAnswer(200, {}, b'{"usage": 7}'), 2000),
        # A message, which leaves cached tokens out, if it names them; and a response.
        (LegAnswer(200, {}, b'{"usage": {"input_tokens": 400, "cache_read_input_tokens": 600}}'), 400),
        (LegAnswer(200, {}, b'{"usage": {"input_tokens": 400}}'), 2000),
        (
            LegAnswer(
                200, {}, b'{"usage": {"input_tokens": 1000, "input_tokens_details": {"cached_tokens": 600}}}'
            ),
            400,
        ),
        (LegAnswer(200, {}, b"", is_stream=True), 2000),
    ],
)
def test_tokens_that_an_engine_had_are_no_speed(answer: LegAnswer, num_computed: int) -> None:
    fleet = new_fleet()
    engine = fleet.engines[0]
    end_prompt(fleet, begin(fleet, engine, 2000), answer, 2.0)
    assert engine.prefill_rate.value == num_computed / 2


def test_a_busy_engine_shows_its_speed() -> None:
    fleet = new_fleet()
    engine = fleet.engines[0]
    legs = [begin(fleet, engine, 5000, now_s) for now_s in (0.0, 0.1, 0.2)]
    for number, leg in enumerate(legs):
        end_prompt(fleet, leg, counted(5000), number + 1.0)
    assert engine.prefill_rate.value == 5000


@pytest.mark.parametrize("fault", ["refused", "given up", "whole answer", "another process"])
def test_what_does_not_show_a_prompt_is_no_speed(fault: str) -> None:
    fleet = new_fleet()
    engine = fleet.engines[-1]
    leg = begin(fleet, engine, 5000, shows_first=fault != "whole answer")
    answer = counted(5000)
    if fault == "refused":
        answer = LegAnswer(503, {}, b"")
    elif fault == "given up":
        other = begin(fleet, engine, 9000, 0.1)
        note_closed(other, fleet.choice.outputs)
    elif fault == "another process":
        engine.elsewhere = EngineLoad(engine.key, num_queued_tokens=500)
    end_prompt(fleet, leg, answer, 1.0)
    assert engine.prefill_rate.value is None


def stream(leg: Leg, now_s: float, step_s: float) -> float:
    """Let the leg bring SAMPLE_CHUNKS more chunks, and return the time at their end."""
    now_s += SAMPLE_CHUNKS * step_s
    leg.num_chunks += SAMPLE_CHUNKS
    note_chunks(leg, now_s)
    return now_s


def test_a_step_is_learned_from_chunks_and_other_answers() -> None:
    fleet = new_fleet()
    engine, now_s = fleet.engines[-1], 0.0
    for num_running in (1, 21) * 20:
        legs = [begin(fleet, engine, 0) for _ in range(num_running)]
        for _ in range(2):
            now_s = stream(legs[0], now_s, 0.02 + 0.001 * (num_running - 1))
        for _ in legs:
            fleet.note_end(engine)
    assert engine.steps.base_s == pytest.approx(0.02, rel=0.05)
    assert engine.steps.slope_s == pytest.approx(0.001, rel=0.05)
    assert fleet.engines[0].steps.base_s is None


def test_a_step_with_a_prompt_is_no_sample() -> None:
    fleet = new_fleet()
    engine, now_s = fleet.engines[-1], 0.0
    leg = begin(fleet, engine, 0)
    prompt = begin(fleet, engine, 1000)
    for _ in range(9):
        now_s = stream(leg, now_s, 0.5)
    assert engine.steps.base_s is None
    end_prompt(fleet, prompt, counted(1000), now_s)
    stream(leg, now_s, 0.02)  # The prompt was there at the beginning of this one.
    for _ in range(BASE_POINTS_MIN):
        now_s = stream(leg, now_s + SAMPLE_EVERY_S, 0.02)
    assert engine.steps.base_s is not None


def test_a_load_is_the_time_to_the_first_byte_without_a_step() -> None:
    fleet, pairs = new_fleet(), Pairs()
    producer, consumer = fleet.engines[0], fleet.engines[-1]
    for _ in range(BASE_POINTS_MIN):
        consumer.steps.note(0, 0.02)
    other = pairs.load_s(producer, consumer, 1000)
    for number in range(48):
        num_tokens = 1000 * (1 + number % 8)
        leg = begin(fleet, consumer, 0)
        step_s = consumer.steps.at(consumer.load)
        sample = loaded(leg, counted(9000, 0, num_tokens), step_s + 0.005 + num_tokens / 2e4)
        assert sample[0] == num_tokens
        pairs.note_load(producer, consumer, *sample)
        fleet.note_end(consumer)
    assert pairs.load_s(producer, consumer, 1000) == pytest.approx(0.055, rel=0.1)
    assert pairs.load_s(producer, consumer, 8000) == pytest.approx(0.405, rel=0.05)
    # A pair without samples has the load time of the other pairs.
    assert pairs.load_s(fleet.engines[1], consumer, 8000) == pytest.approx(0.405, rel=0.05)
    assert pairs.load_s(producer, consumer, 0) == 0.0
    assert other == pytest.approx(1000 / 75_000)


def test_a_load_beside_prompts_is_no_sample() -> None:
    fleet = new_fleet()
    consumer = fleet.engines[-1]
    before = begin(fleet, consumer, 1000)
    leg = begin(fleet, consumer, 0)
    assert loaded(leg, counted(1000, 0, 1000), 1.0) == (0, 0.0)
    end_prompt(fleet, before, counted(1000), 1.0)
    assert loaded(leg, counted(1000, 0, 1000), 1.0) == (0, 0.0)
    assert loaded(begin(fleet, consumer, 0), counted(1000, 1000), 1.0) == (0, 0.0)
    assert loaded(begin(fleet, consumer, 0), counted(1000, 0, 1000), 1.0)[0] == 1000


def placed(fleet: Fleet, request: RoutedRequest) -> tuple[str, str]:
    """URLs of the engines that compute and that decode the prompt."""
    found = fleet.choice.place(request, [], [], lambda engine: True, 0.0)
    assert found is not None
    consumer, is_alone = found
    producer = None if is_alone else fleet.choice.choose("prefill", request, 0.0)
    return (consumer if producer is None else producer).url, consumer.url


def test_without_an_index_prompts_with_one_prefix_meet_at_one_engine() -> None:
    fleet = new_fleet()
    for key in (b"a", b"b", b"c", b"d", b"e"):
        found = {placed(fleet, RoutedRequest(turn, key, num_tokens=2000)) for turn in range(6)}
        holder = prefix_holder(DECODE, RoutedRequest(0, key))
        assert found == {(holder, holder)}
        for engine in fleet.engines:  # Decode engines that have much to do hand over.
            engine.elsewhere = EngineLoad(engine.key, in_flight=200 if engine.role == "decode" else 0)
        computed = {placed(fleet, RoutedRequest(turn, key, num_tokens=2000))[0] for turn in range(6)}
        assert computed == {prefix_holder(PREFILL, RoutedRequest(0, key))}
        for engine in fleet.engines:
            engine.elsewhere = EngineLoad(engine.key)


def test_without_an_index_a_queue_counts_more_than_a_prefix() -> None:
    fleet = new_fleet()
    request = RoutedRequest(0, b"a", num_tokens=2000)
    holder, _ = placed(fleet, request)
    engine = next(one for one in fleet.engines if one.url == holder)
    engine.elsewhere = EngineLoad(engine.key, num_queued_tokens=1000)
    assert placed(fleet, request)[0] != holder


def test_what_the_index_knows_counts_more_than_a_prefix() -> None:
    fleet = new_fleet()
    request = RoutedRequest(0, b"a", num_tokens=2000)
    (other,) = {*DECODE} - {placed(fleet, request)[0]}
    assert placed(fleet, RoutedRequest(0, b"a", num_tokens=2000, cached={other: Match.in_cache(512)})) == (
        other,
        other,
    )


def test_the_length_of_answers_is_learned_from_streams() -> None:
    fleet = new_fleet()
    assert fleet.choice.expected_output == EXPECTED_OUTPUT
    for num_chunks in (10, 40, 40, 0):  # The last one was not streamed.
        leg = begin(fleet, fleet.engines[-1], 0)
        for number in range(num_chunks):
            leg.num_chunks += 1
            if leg.num_chunks == SAMPLE_CHUNKS:
                note_chunks(leg, float(number))
        note_closed(leg, fleet.choice.outputs)
    assert fleet.choice.expected_output == 40
