"""Names of transfers without a transfer_id from the router."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.connectors.pull.intent import transfer_of_request
from baton.core.transfer_params import MAX_TRANSFER_ID_CHARS
from tests.connectors.push_world import PushWorld

ENDING = st.text("0123456789abcdef", min_size=8, max_size=8)


@pytest.fixture
def world() -> Iterator[PushWorld]:
    world = PushWorld()
    yield world
    world.close()


@settings(max_examples=30)
@given(st.text(), st.integers(0, 3), ENDING, ENDING)
def test_engines_that_add_their_own_endings_agree(client: str, index: int, ours: str, theirs: str) -> None:
    assert transfer_of_request(f"{client}-{index}-{ours}") == transfer_of_request(
        f"{client}-{index}-{theirs}"
    )


@settings(max_examples=30)
@given(st.text(), ENDING)
def test_completions_of_one_request_are_told_apart(client: str, ending: str) -> None:
    assert transfer_of_request(f"{client}-0-{ending}") != transfer_of_request(f"{client}-1-{ending}")


@settings(max_examples=30)
@given(st.text(max_size=600))
def test_whatever_a_client_calls_itself_becomes_a_name_that_the_wire_takes(client: str) -> None:
    name = transfer_of_request(client)
    assert name.isascii()
    assert len(name) <= MAX_TRANSFER_ID_CHARS


def test_legs_without_a_name_find_each_other(world: PushWorld) -> None:
    p, d = world.engine("p"), world.engine("d")
    tokens = list(range(9))
    request = d.follow("cmpl-abc-0-0123abcd", tokens, p, None)
    d.admit(request)
    p.begin("cmpl-abc-0-ffff0000", tokens, None)
    p.prefill_in_chunks("cmpl-abc-0-ffff0000", 4, 5)
    world.end_delivered(d, request)


def test_a_retry_without_a_name_does_not_wait_for_the_first_attempt(world: PushWorld) -> None:
    p, d = world.engine("p"), world.engine("d")
    tokens = list(range(9))
    first = d.follow("cmpl-abc-0-0123abcd", tokens, p, None)
    d.admit(first)
    p.begin("cmpl-abc-0-ffff0000", tokens, None)
    p.prefill_in_chunks("cmpl-abc-0-ffff0000", 4)
    d.abort(first)
    world.settle()
    second = d.follow("cmpl-abc-0-4567abcd", tokens, p, None)
    d.admit(second)
    p.prefill_in_chunks("cmpl-abc-0-ffff0000", 5)  # These blocks were for the first attempt.
    world.end_delivered(d, second, is_last=False)
    world.pass_time(70)
    world.assert_whole()
