"""Fields that constrain an answer: what the engine gets, and the calls that the client gets."""

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from baton.engine.text.grammar import MAX_GRAMMAR_CHARS, compile_job
from baton.server.protocol.chat import CallDelta
from baton.server.protocol.structured import constraint_of_call, constraint_of_calls
from baton.server.tool_calls import CallReader
from tests.server.fakes import LiveServer, ScriptedEngine

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FLEXIBLE = compile_job("schema", json.dumps(SCHEMA))
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": 'odd "name"'}},
]


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    return {**prompt, **fields}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, compile_job("schema", '{"type": "object"}')),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            FLEXIBLE,
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            compile_job("schema", "{}"),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, FLEXIBLE),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, FLEXIBLE),
        ({"structured_outputs": {"json_object": True}}, compile_job("schema", '{"type": "object"}')),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            compile_job("compact_schema", json.dumps(SCHEMA)),
        ),
        ({"structured_outputs": {"regex": "a+"}}, compile_job("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, compile_job("choice", '["a", "b"]')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, compile_job("ebnf", 'start: "a"')),
    ],
    ids=str,
)
def test_the_engine_gets_the_grammar(
    http: httpx.Client, engine: ScriptedEngine, path: str, fields: dict[str, Any], grammar: str | None
) -> None:
    assert http.post(path, json=body(path, **fields)).status_code == 200
    assert engine.requests[0].sampling_params.grammar == grammar


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "faulty"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "no"}},
                }
            },
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "new_option": True}}, "structured_outputs.new_option"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 1, "max_tokens": 9}, "min_tokens"),
        ({"structured_outputs": {"regex": "a"}, "bad_words": ["a"]}, "bad_words"),
        ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"guided_json": SCHEMA}, "guided_json"),
    ],
    ids=str,
)
def test_what_cannot_constrain_an_answer_is_the_clients_error(
    http: httpx.Client, engine: ScriptedEngine, path: str, fields: dict[str, Any], faulty: str
) -> None:
    answer = http.post(path, json=body(path, **fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, faulty), answer.text
    assert not engine.requests


@pytest.mark.parametrize(
    ("fields", "faulty"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "lose"}}, "tools": TOOLS}, "tools"),
        (
            {"tool_choice": "required", "tools": TOOLS, "response_format": {"type": "json_object"}},
            "response_format",
        ),
    ],
    ids=str,
)
def test_a_choice_that_cannot_be_is_the_clients_error(
    http: httpx.Client, engine: ScriptedEngine, fields: dict[str, Any], faulty: str
) -> None:
    answer = http.post(CHAT, json=body(CHAT, **fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, faulty), answer.text
    assert not engine.requests


# --- Calls -----------------------------------------------------------------------------------------

Arguments = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.one_of(st.text(max_size=6), st.integers(), st.none()), lambda of: st.lists(of, max_size=3)
    ),
    max_size=3,
)
Calls = st.lists(st.tuples(st.text(min_size=1, max_size=6), Arguments), min_size=1, max_size=4)


def written(calls: Sequence[tuple[str, Any]], *, ascii_only: bool = True) -> str:
    listed = [{"name": name, "parameters": arguments} for name, arguments in calls]
    return json.dumps(listed, ensure_ascii=ascii_only)


def read(deltas: Sequence[CallDelta]) -> list[tuple[str, Any]]:
    found: dict[int, tuple[str, str]] = {}
    for delta in deltas:
        if delta.function.name is not UNSET:
            assert delta.id is not UNSET
            assert delta.index == len(found)
            found[delta.index] = delta.function.name, ""
        name, arguments = found[delta.index]
        found[delta.index] = name, arguments + delta.function.arguments
    return [(name, json.loads(arguments)) for name, arguments in found.values()]


@given(calls=Calls, ascii_only=st.booleans(), cuts=st.lists(st.integers(0, 400), max_size=12))
def test_calls_are_read_wherever_the_text_is_cut(
    calls: list[tuple[str, Any]], ascii_only: bool, cuts: list[int]
) -> None:
    text = written(calls, ascii_only=ascii_only)
    reader, deltas = CallReader(), []
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(text)], strict=True):
        new = reader.feed(text[start:end])
        assert len({delta.index for delta in new}) == len(new)
        deltas += new
    assert read(deltas) == calls
    named = CallReader("find")
    arguments = json.dumps(calls[0][1])
    parts = [arguments[i : i + 3] for i in range(0, len(arguments), 3)]
    assert read([delta for part in parts for delta in named.feed(part)]) == [("find", calls[0][1])]


