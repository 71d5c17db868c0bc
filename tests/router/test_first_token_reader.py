"""The first token in a stream of events: found however the bytes are cut, and shown as the client asked."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import PeerError
from baton.router.request.tokens.stream import MAX_OPENING_BYTES, FirstToken, FirstTokenReader
from baton.router.values.sse import EventSplitter
from tests.router.baton_fakes import event

OPENING = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
REST = event({"choices": [{"text": "i"}]}) + b"data: [DONE]\n\n"


def token(**fields: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"text": "H", "finish_reason": None, "token_ids": [72], **fields}]}


def read(stream: bytes, *, shows: bool = False, cut: int = 0) -> tuple[FirstToken, bytes]:
    reader, events = FirstTokenReader(shows_token_ids=shows), EventSplitter()
    found, rest = None, b""
    for piece in (stream[:cut], stream[cut:]):
        events.push(piece)
        while (one := events.next()) is not None:
            if found is None:
                found = reader.look_at(one)
            else:
                rest += one
    assert found is not None
    return found, rest


@given(cut=st.integers(1, 300))
def test_it_is_found_wherever_the_stream_is_cut(cut: int) -> None:
    first, rest = read(OPENING + b": comment\n\n" + event(token()) + REST, cut=cut)
    assert first.token_ids == (72,)
    assert first.events.startswith(OPENING + b": comment\n\n")
    assert rest == REST
    assert not first.is_last


def test_what_the_client_did_not_ask_for_is_taken_out() -> None:
    chunk = {**token(), "kv_transfer_params": {"baton_ticket": "signed"}}
    first, _ = read(event(chunk))
    assert json.loads(first.events.removeprefix(b"data: ")) == {
        "id": "c",
        "choices": [{"text": "H", "finish_reason": None}],
    }
    assert first.params == {"baton_ticket": "signed"}
    asked, _ = read(event(chunk), shows=True)
    assert json.loads(asked.events.removeprefix(b"data: "))["choices"][0]["token_ids"] == [72]
    assert b"ticket" not in asked.events


@pytest.mark.parametrize(
    "nothing", [{"text": ""}, {"delta": {"content": ""}}, {"text": "", "logprobs": None}]
)
def test_a_token_whose_text_is_held_back_shows_nothing_yet(nothing: dict[str, Any]) -> None:
    choice = {"finish_reason": None, "token_ids": [72], **nothing}
    first, _ = read(OPENING + event({"choices": [choice]}))
    assert first.events == OPENING
    shown, _ = read(OPENING + event({"choices": [choice]}), shows=True)
    assert b"72" in shown.events


@pytest.mark.parametrize(
    "something",
    [
        {"finish_reason": "stop"},
        {"logprobs": {"tokens": ["H"]}},
        {"delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{"}}]}},
        {"delta": {"content": "", "reasoning": "Hm"}},
        {"delta": {"a_field_of_the_future": 1}},
    ],
)
def test_a_token_without_text_is_shown_for_what_comes_with_it(something: dict[str, Any]) -> None:
    first, _ = read(event(token(text="", **something)))
    assert first.events
    assert first.is_last == ("finish_reason" in something)


@pytest.mark.parametrize(
    "stream",
    [
        b"data: [DONE]\n\n",
        b"data: {\n\n",
        b"data: \xff\n\n",
        b"data: []\n\n",
        b"data: " + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"\n\n",
        b'data: {"choices": 5}\n\n',
        b'data: {"error": {"message": "no"}}\n\n',
        b'data: {"error": "no"}\n\n',
        event(token(token_ids=["72"])),
        event(token(token_ids="72")),
    ],
)
def test_a_stream_without_one_is_its_engines_fault(stream: bytes) -> None:
    with pytest.raises(PeerError):
        read(OPENING + stream)


def test_a_stream_that_never_says_one_is_given_up() -> None:
    reader = FirstTokenReader(shows_token_ids=False)
    comment = b":" + b"x" * (MAX_OPENING_BYTES // 2) + b"\n\n"
    reader.look_at(comment)
    with pytest.raises(PeerError, match="without a first token"):
        reader.look_at(comment)
