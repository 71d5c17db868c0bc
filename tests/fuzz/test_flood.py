"""Frames that no honest peer would send, at the real control thread: it stays alive and bounded, and obeys
none.
"""

from collections.abc import Callable
from typing import Any

import pytest

import baton.protocol.signed_frame as signed_frame
from baton.core.ids import Address, EngineId, Epoch, TransferId
from baton.core.timers import Timers
from baton.protocol.messages import Envelope, Failed, Want, Working
from baton.protocol.pull_consumer import PullConsumer
from baton.protocol.pull_producer import PullProducer
from baton.protocol.push_producer import WANTS_MAX, WANTS_PER_CONSUMER_MAX, PushProducer
from baton.testing.fuzz import flood


@pytest.mark.parametrize("seed", range(4))
def test_a_flood_is_dropped_or_answered_and_leaves_nothing(seed: int) -> None:
    result = flood(1_500, seed)
    assert result.violations == []
    assert result.num_frames == 1_500
    assert set(result.kinds) == {"bytes", "tree", "damaged", "envelope"}
    assert result.num_decoded > 100, "some frames must reach the protocol machines"
    assert result.num_dropped > 100


def test_long_floods_leave_no_more_objects_than_short_ones() -> None:
    lengths = (1_000, 4_000)
    few, many = (flood(length, seed=7).num_objects_left for length in lengths)
    assert many < few + 2_000


def anybody_claims(self: Any, loan: Any, sender: Address, claim: int) -> bool:
    return True


def anybodys_word(self: Any, sender: Address, loan_id: Any, claim: int) -> Any:
    return self._fetches.get(claim)


def believe_anything(frame: bytes) -> Envelope:
    return Envelope(*frame)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("where", "name", "mutant", "detected_as"),
    [
        (PullProducer, "_claims", anybody_claims, "FreeLoan"),
        (PullConsumer, "_of", anybodys_word, "Fail"),
        (signed_frame, "decode_envelope", believe_anything, "died"),
    ],
)
def test_the_fuzzer_detects_a_removed_check(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, mutant: Callable[..., Any], detected_as: str
) -> None:
    monkeypatch.setattr(where, name, mutant)
    assert any(detected_as in violation for violation in flood(3_000, seed=0).violations)


# --- One peer that asks for too much -------------------------------------------------------------------

GREEDY, MODEST = (Address(EngineId(name), Epoch(1)) for name in ("greedy", "modest"))


def want(number: int) -> Want:
    return Want(TransferId(f"t{number}"), number, bytes(32), 5)


def test_a_consumer_that_wants_everything_leaves_room_for_others_and_is_forgotten() -> None:
    timers = Timers()
    producer = PushProducer(timers)
    for number in range(2 * WANTS_PER_CONSUMER_MAX):
        producer.receive(GREEDY, want(number), 0.0)
    assert producer.num_open == WANTS_PER_CONSUMER_MAX
    (refused,) = producer.receive(GREEDY, want(0xFFFF), 0.0)
    assert isinstance(refused.message, Failed)
    (served,) = producer.receive(MODEST, want(0xFFFF), 0.0)
    assert isinstance(served.message, Working)
    # First it gets an answer that nothing comes, then it is forgotten.
    for at_s in (timers.hold_s, 2 * timers.hold_s):
        producer.wake(at_s)
    assert producer.num_open == 0
    (served,) = producer.receive(GREEDY, want(0xFFFF), 2 * timers.hold_s)
    assert isinstance(served.message, Working), "a refused consumer must be served later"


def test_any_number_of_names_is_held_in_bounded_memory() -> None:
    producer = PushProducer(Timers())
    for number in range(2 * WANTS_MAX):
        producer.receive(Address(EngineId(f"e{number % 64}"), Epoch(1)), want(number), 0.0)
    assert producer.num_open == WANTS_MAX