@given(calls=Calls, cut=st.integers(0, 400))
def test_a_call_that_is_cut_off_shows_what_there_is(calls: list[tuple[str, Any]], cut: int) -> None:
    text = written(calls)[:cut]
    shown = CallReader().feed(text)
    assert [delta.function.name for delta in shown] == [name for name, _ in calls[: len(shown)]]
    assert all(delta.function.arguments in text for delta in shown)


@given(
    calls=st.lists(st.sampled_from([("find", {"a": 1}), ('odd "name"', {"b": [1]})]), min_size=1, max_size=3)
)
def test_the_constraint_has_what_the_reader_reads(calls: list[tuple[str, Any]]) -> None:
    """The grammar is walked byte by byte: json.dumps writes just what it allows."""
    from llguidance import LLMatcher, LLTokenizer

    def accepts(kind: str, text: str, answer: str) -> bool:
        matcher = LLMatcher(LLTokenizer("byte"), compile_job(kind, text), log_level=0)
        return matcher.consume_tokens(list(answer.encode())) and matcher.is_accepting()

    tools: list[tuple[str, dict[str, Any] | None]] = [("find", SCHEMA), ('odd "name"', None)]
    many, one = (constraint_of_calls(tools, is_parallel=is_parallel) for is_parallel in (True, False))
    assert accepts(many.kind, many.text, written(calls))
    assert accepts(one.kind, one.text, written(calls)) == (len(calls) == 1)
    assert not accepts(many.kind, many.text, written([*calls, ("other", {})]))
    name, arguments = calls[0]
    named = constraint_of_call(dict(tools)[name])
    assert accepts(named.kind, named.text, json.dumps(arguments))


def chat(
    http: httpx.Client, *, streams: bool, **fields: Any
) -> tuple[list[tuple[str, Any]], str, str | None]:
    """The calls, the content and the reason of the end."""
    asked = body(CHAT, tools=TOOLS, stream=streams, max_tokens=150, **fields)
    if not streams:
        choice = http.post(CHAT, json=asked).raise_for_status().json()["choices"][0]
        calls = [call["function"] for call in choice["message"]["tool_calls"]]
        found = [(call["name"], json.loads(call["arguments"])) for call in calls]
        return found, choice["message"]["content"], choice["finish_reason"]
    with http.stream("POST", CHAT, json=asked) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    names, texts = {}, {}
    for call in [call for choice in choices for call in choice["delta"].get("tool_calls", [])]:
        names.setdefault(call["index"], call["function"].get("name"))
        texts[call["index"]] = texts.get(call["index"], "") + call["function"]["arguments"]
    content = "".join(choice["delta"].get("content", "") for choice in choices)
    return (
        [(names[index], json.loads(texts[index])) for index in names],
        content,
        choices[-1]["finish_reason"],
    )


@pytest.mark.parametrize("streams", [False, True])
def test_required_calls(http: httpx.Client, engine: ScriptedEngine, streams: bool) -> None:
    calls = [("find", {"a": 12}), ('odd "name"', {"b": "}]"})]
    engine.answer = written(calls)
    assert chat(http, streams=streams, tool_choice="required") == (calls, "", "tool_calls")
    expected = constraint_of_calls([("find", SCHEMA), ('odd "name"', None)], is_parallel=True)
    assert engine.requests[0].sampling_params.grammar == compile_job(expected.kind, expected.text)


@pytest.mark.parametrize("streams", [False, True])
def test_a_named_call(http: httpx.Client, engine: ScriptedEngine, streams: bool) -> None:
    engine.answer = '{"a": 12}'
    choice = {"type": "function", "function": {"name": "find"}}
    assert chat(http, streams=streams, tool_choice=choice) == ([("find", {"a": 12})], "", "stop")


def test_a_stream_goes_on_with_a_call_that_another_engine_has_begun(
    http: httpx.Client, live: LiveServer, engine: ScriptedEngine
) -> None:
    text = written([("find", {"a": 12})])
    cut = text.index("2}")
    engine.answer = text[cut:]
    params = {"baton_output_token_ids": [ord(character) for character in text[:cut]]}
    asked = body(
        CHAT, tools=TOOLS, tool_choice="required", stream=True, max_tokens=150, kv_transfer_params=params
    )
    with http.stream("POST", CHAT, json=asked) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    deltas = [call["function"] for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert all("name" not in delta for delta in deltas), "the client has the name"
    assert "".join(delta["arguments"] for delta in deltas) == "2}"
