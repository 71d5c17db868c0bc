"""Dialects: which requests are split, the legs' bodies, the order of events, and errors. Without servers."""

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from baton.core.errors import PeerError
from baton.http.errors import ApiError
from baton.router.fleet.turns import TurnSieve
from baton.router.values.dialects import DIALECTS, MESSAGES, RESPONSES, Dialect
from baton.router.values.legs import parse_body, prefill_body, shape_of
from baton.router.values.sse import data_of
from tests.router.dialect_fakes import (
    ASKS,
    EVENTS,
    PATHS,
    TEXTS,
    WHOLE,
    message_events,
    named,
    response_events,
)

FUNCTION = {"type": "function", "name": "open", "parameters": {}}
parts = st.lists(st.text(max_size=3), max_size=4)


def parsed(body: Any) -> dict[str, Any]:
    return parse_body(msgspec.json.encode(body))


SPLIT: list[tuple[Dialect, dict[str, Any]]] = [
    (MESSAGES, {}),
    (MESSAGES, {"tools": [{"name": "open", "input_schema": {}}], "tool_choice": {"type": "any"}}),
    (MESSAGES, {"tool_choice": {"type": "auto"}, "thinking": {"type": "adaptive"}}),
    (RESPONSES, {}),
    (RESPONSES, {"store": False, "background": False, "previous_response_id": None}),
    (RESPONSES, {"store": None, "prompt": None, "truncation": "disabled", "tools": None}),
    (RESPONSES, {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "open"}}),
]
NOT_SPLIT: list[tuple[Dialect, dict[str, Any]]] = [
    (MESSAGES, {"tool_choice": {"type": "tool", "name": "open"}}),
    (MESSAGES, {"container": "c"}),
    (RESPONSES, {"store": True}),
    (RESPONSES, {"background": True}),
    (RESPONSES, {"previous_response_id": "resp_1"}),
    (RESPONSES, {"conversation": {"id": "c"}}),
    (RESPONSES, {"prompt": {"id": "p"}}),
    (RESPONSES, {"truncation": "auto"}),
    (RESPONSES, {"tools": [FUNCTION, {"type": "web_search_preview"}]}),
    (RESPONSES, {"tools": [{"type": ["function"]}]}),
    (RESPONSES, {"tools": ["?"]}),
    (RESPONSES, {"tools": 5}),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "i"}]}),
]


def test_what_an_engine_keeps_or_runs_itself_is_not_split() -> None:
    for dialect, more in (*SPLIT, *NOT_SPLIT):
        is_whole = dialect.is_whole(parsed({**ASKS[dialect.path], **more}))
        assert is_whole is ((dialect, more) in NOT_SPLIT), more


@pytest.mark.parametrize("path", PATHS)
def test_a_prefill_leg_asks_for_one_token_that_is_not_kept(path: str) -> None:
    body = {**ASKS[path], "stream": True, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    leg = msgspec.json.decode(msgspec.json.encode(prefill_body(parsed(body), "id", DIALECTS[path])))
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "id"}
    one = {"max_tokens": 1} if path == "/v1/messages" else {"max_output_tokens": 1, "store": False}
    more = {"include": body["include"]} if path == "/v1/messages" else {}
    assert leg == {**ASKS[path], **one, **more, "stream": False, "kv_transfer_params": params}


