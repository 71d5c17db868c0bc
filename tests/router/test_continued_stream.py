"""D's stream after a token of P: right however the bytes are cut."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.request.tokens.continuation import ContinuedSieve, KeptToken, OverlapReader, read_kept
from baton.router.values.dialects import CHAT, COMPLETIONS, Dialect
from baton.router.values.sse import EventSplitter
from tests.router.baton_fakes import event

OPENING = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 6, "completion_tokens": 2, "total_tokens": 8}


def kept(text: str = "Hi", *, dialect: Dialect = COMPLETIONS) -> KeptToken:
    return KeptToken({}, dialect, text, 7, [1, 2], None, None)


def text_event(text: str, finish: str | None = None, **fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish, **fields}]})


def chat_event(text: str | None, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


def overlap(stream: bytes, *, cut: int = 0, dialect: Dialect = COMPLETIONS) -> tuple[bool | None, bytes]:
    reader, events = OverlapReader(kept(dialect=dialect)), EventSplitter()
    agrees, rest = None, b""
    for piece in (stream[:cut], stream[cut:]):
        events.push(piece)
        while (event := events.next()) is not None:
            if agrees is None:
                agrees = reader.look_at(event)
            else:
                rest += event
    return agrees, reader.left_over + rest


@given(cut=st.integers(0, 200))
def test_what_both_have_said_is_said_once_wherever_the_stream_is_cut(cut: int) -> None:
    rest = text_event("!", "length") + DONE
    assert overlap(b": hello\n\n" + text_event("Hi") + rest, cut=cut) == (True, rest)
    chat_rest = chat_event("!", "length") + DONE
    assert overlap(OPENING + chat_event("Hi") + chat_rest, cut=cut, dialect=CHAT) == (True, chat_rest)


def test_a_text_that_comes_in_parts_or_together_with_the_next_is_one_text() -> None:
    rest = text_event("!", "length") + DONE
    assert overlap(text_event("") + text_event("H") + text_event("i") + rest) == (True, rest)
    agrees, left = overlap(text_event("Hi!", token_ids=[7, 8], prompt_token_ids=[1, 2]) + rest)
    assert agrees
    assert msgspec.json.decode(left.split(b"\n\n")[0].removeprefix(b"data: "))["choices"] == [
        {"index": 0, "text": "!", "finish_reason": None, "token_ids": [8]}
    ]


@pytest.mark.parametrize(
    "stream",
    [
        text_event("Ho"),
        text_event("H") + text_event("o"),
        text_event("Hi", "stop"),  # D ends where P goes on.
        text_event("H", "stop"),
        text_event("Hi", token_ids=[8]),  # The same text, another token.
        DONE,
        event({"error": {"message": "no"}}),
        event({"choices": []}),
        event({"choices": [{"text": 5}]}),
        event([]),
        b"data: {\n\n",
    ],
)
def test_whatever_else_d_says_is_another_answer(stream: bytes) -> None:
    assert overlap(stream + text_event("!") + DONE)[0] is False


def test_an_end_in_the_event_of_the_second_token_is_passed_on() -> None:
    agrees, left = overlap(text_event("Hi!", "stop") + DONE)
    assert agrees
    assert b'"stop"' in left
    assert left.endswith(DONE)


@given(cuts=st.lists(st.integers(0, 400), max_size=4))
def test_the_rest_of_a_chat_has_no_second_opening_and_the_counts_of_one_answer(cuts: list[int]) -> None:
    stream = (
        OPENING + chat_event("!") + chat_event("", "length") + event({"choices": [], "usage": USAGE}) + DONE
    )
    sieve, splitter, told = ContinuedSieve(1), EventSplitter(), b""
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(stream)], strict=True):
        splitter.push(stream[begin:end])
        while (one := splitter.next()) is not None:
            told += sieve.event(one)
    assert b"assistant" not in told
    events = [part.removeprefix(b"data: ") for part in told.split(b"\n\n") if part]
    assert events[-1] == b"[DONE]"
    assert msgspec.json.decode(events[-2])["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
    }
    assert [msgspec.json.decode(e)["choices"][0]["delta"]["content"] for e in events[:2]] == ["!", ""]


def test_text_about_usage_is_text() -> None:
    sieve = ContinuedSieve(1)
    assert b'the \\"usage\\" of it' in sieve.event(text_event('the "usage" of it'))
    assert sieve.event(text_event('the "usage" of it')) == text_event('the "usage" of it')


@pytest.mark.parametrize(
    "change",
    [
        {"choices": []},
        {"choices": [{"text": "a"}, {"text": "b"}]},
        {"choices": [{"text": "a", "token_ids": [1, 2], "prompt_token_ids": [1]}]},
        {"choices": [{"text": "a", "token_ids": [True], "prompt_token_ids": [1]}]},
        {"choices": [{"text": "a", "token_ids": ["1"], "prompt_token_ids": [1]}]},
        {"choices": [{"text": "a", "token_ids": [1], "prompt_token_ids": []}]},
        {"choices": [{"text": "a", "token_ids": [1], "prompt_token_ids": [-1]}]},
        {"choices": [{"text": None, "token_ids": [1], "prompt_token_ids": [1]}]},
        {"choices": [{"text": "a", "token_ids": [1], "prompt_token_ids": [1], "finish_reason": "abort"}]},
        {"choices": [{"text": "a", "token_ids": [1], "prompt_token_ids": [1], "finish_reason": None}]},
    ],
    ids=str,
)
def test_an_answer_of_p_that_does_not_hold_one_token_is_not_gone_behind(change: dict[str, Any]) -> None:
    body = {"prompt": "x", "stream": True, "max_tokens": 4}
    good = {"text": "a", "token_ids": [1], "prompt_token_ids": [1], "finish_reason": "length"}
    assert read_kept({"choices": [good]}, body, COMPLETIONS, max_model_len=9) is not None
    assert read_kept(change, body, COMPLETIONS, max_model_len=9) is None
