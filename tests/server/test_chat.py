"""`/v1/chat/completions` over a scripted engine."""

import json
from typing import Any

import httpx

from tests.server.fakes import ScriptedEngine, read_stream

ASK = [{"role": "user", "content": "Hi"}]
PROMPT = [1, ord("H"), ord("i"), 2]


def post(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/chat/completions", json={"model": "toy", "messages": ASK, **body})
    assert answer.status_code == 200, answer.text
    body_of_answer: dict[str, Any] = answer.json()
    return body_of_answer


def stream(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    return read_stream(http, "/v1/chat/completions", messages=ASK, **body)


def refusal(http: httpx.Client, **body: Any) -> tuple[int, str | None]:
    answer = http.post("/v1/chat/completions", json={"messages": ASK, **body})
    return answer.status_code, answer.json()["error"]["param"]


def test_an_answer_is_a_message_of_the_assistant(http: httpx.Client, engine: ScriptedEngine) -> None:
    answer = post(http)
    assert engine.requests[0].prompt_token_ids == PROMPT
    assert engine.requests[0].sampling_params.max_tokens == 200 - 4, "it may fill the context"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world!", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == 4


def test_the_new_name_of_max_tokens_takes_precedence(http: httpx.Client) -> None:
    assert post(http, max_tokens=5, max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    assert post(http, max_tokens=5)["usage"]["completion_tokens"] == 5
    assert refusal(http, max_completion_tokens=500) == (400, "max_completion_tokens")
    assert refusal(http, max_tokens=0) == (400, "max_tokens")


def test_a_stream_opens_with_the_role_of_each_choice(http: httpx.Client) -> None:
    events = stream(http, n=2, max_tokens=2, return_token_ids=True)
    for index in range(2):
        deltas = [c["delta"] for event in events for c in event["choices"] if c["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == "He"
    reasons = [c["finish_reason"] for event in events for c in event["choices"]]
    assert sorted(reason for reason in reasons if reason) == ["length", "length"]
    assert events[0]["prompt_token_ids"] == PROMPT
    assert sum("prompt_token_ids" in event for event in events) == 1


def test_usage_comes_last_in_a_stream_that_asks_for_it(http: httpx.Client) -> None:
    *chunks, last = stream(http, max_tokens=2, stream_options={"include_usage": True})
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 2)


def test_logprobs_are_a_list_of_tokens(http: httpx.Client) -> None:
    answer = post(http, max_tokens=1, logprobs=True, top_logprobs=2)
    assert answer["choices"][0]["logprobs"]["content"] == [
        {
            "token": "H",
            "logprob": -0.5,
            "bytes": [72],
            "top_logprobs": [
                {"token": "x", "logprob": -0.25, "bytes": [120]},
                {"token": "H", "logprob": -0.5, "bytes": [72]},
            ],
        }
    ]
    assert (
        post(http, max_tokens=1, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    )
    events = stream(http, max_tokens=2, logprobs=True)
    tokens = [c["logprobs"]["content"][0]["token"] for e in events for c in e["choices"] if c["logprobs"]]
    assert tokens == ["H", "e"]


def test_top_logprobs_need_logprobs(http: httpx.Client) -> None:
    assert refusal(http, top_logprobs=2) == (400, "top_logprobs")
    assert refusal(http, logprobs=True, top_logprobs=21) == (400, "top_logprobs")


def test_unsupported_fields_that_change_the_answer_are_refused(http: httpx.Client) -> None:
    assert refusal(http, tools=[{"type": "function"}]) == (400, "tools[0].function")
    assert refusal(http, chat_template="{{ x }}") == (400, "chat_template")
    assert refusal(http, chat_template_kwargs={"messages": []}) == (400, "chat_template_kwargs.messages")
    assert post(http, tools=[], response_format={"type": "text"})["choices"]


def test_a_template_may_refuse_a_conversation(http: httpx.Client) -> None:
    assert refusal(http, messages=[{"role": "pirate", "content": "Arr"}]) == (400, "messages")


# --- Fields of vLLM ----------------------------------------------------------------------------------


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def given_to_template(http: httpx.Client, path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    variables = {"shows_input": True, **body.pop("chat_template_kwargs", {})}
    answer = http.post(path, json={"messages": ASK, **body, "chat_template_kwargs": variables})
    message = answer.json()["error"]["message"]
    given: dict[str, Any] = json.loads(message[message.index("{") :])
    return given


def test_history_with_tools_and_reasoning_reaches_the_template(http: httpx.Client) -> None:
    history = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "user", "content": "c", "tool_call_id": "of tools only", "name": "me"},
    ]
    given = given_to_template(
        http, messages=history, tools=[TOOL], documents=[{"title": "t", "text": "d"}], tool_choice="auto"
    )
    assert given["messages"] == [
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {"x": 1}}}],
            "reasoning": "hm",
            "reasoning_content": "hm",
        },
        {"role": "user", "content": "c", "name": "me"},
    ]
    function = {"name": "f", "description": None, "parameters": {"type": "object"}}
    assert given["tools"] == [{"type": "function", "function": function}]
    assert given["documents"] == [{"title": "t", "text": "d"}]
    call = given["messages"][1]["tool_calls"][0]
    assert (list(call), list(call["function"])) == (["id", "function", "type"], ["arguments", "name"]), (
        "as vLLM"
    )


def test_reasoning_effort_reaches_the_template(http: httpx.Client) -> None:
    given = given_to_template(http, reasoning_effort="high")
    assert (given["reasoning_effort"], given["enable_thinking"]) == ("high", True)
    assert given_to_template(http, reasoning_effort="none")["enable_thinking"] is False
    chosen = given_to_template(http, reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
    assert chosen["enable_thinking"] is False


def test_a_chat_is_truncated_with_its_template(http: httpx.Client, engine: ScriptedEngine) -> None:
    post(http, truncate_prompt_tokens=2, max_tokens=1)
    assert engine.requests[0].prompt_token_ids == PROMPT[-2:]


def test_prompt_logprobs_of_a_chat_belong_to_the_answer(http: httpx.Client) -> None:
    answer = post(http, prompt_logprobs=0, max_tokens=1, n=2)
    assert [entry and list(entry) for entry in answer["prompt_logprobs"]] == [
        None,
        *([str(token)] for token in PROMPT[1:]),
    ]
    assert answer["prompt_logprobs"][3]["2"]["decoded_token"] == "<assistant>"


def test_logprobs_show_tokens_as_ids_on_demand(http: httpx.Client) -> None:
    answer = post(http, max_tokens=1, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    [entry] = answer["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:72", [72])
    assert entry["top_logprobs"][0]["token"] == "token_id:120"


def test_usage_comes_with_every_chunk_on_demand(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = stream(http, max_tokens=2, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {4}
    assert last["usage"]["completion_tokens"] == 2


def test_tools_of_a_tokenize_request_reach_the_template(http: httpx.Client) -> None:
    given = given_to_template(http, "/tokenize", tools=[TOOL])
    assert given["tools"][0]["function"]["name"] == "f"
