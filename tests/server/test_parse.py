"""Parsing of bodies to typed requests, with a UserError that names the field."""

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import UserError
from baton.http.json_body import decode_as
from baton.server.protocol import fields
from baton.server.protocol.chat import ChatRequest, plain_messages, plain_tools
from baton.server.protocol.completion import CompletionRequest
from baton.server.protocol.parse import parse_request
from baton.server.protocol.sampling import SamplingFields
from baton.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest

Request = CompletionRequest | ChatRequest


def admit(body: bytes, kind: type[Request]) -> None:
    """Check all of a body that needs no engine."""
    request: Request = decode_as(body, kind)
    if isinstance(request, CompletionRequest):
        request.prompts()
    else:
        plain_messages(request.messages)
    assert request.constraint is None or request.constraint.text
    allowed = request.checked_allowed_ids(vocab_size=100, num_choices=1)
    assert allowed is None or sorted(set(allowed)) == list(allowed)
    request.sampling_params(max_tokens=16, logprobs=None, vocab_size=100, defaults={})
    assert request.num_samples >= 1
    assert all(request.stop_strings)
    assert isinstance(request.checked_priority, int)
    assert request.checked_cache_salt != ""
    assert request.in_session("talk").session_id is not None
    assert request.checked_prompt_logprobs != -1
    assert all(request.checked_bad_words)
    request.truncate([1, 2, 3], max_model_len=200)
    request.check_stream_options()


def field_of(body: dict[str, Any] | bytes, kind: type[Request] = CompletionRequest) -> str | None:
    """Return the field that is refused."""
    with pytest.raises(UserError) as refused:
        admit(body if isinstance(body, bytes) else json.dumps(body).encode(), kind)
    return refused.value.field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_tokens": "5.5"}, "max_tokens"),
        ({"max_tokens": [5]}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 1025}, "stop"),
        ({"stop": 1}, "stop"),
        ({"stop_token_ids": [100]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"100": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"3": "a"}}, "logit_bias[...]"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"priority": 2**40}, "priority"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [3, 100]}, "allowed_token_ids[1]"),
        ({"allowed_token_ids": [3] * 101}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": ["a" * 257]}, "bad_words[0]"),
        ({"bad_words": [str(n) for n in range(129)]}, "bad_words"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 201}, "truncate_prompt_tokens"),
        ({"truncation_side": "up"}, "truncation_side"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"session_id": ""}, "session_id"),
        ({"session_id": "a" * 257}, "session_id"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"kv_transfer_params": 5}, "kv_transfer_params"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [[1], "a"]}, "prompt[1]"),
        ({"prompt": ["a", [1]]}, "prompt[1]"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": None}, "prompt"),
    ],
)
def test_a_bad_value_is_refused_by_its_field(change: dict[str, Any], field: str) -> None:
    assert field_of({"prompt": "a", **change}) == field


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        (None, "messages"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": 1}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "tool_calls": [{"type": "custom"}]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
    ],
)
def test_a_bad_message_is_refused_by_its_place(messages: Any, field: str) -> None:
    assert field_of({"messages": messages}, ChatRequest) == field


def test_a_missing_field_is_named() -> None:
    assert field_of({}) == "prompt"
    assert field_of({}, ChatRequest) == "messages"


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[1]", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    assert field_of(body) == "body"


@pytest.mark.parametrize("text", [r"\ud800", r"\udc00", r"a\\\ud83d", r"\ud83d\ude42\ud83d", r"\uD83D\u0041"])
def test_half_of_a_surrogate_pair_is_refused_in_its_field(text: str) -> None:
    assert field_of(b'{"user": "\\\\ud800", "prompt": "%b", "suffix": "b"}' % text.encode()) == "prompt"


def test_an_unknown_field_is_ignored_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    fields._logged_names.clear()
    for _ in range(2):
        assert (
            parse_request(b'{"prompt": "a", "temprature": 1}', CompletionRequest, "completions").prompt == "a"
        )
    assert [record.args for record in caplog.records] == [("/v1/completions", "temprature")]


def test_the_log_of_unknown_names_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    fields._logged_names.clear()
    for index in range(2 * fields.MAX_LOGGED_NAMES):
        body = msgspec.json.encode({"prompt": "a", f"{index}" + "x" * 1000: 1})
        parse_request(body, CompletionRequest, "completions")
    assert len(caplog.records) == len(fields._logged_names) == fields.MAX_LOGGED_NAMES
    assert max(map(len, fields._logged_names)) <= fields.MAX_LOGGED_CHARS


