"""The official client works with the server."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.server.fakes import WAIT_S, LiveServer, ScriptedEngine


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", timeout=WAIT_S, max_retries=0) as client:
        yield client


def test_it_completes(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.num_cached_tokens = 2
    answer = client.completions.create(model="toy", prompt="Say", max_tokens=50, n=2, logprobs=2)
    assert [choice.text for choice in answer.choices] == ["Hello, world!"] * 2
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens is not None
    assert "".join(answer.choices[0].logprobs.tokens[:13]) == "Hello, world!"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_it_streams_completions(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="toy", prompt="Say", max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "Hello"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def test_it_chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=2, stop="w"
    )
    assert answer.choices[0].message.content == "Hello, "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


def test_it_passes_vllms_extensions_through(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.transfer_params = {"baton_ticket": "t"}
    answer = client.completions.create(
        model="toy",
        prompt=[1, 2, 3],
        max_tokens=1,
        extra_body={"kv_transfer_params": {"do_remote_decode": True}, "top_k": 3},
    )
    assert engine.requests[0].kv_transfer_params == {"do_remote_decode": True}
    assert engine.requests[0].sampling_params.top_k == 3
    assert answer.model_dump()["kv_transfer_params"] == {"baton_ticket": "t"}


def test_it_parses_our_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="toy", prompt="a", temperature=1000)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")


def test_tokenize_and_back(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "Hi"}).json()
    assert answer == {"count": 2, "max_model_len": 200, "tokens": [72, 105]}
    assert http.post("/detokenize", json={"tokens": [72, 105, 0]}).json() == {"prompt": "Hi<eos>"}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert chat["tokens"] == [1, 72, 105, 2]
    assert http.post("/tokenize", json={}).json()["error"]["param"] == "prompt"
    assert http.post("/detokenize", json={"tokens": [-1]}).json()["error"]["param"] == "tokens[0]"


def test_a_long_text_is_encoded_off_the_event_loop_and_equally(http: httpx.Client) -> None:
    text = "ab" * 6000
    assert http.post("/tokenize", json={"prompt": text}).json()["tokens"] == [97, 98] * 6000


def test_it_sends_a_history_with_tool_calls_and_gets_calls_as_text(
    client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    call = '<tool_call>{"name": "add"}</tool_call>'
    engine.answer = call
    answer = client.chat.completions.create(
        model="toy",
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
                ],
            },
        ],
        tools=[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
        tool_choice="auto",
        parallel_tool_calls=False,
        reasoning_effort="low",
    )
    assert answer.choices[0].message.content == call
    assert answer.choices[0].message.tool_calls is None