def test_a_prompts_length_counts_all_its_texts_and_no_media() -> None:
    image = {"type": "image", "source": {"type": "base64", "data": "x" * 4000}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x" * 400}]}
    call = {"type": "tool_use", "id": "t", "name": "", "input": {"path": "x" * 400}}
    turns = [{"role": "", "content": [image, call]}, {"role": "", "content": [result]}]
    assert shape_of({"system": "x" * 400, "messages": turns}, MESSAGES).num_prompt_tokens == 300
    items = [
        {"type": "function_call", "call_id": "t", "name": "", "arguments": "x" * 400},
        {"type": "function_call_output", "call_id": "t", "output": "x" * 400},
    ]
    assert shape_of({"instructions": "x" * 400, "input": items}, RESPONSES).num_prompt_tokens == 300
    assert shape_of({"input": "x" * 400}, RESPONSES).num_prompt_tokens == 100
    nested: Any = "x" * 40
    for _ in range(900):
        nested = [nested]
    assert shape_of(parsed({"input": nested}), RESPONSES).num_prompt_tokens == 10
    alike = [shape_of({"system": "s" * 1024, "messages": [text]}, MESSAGES) for text in "ab"]
    assert alike[0].prefix_key == alike[1].prefix_key


# --- The order of events ------------------------------------------------------------------------------


def ends(path: str, events: list[bytes]) -> list[bool]:
    is_last = DIALECTS[path].reads_end()
    return [is_last(event) for event in events]


@given(path=st.sampled_from(PATHS), texts=parts, arguments=parts)
def test_a_stream_ends_with_its_last_event(path: str, texts: list[str], arguments: list[str]) -> None:
    events = EVENTS[path](texts, arguments)
    events[1:1] = [b": comment\n\n", named({"type": "ping"}), named({"type": "of the future", "index": 7})]
    assert ends(path, events) == [*[False] * (len(events) - 1), True]


KINDS = {"message_start": "s", "content_block_start": "b", "content_block_delta": "d"}
KINDS |= {"content_block_stop": "e", "message_delta": "m", "message_stop": "t"}
MESSAGE = re.compile(r"s(?: b(\d+)(?: d\1)* e\1| m)* t")


def is_in_order(path: str, events: list[bytes]) -> bool:
    """A second reading of the order of events, as a whole."""
    read = [json.loads(data_of(event)) for event in events]
    if path == "/v1/responses":
        numbers = [one["sequence_number"] for one in read]
        return numbers == sorted(set(numbers))
    words = [f"{KINDS[one['type']]}{one.get('index', '')}" for one in read]
    starts = [word for word in words if word.startswith("b")]
    is_counted = starts == [f"b{index}" for index in range(len(starts))]
    return is_counted and MESSAGE.fullmatch(" ".join(words)) is not None


@given(path=st.sampled_from(PATHS), arguments=parts, data=st.data())
def test_an_event_that_comes_twice_or_too_early_or_not_at_all_is_noticed(
    path: str, arguments: list[str], data: st.DataObject
) -> None:
    events = EVENTS[path](TEXTS, arguments)
    places = st.integers(0, len(events) - 1)
    for _ in range(data.draw(st.integers(0, 2), "changes")):
        moved, to = events[data.draw(places, "from")], data.draw(places, "to")
        if not data.draw(st.booleans(), "is_twice"):
            events = [event for event in events if event is not moved]
        if data.draw(st.booleans(), "is_moved"):
            events.insert(to, moved)
        places = st.integers(0, len(events) - 1)
    ending = EVENTS[path](TEXTS, arguments)[-1]
    assume(ending in events)
    events = events[: events.index(ending) + 1]  # What follows the end is never read.
    if is_in_order(path, events):
        assert ends(path, events) == [*[False] * (len(events) - 1), True]
    else:
        with pytest.raises(PeerError, match="out of order"):
            ends(path, events)


@pytest.mark.parametrize("path", PATHS)
def test_an_event_that_is_no_object_is_no_event(path: str) -> None:
    for data in (b"5", b"{", b'{"type": 5}', b'{"type": "x", "index": "0", "sequence_number": "0"}'):
        with pytest.raises(PeerError):
            ends(path, [b"data: " + data + b"\n\n"])


@pytest.mark.parametrize("path", PATHS)
def test_an_engines_error_ends_its_stream(path: str) -> None:
    events = EVENTS[path]()[:3]
    assert ends(path, [*events, named({"type": "error", "sequence_number": 3})])[-1]
    if path == "/v1/responses":
        for kind in ("response.failed", "response.incomplete"):
            assert ends(path, [*events, named({"type": kind, "sequence_number": 3})])[-1]


# --- Errors and params --------------------------------------------------------------------------------


def test_errors_of_messages_have_anthropics_form() -> None:
    kinds = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
    kinds |= {413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 502: "api_error"}
    kinds |= {503: "overloaded_error", 504: "timeout_error"}
    for status, kind in kinds.items():
        body = {"type": "error", "error": {"type": kind, "message": "why"}}
        assert MESSAGES.error_body(ApiError(status, "why")) == body
        event = MESSAGES.error_event("why", status=status)
        assert event == b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"


def test_an_error_of_a_response_has_the_next_number() -> None:
    event = RESPONSES.error_event("why", num_sent=4)
    assert event.startswith(b"event: error\n")
    found = json.loads(data_of(event))
    assert (found["type"], found["message"], found["sequence_number"]) == ("error", "why", 4)
    assert found["error"]["message"] == "why", "OpenAI's library raises only if there is this field"


def test_params_in_a_numbered_event_are_kept_from_the_client() -> None:
    params = {"do_remote_decode": True, "remote_host": "10.0.0.1"}
    sieve, sent = TurnSieve(), response_events(params=params)
    seen = [sieve.event(event) for event in sent]
    assert b"10.0.0.1" not in b"".join(seen)
    assert sieve.params == params
    for before, after in zip(sent, seen, strict=True):
        assert before.partition(b"\n")[0] == after.partition(b"\n")[0], "the name stays"
        wanted = json.loads(data_of(before))
        if before == sent[-1]:
            del wanted["response"]["kv_transfer_params"]
        assert json.loads(data_of(after)) == wanted
    start = {"type": "message_start", "message": {"id": "1", "kv_transfer_params": params}}
    assert b"10.0.0.1" not in TurnSieve().event(named(start))
    assert [TurnSieve().event(event) for event in message_events()] == message_events()
    assert json.loads(TurnSieve().whole(json.dumps(WHOLE["/v1/messages"]).encode())) == WHOLE["/v1/messages"]
