"""The door of the server: bodies become typed requests, or a UserError that names the field."""

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import UserError
from baton.server.protocol.chat import ChatRequest, plain_messages
from baton.server.protocol.completion import CompletionRequest
from baton.server.protocol.parse import parse_body
from baton.server.protocol.sampling import SamplingFields

Request = CompletionRequest | ChatRequest


def admit(body: bytes, kind: type[Request]) -> None:
    """All that is checked of a body without an engine."""
    request: Request = parse_body(body, kind)
    if isinstance(request, CompletionRequest):
        request.prompts()
    else:
        plain_messages(request.messages)
    request.sampling_params(max_tokens=16, logprobs=None, vocab_size=100, defaults={})
    assert request.num_samples >= 1
    assert all(request.stop_strings)
    assert isinstance(request.checked_priority, int)
    assert request.checked_cache_salt != ""
    request.check_stream_options()


def field_of(body: dict[str, Any] | bytes, kind: type[Request] = CompletionRequest) -> str | None:
    """The field that is refused."""
    with pytest.raises(UserError) as refused:
        admit(body if isinstance(body, bytes) else json.dumps(body).encode(), kind)
    return refused.value.field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
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
        ({"stop": "a" * 257}, "stop"),
        ({"stop": 1}, "stop"),
        ({"stop_token_ids": [100]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"100": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"3": 101}}, "logit_bias.3"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"priority": 2**40}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
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
    ],
)
def test_a_bad_message_is_refused_by_its_place(messages: Any, field: str) -> None:
    assert field_of({"messages": messages}, ChatRequest) == field


def test_a_missing_field_is_named() -> None:
    assert field_of({}) == "prompt"
    assert field_of({}, ChatRequest) == "messages"


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[1]", b'{"prompt": "\\ud800"}', b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused_without_a_field(body: bytes) -> None:
    assert field_of(body) is None


def test_unknown_fields_are_ignored() -> None:
    assert parse_body(b'{"prompt": "a", "user": "me", "guided_json": {}}', CompletionRequest).prompt == "a"


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
    assert parse_body(json.dumps({"prompt": prompt}).encode(), CompletionRequest).prompts() == prompts


def test_text_parts_of_a_message_are_joined() -> None:
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None},
        ]
    }
    request = parse_body(json.dumps(body).encode(), ChatRequest)
    assert plain_messages(request.messages) == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": ""},
    ]


def test_what_a_request_leaves_open_comes_from_the_checkpoint_then_from_the_api() -> None:
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
