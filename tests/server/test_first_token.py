"""One answer from two engines: the streams of P and D, and how they fit together."""

from typing import Any

import httpx
import pytest

from tests.server.fakes import EOS, MAX_MODEL_LEN, ScriptedEngine, read_stream

P_LEG = {"do_remote_decode": True, "do_remote_prefill": False, "baton_first_token": True}
D_LEG = {
    "do_remote_prefill": True,
    "baton_ticket": "signed",
    "remote_engine_id": "p0",
    "baton_first_token": True,
}
LENT = {"baton_ticket": "signed"}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def chunks(http: httpx.Client, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    return read_stream(http, path, **{**({"prompt": "Say"} if path == "/v1/completions" else CHAT), **body})


def text_of(found: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in found for choice in chunk["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def test_p_ends_after_the_first_token_and_marks_the_answer_as_unfinished(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.transfer_params = LENT
    (chunk,) = chunks(http, max_tokens=9, kv_transfer_params=P_LEG)
    (choice,) = chunk["choices"]
    assert choice["text"] == "H"
    assert choice["token_ids"] == [ord("H")]
    assert choice["finish_reason"] is None
    assert chunk["kv_transfer_params"] == LENT
    assert engine.requests[0].sampling_params.max_tokens == 1
    assert engine.requests[0].kv_transfer_params == P_LEG


def test_the_chat_chunk_of_the_first_token_looks_as_in_the_middle_of_an_answer(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.transfer_params = LENT
    opening, chunk = chunks(http, "/v1/chat/completions", kv_transfer_params=P_LEG)
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    (whole_first,) = [c for c in chunks(http, "/v1/chat/completions") if text_of([c]) == "H"]
    assert chunk["choices"][0].pop("token_ids") == [ord("H")]
    assert chunk["choices"] == whole_first["choices"]


def test_whole_answers_are_handed_over_like_streams(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.transfer_params = LENT
    answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 9, "kv_transfer_params": P_LEG})
    assert answer.json()["choices"][0]["finish_reason"] is None
    assert answer.json()["kv_transfer_params"] == LENT


def test_an_answer_of_one_token_is_complete_and_lends_nothing(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    (chunk,) = chunks(http, max_tokens=1, kv_transfer_params=P_LEG)
    assert chunk["choices"][0]["finish_reason"] == "length"
    chunks(
        http,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "a" * (MAX_MODEL_LEN - 3)}],
        kv_transfer_params=P_LEG,
    )  # The prompt has as many tokens as the model supports.
    assert [request.kv_transfer_params for request in engine.requests] == [None, None]


def test_an_answer_that_d_has_room_for_needs_room_for_one_token_at_p(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    """P's pool may be smaller than D's."""
    engine.transfer_params = LENT
    for num_tokens in (MAX_MODEL_LEN - 9, MAX_MODEL_LEN - 1):
        (chunk,) = chunks(http, prompt="a" * num_tokens, max_tokens=20, kv_transfer_params=P_LEG)
        assert chunk["choices"][0]["finish_reason"] is None
        assert chunk["kv_transfer_params"] == LENT
    body = {"prompt": "a" * MAX_MODEL_LEN, "max_tokens": 20, "kv_transfer_params": P_LEG}
    assert http.post("/v1/completions", json=body).json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_end_of_ds_context_after_the_first_token_has_a_chunk_of_its_own(
    http: httpx.Client, path: str
) -> None:
    """P does not know D's context: both streams must show the same first token, without an end."""
    text = "a" * (MAX_MODEL_LEN - (1 if path == "/v1/completions" else 3))
    body = {"prompt": text, "messages": [{"role": "user", "content": text}], "max_tokens": 9}
    of_p = chunks(http, path, **body, kv_transfer_params=P_LEG)
    *of_d, end = chunks(http, path, **body, kv_transfer_params=D_LEG)
    for found in (of_p, of_d):
        (choice,) = found[-1]["choices"]
        assert (choice["token_ids"], choice["finish_reason"]) == ([ord("H")], None)
        assert text_of(found) == "H"
    assert (end["choices"][0]["finish_reason"], text_of([end])) == ("length", "")
    *_, whole = chunks(http, path, **body)
    assert (whole["choices"][0]["finish_reason"], text_of([whole])) == ("length", "H")


@pytest.mark.parametrize(
    ("first", "body", "stop_reason"),
    [("\0", {}, None), ("H", {"stop_token_ids": [ord("H")]}, ord("H")), ("H", {"stop": ["H"]}, "H")],
)
def test_a_first_token_that_ends_the_answer_ends_it_at_p(
    http: httpx.Client, engine: ScriptedEngine, first: str, body: dict[str, Any], stop_reason: Any
) -> None:
    assert EOS == 0
    engine.answer = f"{first}i"
    engine.transfer_params = LENT
    (chunk,) = chunks(http, max_tokens=9, kv_transfer_params=P_LEG, **body)
    (choice,) = chunk["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop_reason
    assert choice["text"] == ""
    assert "kv_transfer_params" not in chunk
    assert engine.taken_back == [LENT], "no engine continues it, so its KV must be taken back"


def test_what_continues_elsewhere_stays_lent(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.transfer_params = LENT
    chunks(http, max_tokens=9, kv_transfer_params=P_LEG)
    engine.answer = "\0"  # A proxy that asks for no first token always sends the second leg.
    leg = {"do_remote_decode": True}
    assert chunks(http, max_tokens=1, kv_transfer_params=leg)[-1]["kv_transfer_params"] == LENT
    assert engine.taken_back == []


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 5])
def test_stop_strings_count_at_p_exactly_when_they_would_in_the_whole_answer(
    http: httpx.Client, engine: ScriptedEngine, min_tokens: int
) -> None:
    body = {"max_tokens": 9, "min_tokens": min_tokens, "stop": ["H"]}
    (chunk,) = chunks(http, kv_transfer_params=P_LEG, **body)
    assert (chunk["choices"][0]["finish_reason"] == "stop") == (min_tokens <= 1)
    assert engine.requests[0].sampling_params.min_tokens == min(1, min_tokens)


@pytest.mark.parametrize("answer", ["Hello", "\u2001\u2002!", "\u2001\u2002\u2003\u2004"])
@pytest.mark.parametrize("stop", [[], ["He!"], ["Hel"], ["l"]])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_ps_first_chunk_and_ds_later_ones_are_the_text_of_one_engine(
    http: httpx.Client, engine: ScriptedEngine, answer: str, stop: list[str], path: str
) -> None:
    engine.answer = answer
    body = {"max_tokens": 9, "stop": stop}
    whole = chunks(http, path, **body)
    from_p = chunks(http, path, **body, kv_transfer_params=P_LEG)
    from_d = chunks(http, path, **body, kv_transfer_params=D_LEG)
    named = [i for i, chunk in enumerate(from_d) if "token_ids" in chunk["choices"][0]]
    assert len(named) == 1, "D names the ids of its first token, and no others"
    assert from_d[named[0]]["choices"] == from_p[-1]["choices"]
    joined = from_p + from_d[named[0] + 1 :]
    assert text_of(joined) == text_of(whole)
    assert joined[-1]["choices"][0]["finish_reason"] == whole[-1]["choices"][0]["finish_reason"]


def test_the_flag_must_be_a_bool_and_is_for_one_answer(http: httpx.Client, engine: ScriptedEngine) -> None:
    def refused(**body: Any) -> str:
        answer = http.post("/v1/completions", json={"prompt": "a", **body})
        assert answer.status_code == 400
        field: str = answer.json()["error"]["param"]
        return field

    assert refused(kv_transfer_params={"baton_first_token": 1}) == "kv_transfer_params.baton_first_token"
    assert refused(kv_transfer_params=D_LEG, n=2) == "kv_transfer_params.baton_first_token"
    assert not engine.requests


def test_without_a_transfer_the_flag_only_names_the_first_token(http: httpx.Client) -> None:
    found = chunks(http, max_tokens=3, kv_transfer_params={"baton_first_token": True})
    assert [chunk["choices"][0].get("token_ids") for chunk in found] == [[ord("H")], None, None]
    assert found[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("path", "logprobs"), [("/v1/completions", 1), ("/v1/chat/completions", True)])
@pytest.mark.parametrize("num_at_first", [2, 5])
def test_the_first_token_has_a_chunk_of_its_own(
    http: httpx.Client, engine: ScriptedEngine, path: str, logprobs: int, num_at_first: int
) -> None:
    """D may load the prompt with tokens of the answer, and report all of them at once."""
    engine.num_at_first = num_at_first
    found = chunks(http, path, max_tokens=5, logprobs=logprobs, kv_transfer_params={**D_LEG})
    named = [chunk for chunk in found if chunk["choices"][0].get("token_ids")]
    assert [chunk["choices"][0]["token_ids"] for chunk in named] == [[ord("H")]]
    assert text_of(named) == "H"
    assert text_of(found) == "Hello"
    assert found[-1]["choices"][0]["finish_reason"] == "length"