KINDS: dict[fields.Endpoint, tuple[type[Any], dict[str, Any]]] = {
    "completions": (CompletionRequest, {"prompt": "a"}),
    "chat": (ChatRequest, {"messages": []}),
    "tokenize": (TokenizeRequest, {"prompt": "a"}),
    "detokenize": (DetokenizeRequest, {"tokens": []}),
}


@pytest.mark.parametrize("endpoint", KINDS)
def test_the_table_has_the_fields_of_the_request_types(endpoint: fields.Endpoint) -> None:
    of_endpoint = [field for field in fields.FIELDS if endpoint in field.endpoints]
    names = [field.name for field in of_endpoint]
    assert len(names) == len(set(names)), "one rule for each field"
    implemented = {field.name for field in of_endpoint if field.status == "implemented"}
    assert implemented == set(KINDS[endpoint][0].__struct_fields__)


@pytest.mark.parametrize(
    ("endpoint", "field"),
    [(end, field) for field in fields.FIELDS if field.status == "refused" for end in field.endpoints],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_refused_field_is_named_and_its_neutral_values_are_accepted(
    endpoint: fields.Endpoint, field: fields.Field
) -> None:
    kind, body = KINDS[endpoint]
    for value in (None, *field.neutral):
        parse_request(msgspec.json.encode({**body, field.name: value}), kind, endpoint)
    for value in ("other", {"type": "json_object"}, ["x" * 1000]):
        with pytest.raises(UserError, match="is not supported") as refused:
            parse_request(msgspec.json.encode({**body, field.name: value}), kind, endpoint)
        assert refused.value.field == field.name
        assert field.note in str(refused.value)


@pytest.mark.parametrize(("name", "value"), [("length_penalty", True), ("use_beam_search", "false")])
def test_neutral_values_are_read_as_other_values_are(name: str, value: Any) -> None:
    parse_request(msgspec.json.encode({"prompt": "a", name: value}), CompletionRequest, "completions")


def test_an_enum_error_lists_the_allowed_values() -> None:
    for name, body, choices in (
        ("truncation_side", {"prompt": "a", "truncation_side": "up"}, "one of left, right"),
        ("reasoning_effort", {"messages": [], "reasoning_effort": "huge"}, "high, low, max, medium, minimal"),
    ):
        kind = ChatRequest if "messages" in body else CompletionRequest
        with pytest.raises(UserError, match=choices) as refused:
            decode_as(msgspec.json.encode(body), kind)
        assert refused.value.field == name


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_a_prompt_is_a_text_or_token_ids_or_a_list_of_either(prompt: Any, prompts: list[Any]) -> None:
    assert decode_as(json.dumps({"prompt": prompt}).encode(), CompletionRequest).prompts() == prompts


def test_text_parts_of_a_message_stay_parts() -> None:
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None},
        ]
    }
    request = decode_as(json.dumps(body).encode(), ChatRequest)
    assert plain_messages(request.messages) == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": []},
    ]


def test_keys_of_messages_and_tools_that_vllm_gives_to_templates_are_kept() -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True}, "defer_loading": False}
    body = {
        "messages": [
            {"role": "developer", "content": "a", "task": "t", "tools": [{"x": 1}]},
            {"role": "user", "content": "b", "tools": [{"x": 1}]},
        ],
        "tools": [tool],
    }
    request = decode_as(json.dumps(body).encode(), ChatRequest)
    assert plain_messages(request.messages) == [
        {"role": "developer", "content": "a", "task": "t", "tools": [{"x": 1}]},
        {"role": "user", "content": "b"},
    ]
    function = {"name": "f", "description": None, "parameters": None, "strict": True, "defer_loading": False}
    assert plain_tools(request.tools) == [{"type": "function", "function": function, "defer_loading": False}]


def test_missing_values_are_from_the_checkpoint_or_the_api() -> None:
    fields = SamplingFields(temperature=0.25)
    defaults = {"temperature": 0.9, "top_k": 20, "top_p": "nonsense"}
    params = fields.sampling_params(max_tokens=8, logprobs=None, vocab_size=10, defaults=defaults)
    assert (params.temperature, params.top_k, params.top_p) == (0.25, 20, 1.0)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
field_names = st.sampled_from(sorted(CompletionRequest.__struct_fields__))


@given(st.dictionaries(field_names, json_values, max_size=6))
def test_any_json_becomes_a_request_or_a_user_error(fields: dict[str, Any]) -> None:
    with suppress(UserError):
        admit(msgspec.json.encode({"prompt": "a", **fields}), CompletionRequest)
