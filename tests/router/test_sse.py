"""The one parser of engines' streams: the events of the standard, however the bytes are cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import PeerError
from baton.router.values.sse import DONE, EventSplitter, data_of, is_done, sse_event

LINES = (b"data: {}", b"data:[1]", b": note", b"event: a", b"data: [DONE]", b"")
streams = st.lists(
    st.tuples(st.sampled_from(LINES), st.sampled_from([b"\n", b"\r\n", b"\r"])), max_size=24
).map(lambda lines: b"".join(line + end for line, end in lines))
cuts = st.lists(st.integers(0, 240), max_size=8)


def pieces_of(stream: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(places)]


def events_of(pieces: list[bytes], *, ends: bool) -> list[bytes]:
    splitter, found = EventSplitter(), []
    for piece in pieces:
        splitter.push(piece)
        while (event := splitter.next()) is not None:
            found.append(event)
    if ends:
        splitter.finish()
        while (event := splitter.next()) is not None:
            found.append(event)
    return found


def twin(stream: bytes) -> list[bytes]:
    """The whole stream at once, line by line, as the standard describes it."""
    lines, line, at = [], b"", 0
    while at < len(stream):
        if stream[at : at + 2] == b"\r\n":
            lines, line, at = [*lines, line], b"", at + 2
        elif stream[at : at + 1] in (b"\n", b"\r"):
            lines, line, at = [*lines, line], b"", at + 1
        else:
            line, at = line + stream[at : at + 1], at + 1
    events, event = [], b""
    for one in [*lines, *([line] if line else [])]:
        if one:
            event += one + b"\n"
        elif event:
            events, event = [*events, event + b"\n"], b""
    return [*events, *([event + b"\n"] if is_done(event) else [])]


@given(stream=streams, cuts=cuts)
def test_the_events_are_those_of_the_standard_wherever_the_stream_is_cut(
    stream: bytes, cuts: list[int]
) -> None:
    assert events_of(pieces_of(stream, cuts), ends=True) == twin(stream)


@given(stream=streams, cut=st.integers(0, 240), cuts=cuts)
def test_a_stream_that_breaks_shows_whole_events_only(stream: bytes, cut: int, cuts: list[int]) -> None:
    whole = twin(stream)
    found = events_of(pieces_of(stream[:cut], cuts), ends=False)
    assert found == whole[: len(found)]
    assert len(found) >= len(twin(stream[:cut])) - 1


def test_an_event_comes_out_with_its_last_byte() -> None:
    splitter = EventSplitter()
    for end in (b"\n\n", b"\r\n\r\n", b"\r\r"):
        splitter.push(b"data: 1" + end[:-1])
        held = splitter.next()
        splitter.push(end[-1:])
        # An event is over after CR LF CR, whatever follows: the last LF belongs to that CR.
        assert (held or splitter.next()) == b"data: 1\n\n"
        assert splitter.next() is None


def test_an_event_without_end_is_refused_and_one_of_the_longest_size_is_not() -> None:
    splitter = EventSplitter(max_event_bytes=32)
    splitter.push(b"x" * 30 + b"\n\n")
    assert splitter.next() == b"x" * 30 + b"\n\n"
    splitter.push(b"x" * 32)
    assert splitter.next() is None
    splitter.push(b"x")
    with pytest.raises(PeerError, match="over 32 bytes"):
        splitter.next()


def test_a_long_event_in_small_pieces_is_not_searched_from_its_start_again() -> None:
    """Every search begins where the last one ended."""
    splitter = EventSplitter()
    for _ in range(100):
        splitter.push(b"x" * 100)
        assert splitter.next() is None
        assert splitter._num_searched == len(splitter._pending) - 1


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: 1\n\n", b"1"),
        (b"data:1\n\n", b"1"),
        (b"data:  1\n\n", b" 1"),
        (b"event: a\ndata: 1\nid: 7\ndata: 2\n\n", b"1\n2"),
        (b": comment\n\n", b""),
        (sse_event({"a": 1}), b'{"a":1}'),
    ],
)
def test_the_data_of_an_event(event: bytes, data: bytes) -> None:
    assert data_of(event) == data


def test_done_inside_a_text_is_not_the_end() -> None:
    assert is_done(b"data: " + DONE + b"\n\n")
    assert is_done(b"event: end\ndata:[DONE] \n\n")
    assert not is_done(b'data: {"text": "data: [DONE]"}\n\n')
