"""Rules of vLLM's server: lax numbers and booleans, lengths, messages of a developer, values that are cut."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs
from pydantic import TypeAdapter, ValidationError

from baton.core.errors import UserError
from baton.engine.text.chat_template import ChatTemplate
from baton.http.lax_values import as_lax
from baton.server.protocol.chat import ChatRequest, plain_messages
from baton.server.protocol.completion import CompletionRequest
from baton.server.protocol.parse import MAX_LAX_BYTES, parse_request
from tests.server.fakes import (
    MAX_MODEL_LEN,
    LiveServer,
    ScriptedEngine,
    model_config,
    read_stream,
    router_before,
)
from tests.server.test_templates import TAGGED

PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Say"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Sa"}]},
}


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


# --- Lax values ---------------------------------------------------------------------------------------

texts = (
    st.from_regex(r"[ \n]?[+-]?[0-9_]{0,4}(\.[0-9_]{0,2})?(e[+-]?[0-9])?[ \n]?", fullmatch=True)
    | st.sampled_from(["true", "false", "True", "FALSE", "t", "F", "yes", "No", "y", "n", "on", "OFF"])
    | st.sampled_from(["1", "0", "nan", "inf", "-Infinity", "٣", "0x1", "1__0"])
    | st.text(max_size=4)
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 2)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.integers(-(2**53), 2**53).map(float)
    | texts
)


@given(scalars, st.sampled_from([int, float, bool]))
@example("9" * 5000, int)
@example("\xa03", int)
def test_a_scalar_is_read_as_by_pydantic(value: Any, kind: type) -> None:
    got = as_lax(value, kind)
    try:
        expected = TypeAdapter(kind).validate_python(value)
    except ValidationError:
        expected = value
    if expected in (float("inf"), float("-inf")) or expected != expected:
        expected = value  # JSON has no number for it.
    if isinstance(value, float) and kind is int and abs(value) >= 2**63:
        return  # No field takes such an integer.
    assert (got, type(got)) == (expected, kind if expected is not value else type(value)) or (
        kind is float and type(value) is int and got == expected
    )


LAX: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_tokens": "3", "min_tokens": 2.0, "n": True}, {"max_tokens": 3, "min_tokens": 2, "n": 1}),
    ({"temperature": "0.5", "top_p": True}, {"temperature": 0.5, "top_p": 1.0}),
    (
        {"stream": "false", "echo": 1, "ignore_eos": "Yes"},
        {"stream": False, "echo": True, "ignore_eos": True},
    ),
    ({"logprobs": True}, {"logprobs": 1}),
    ({"stop_token_ids": ["5", 6.0]}, {"stop_token_ids": [5, 6]}),
    ({"logit_bias": {"7": "1e1"}}, {"logit_bias": {"7": 10}}),
    ({"stream_options": {"include_usage": "on"}}, {"stream_options": {"include_usage": True}}),
    ({"prompt": [1.0, 2]}, {"prompt": [1, 2]}),
    ({"prompt": [["1", 2]]}, {"prompt": [[1, 2]]}),
]
SAME: list[dict[str, Any]] = [{"prompt": ["1"]}, {"prompt": "1", "stop": "2", "cache_salt": "3", "user": 4}]
REFUSED: list[dict[str, Any]] = [
    {"max_tokens": 3.5},
    {"max_tokens": "null"},
    {"max_tokens": "x"},
    {"temperature": "nan"},
    {"stream": 2},
    {"stop": 1},
    {"cache_salt": 1},
    {"stop_token_ids": ["5"] * MAX_LAX_BYTES},
]


def parsed(fields: dict[str, Any]) -> CompletionRequest:
    return parse_request(json.dumps({"prompt": "a", **fields}).encode(), CompletionRequest, "completions")


@pytest.mark.parametrize(("lax", "strict"), LAX)
def test_lax_values_mean_their_strict_ones(lax: dict[str, Any], strict: dict[str, Any]) -> None:
    assert parsed(lax) == parsed(strict)


@pytest.mark.parametrize("fields", SAME)
def test_texts_of_digits_stay_texts(fields: dict[str, Any]) -> None:
    request = parsed({**fields, "max_tokens": "1"})
    assert request == parsed({**fields, "max_tokens": 1})
    assert all(getattr(request, name, None) in (value, None) for name, value in fields.items())


@pytest.mark.parametrize("fields", REFUSED)
def test_values_that_pydantic_refuses_are_named(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError) as refused:
        parsed(fields)
    assert refused.value.field is not None
    assert refused.value.field.partition("[")[0] in fields


def test_a_chats_logprobs_may_be_a_number() -> None:
    body = json.dumps({"messages": [], "logprobs": 1, "max_tokens": "2"}).encode()
    request = parse_request(body, ChatRequest, "chat")
    assert (request.logprobs, request.max_tokens) == (True, 2)


@pytest.mark.parametrize("is_routed", [False, True], ids=["engine", "router"])
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_lax_values_work_through_a_router(
    live: LiveServer, path: str, *, is_stream: bool, is_routed: bool
) -> None:
    fields = {"max_tokens": "3", "temperature": "0", "n": "1", "priority": "2", "ignore_eos": "true"}
    body = {**PATHS[path], **fields, "stream": str(is_stream).lower()}

    def ask(http: httpx.Client) -> str:
        if is_stream:
            choices = [choice for event in read_stream(http, path, **body) for choice in event["choices"]]
        else:
            choices = http.post(path, json=body).raise_for_status().json()["choices"]
        return "".join(
            one["text"] if "text" in one else one.get("message", one.get("delta"))["content"]
            for one in choices
            if "text" in one or "content" in one.get("message", one.get("delta"))
        )

    if is_routed:
        with router_before(live) as router, router.client() as http:
            assert ask(http) == "Hel"
    else:
        with live.client() as http:
            assert ask(http) == "Hel"


# --- Lengths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_limit_beyond_the_room_is_cut_to_it(
    http: httpx.Client, engine: ScriptedEngine, path: str, *, is_stream: bool
) -> None:
    for asked, given_to_engine in ((MAX_MODEL_LEN, 197 if path == "/v1/completions" else 196), (5, 5)):
        body = {**PATHS[path], "max_tokens": asked}
        if is_stream:
            read_stream(http, path, **body)
        else:
            http.post(path, json=body).raise_for_status()
        assert engine.requests[-1].sampling_params.max_tokens == given_to_engine


def test_a_limit_above_the_models_length_is_refused(http: httpx.Client, path: str) -> None:
    for name in ("max_tokens", "max_completion_tokens") if "chat" in path else ("max_tokens",):
        answer = http.post(path, json={**PATHS[path], name: MAX_MODEL_LEN + 1})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == name
        assert "cannot be greater than max_model_len=200" in error["message"]


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("factor", [1, 1000], ids=["tokens", "characters"])
def test_a_prompt_beyond_the_context_is_told_as_clients_expect(
    http: httpx.Client, engine: ScriptedEngine, path: str, factor: int, *, is_stream: bool
) -> None:
    text = "a" * (MAX_MODEL_LEN * factor)
    body = (
        {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    )
    answer = http.post(path, json={**body, "stream": is_stream})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] in ("prompt", "messages")
    told = "This model's maximum context length is 200 tokens. However, your prompt contains "
    assert error["message"].startswith(told)
    assert engine.requests == []


def test_a_checkpoints_limit_is_that_of_a_chat_without_one(live: LiveServer, engine: ScriptedEngine) -> None:
    path = "/v1/chat/completions"
    generation = {**model_config().generation_config, "max_new_tokens": 7}
    service = live.service
    before = service.model_config
    service.model_config = structs.replace(before, generation_config=generation)
    try:
        with live.client() as http:
            for fields, expected in (({}, 7), ({"max_tokens": 9}, 9)):
                http.post(path, json={**PATHS[path], **fields}).raise_for_status()
                assert engine.requests[-1].sampling_params.max_tokens == expected
    finally:
        service.model_config = before


# --- Messages of a developer --------------------------------------------------------------------------

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
DEVELOPER = {"role": "developer", "content": "Use metres.", "tools": [{"x": 1}]}
ROLES = "{% for m in messages %}<{{ m.role }}{{ ' tools' if m.tools else '' }}>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([DEVELOPER, USER], "<system>Use metres.<user>Hi"),
        ([SYSTEM, DEVELOPER, USER], "<system>Be brief.\n\nUse metres.<user>Hi"),
        ([USER, DEVELOPER, USER], "<system>Use metres.<user>Hi<user>Hi"),
        ([USER, {**DEVELOPER, "content": ""}], "<system><user>Hi"),
        ([SYSTEM, USER, SYSTEM], "<system>Be brief.<user>Hi<system>Be brief."),
    ],
)
def test_a_developers_message_becomes_one_of_the_system(messages: list[Any], expected: str) -> None:
    assert ChatTemplate(ROLES, {}).render(messages, add_generation_prompt=False) == expected


def test_a_template_that_knows_developers_gets_their_messages() -> None:
    template = ChatTemplate(ROLES + "{# 'developer' #}", {})
    expected = "<developer tools>Use metres.<user>Hi"
    assert template.render([DEVELOPER, USER], add_generation_prompt=False) == expected
    assert "Use metres." in ChatTemplate(TAGGED, {"bos_token": ""}).render(
        [DEVELOPER, USER], add_generation_prompt=True
    )


BILLING = "x-anthropic-billing-header: cch=1"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (f"{BILLING}\nBe brief", "Be brief"),
        (BILLING, []),
        ([{"type": "text", "text": BILLING}, {"type": "text", "text": "a"}], [{"type": "text", "text": "a"}]),
    ],
)
def test_claude_codes_header_is_no_part_of_the_prompt(content: Any, expected: Any) -> None:
    def plain(role: str) -> Any:
        body = {"messages": [{"role": role, "content": content}]}
        return plain_messages(parse_request(json.dumps(body).encode(), ChatRequest, "chat").messages)[0][
            "content"
        ]

    assert plain("system") == expected
    assert plain("user") == content


# --- Single values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model": ""}, {}),
        ({"stream_options": {}}, {}),
        ({"temperature": 0.001}, {"temperature": 0.01}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"logit_bias": {"5": 1000, " 6": -1000, "+7": 1}}, {"logit_bias": {5: 100.0, 6: -100.0, 7: 1.0}}),
    ],
)
def test_values_are_taken_as_in_vllm(
    http: httpx.Client, engine: ScriptedEngine, path: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    http.post(path, json={**PATHS[path], **fields}).raise_for_status()
    params = engine.requests[-1].sampling_params
    assert {name: getattr(params, name) for name in expected} == expected


def test_counts_of_zero_ask_for_nothing(http: httpx.Client, path: str) -> None:
    read_stream(http, path, **PATHS[path], prompt_logprobs=0)
    http.post(path, json={**PATHS[path], "top_logprobs": 0}).raise_for_status()


def test_an_echo_needs_no_tokens_but_not_less(http: httpx.Client) -> None:
    for limit, status in ((0, 200), (-1, 400)):
        body = {"prompt": "Say", "echo": True, "max_tokens": limit}
        assert http.post("/v1/completions", json=body).status_code == status
