"""Cutting a stream between events loses nothing, adds nothing, and never shows half an event."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router import sse
from baton.router.sse import EventCutter

events = st.lists(
    st.sampled_from(
        [b"data: {}\n\n", b": note\n\n", b"event: a\r\ndata: 1\r\n\r\n", b"data: a\ndata: b\n\n"]
    ),
    max_size=8,
)


def pieces_of(stream: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(places)]


@given(events=events, cuts=st.lists(st.integers(0, 120)))
def test_however_the_bytes_arrive_whole_events_come_out_and_nothing_is_lost(
    events: list[bytes], cuts: list[int]
) -> None:
    stream = b"".join(events) + b"data: [DONE]\n\n"
    cutter, sent = EventCutter(), b""
    for piece in pieces_of(stream, cuts):
        ready = cutter.push(piece)
        assert not ready or ready.endswith((b"\n\n", b"\r\n\r\n"))
        sent += ready
    assert sent == stream
    assert cutter.is_done
    assert cutter.finish() == b""


@given(events=events, cut=st.integers(0, 120))
def test_what_is_sent_before_a_break_are_the_whole_events_that_had_arrived(
    events: list[bytes], cut: int
) -> None:
    stream = b"".join(events)[:cut]
    cutter = EventCutter()
    sent = cutter.push(stream)
    whole = b""
    for event in events:
        if len(whole + event) > cut:
            break
        whole += event
    assert sent == whole
    assert not cutter.is_done
    assert cutter.separator() == b""


@pytest.mark.parametrize("end", [b"data: [DONE]", b"data:[DONE]\n", b"data: [DONE] \r\n"])
def test_a_last_event_without_its_blank_line_is_sent_at_the_end_of_the_stream(end: bytes) -> None:
    cutter = EventCutter()
    assert cutter.push(end) == b""
    assert cutter.finish() == end
    assert cutter.is_done


def test_done_inside_a_text_is_not_the_end() -> None:
    cutter = EventCutter()
    cutter.push(b'data: {"text": "data: [DONE]"}\n\n')
    assert not cutter.is_done


def test_an_oversized_event_is_passed_on_in_pieces_and_closed_before_ours() -> None:
    cutter = EventCutter()
    large = b"data: " + b"x" * sse.MAX_EVENT_BYTES
    assert cutter.push(large) == large
    assert cutter.separator() == b"\n\n"
    assert cutter.push(b"y\n\n") == b"y\n\n"
    assert cutter.separator() == b""
