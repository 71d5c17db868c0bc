"""`/v1/completions` over a scripted engine, through a real server and real sockets."""

from typing import Any

import httpx
import pytest

from baton.engine.api import SamplingParams
from baton.server.protocol.sampling import SamplingFields
from baton.server.tokens import bad_words_in_tokens
from tests.server.fakes import CharacterTokenizer, ScriptedEngine, read_stream


def post(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={"model": "toy", "prompt": "Say", "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    body_of_answer: dict[str, Any] = answer.json()
    return body_of_answer


def stream(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    return read_stream(http, "/v1/completions", **{"model": "toy", "prompt": "Say", **body})


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for event in events for c in event["choices"] if c["index"] == index)


def test_an_answer_has_text_finish_reason_and_usage(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.num_cached_tokens, engine.num_transferred_tokens = 2, 1
    answer = post(http, max_tokens=50)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "toy"
    assert answer["choices"] == [
        {"index": 0, "text": "Hello, world!", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 14,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 2, "transferred_tokens": 1},
    }


def test_the_default_is_sixteen_tokens(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.answer = "a" * 100
    assert post(http)["choices"][0]["text"] == "a" * 16
    assert post(http, max_tokens=3)["choices"][0]["finish_reason"] == "length"


def test_a_stream_shows_the_same_text_in_pieces(http: httpx.Client) -> None:
    events = stream(http, max_tokens=50)
    assert text_of(events) == "Hello, world!"
    assert len(events) == 14  # The end-of-sequence token has no text but a finish reason.
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 13 + ["stop"]
    assert all("usage" not in event for event in events)


def test_usage_comes_last_in_a_stream_that_asks_for_it(http: httpx.Client) -> None:
    *chunks, last = stream(http, max_tokens=4, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks] == [None] * 4
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (3, 4)


def test_n_samples_are_n_engine_requests_with_their_own_seeds(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.answer = lambda request: f"seed {request.sampling_params.seed}"
    answer = post(http, n=3, seed=7, max_tokens=50)
    assert [choice["text"] for choice in answer["choices"]] == ["seed 7", "seed 8", "seed 9"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == 3  # Once.
    assert len({request.request_id for request in engine.requests}) == 3
    events = stream(http, n=2, seed=1, max_tokens=50)
    assert [text_of(events, 0), text_of(events, 1)] == ["seed 1", "seed 2"]


def test_several_prompts_are_answered_in_their_order(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.answer = lambda request: "".join(map(chr, request.prompt_token_ids)).upper()
    answer = post(http, prompt=["ab", "cd"], n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["AB", "AB", "CD", "CD"]
    assert answer["usage"]["prompt_tokens"] == 4


def test_a_prompt_may_be_token_ids_and_is_echoed_as_text(http: httpx.Client, engine: ScriptedEngine) -> None:
    answer = post(http, prompt=[72, 105, 33], echo=True, max_tokens=50)
    assert engine.requests[0].prompt_token_ids == [72, 105, 33]
    assert answer["choices"][0]["text"] == "Hi!Hello, world!"
    assert text_of(stream(http, prompt="Hi ", echo=True, max_tokens=50)) == "Hi Hello, world!"


def test_a_stop_string_ends_the_text_and_the_engine_request(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    choice = post(http, stop=["wor", "zzz"], max_tokens=50)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Hello, ", "stop", "wor")
    assert engine.events[-1] == "0 aborted"
    shown = post(http, stop="wor", include_stop_str_in_output=True, max_tokens=50)["choices"][0]["text"]
    assert shown == "Hello, wor"


def test_text_that_may_become_a_stop_string_is_held_back_in_a_stream(http: httpx.Client) -> None:
    events = stream(http, stop=["lo, W"], max_tokens=50)  # Almost a stop string.
    assert [event["choices"][0]["text"] for event in events][:4] == ["H", "e", "l", "lo, w"]
    assert text_of(events) == "Hello, world!"


def test_stop_strings_respect_min_tokens(http: httpx.Client) -> None:
    assert post(http, stop="l", min_tokens=6, max_tokens=50)["choices"][0]["text"] == "Hello, wor"


def test_a_stop_token_is_named_and_not_shown_unless_asked_for(http: httpx.Client) -> None:
    choice = post(http, stop_token_ids=[ord("w")], max_tokens=50)["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("Hello, ", ord("w"))
    shown = post(http, stop_token_ids=[ord("w")], include_stop_str_in_output=True, max_tokens=50)
    assert shown["choices"][0]["text"] == "Hello, w"


def test_half_a_character_waits_for_the_other_half(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.answer = "a\u2001\u2002b\u2003"
    events = stream(http, max_tokens=5)
    assert [event["choices"][0]["text"] for event in events] == ["a", "€", "b", "\ufffd"]


def test_special_tokens_are_hidden_unless_asked_for(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.answer = "a\x01b"
    assert post(http)["choices"][0]["text"] == "ab"
    assert post(http, skip_special_tokens=False)["choices"][0]["text"] == "a<user>b"


def test_token_ids_are_returned_on_demand(http: httpx.Client) -> None:
    choice = post(http, max_tokens=3, return_token_ids=True)["choices"][0]
    assert choice["token_ids"] == [ord(c) for c in "Hel"]
    assert choice["prompt_token_ids"] == [ord(c) for c in "Say"]
    events = stream(http, max_tokens=3, stop=["Hellx"], return_token_ids=True)
    assert [event["choices"][0]["token_ids"] for event in events] == [[ord(c)] for c in "Hel"]
    assert ["prompt_token_ids" in event["choices"][0] for event in events] == [True, False, False]


def test_logprobs_are_parallel_lists(http: httpx.Client) -> None:
    logprobs = post(http, max_tokens=2, logprobs=3)["choices"][0]["logprobs"]
    assert logprobs == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -0.5],
        "tokens": ["H", "e"],
        "top_logprobs": [{"x": -0.25, "H": -0.5, "y": -9999.0}, {"x": -0.25, "e": -0.5, "y": -9999.0}],
    }
    chosen_only = post(http, max_tokens=1, logprobs=0)["choices"][0]["logprobs"]
    assert chosen_only["top_logprobs"] == [{"H": -0.5}]


def test_offsets_continue_from_chunk_to_chunk(http: httpx.Client) -> None:
    events = stream(http, max_tokens=3, logprobs=1)
    assert [event["choices"][0]["logprobs"]["text_offset"] for event in events] == [[0], [1], [2]]


def test_sampling_fields_reach_the_engine(http: httpx.Client, engine: ScriptedEngine) -> None:
    post(
        http,
        temperature=0.5,
        top_k=9,
        min_p=0.1,
        repetition_penalty=1.1,
        logit_bias={"65": 2},
        ignore_eos=True,
        priority=-3,
        cache_salt="pepper",
        session_id="talk",
        min_tokens=1,
    )
    request = engine.requests[0]
    params = request.sampling_params
    assert (params.temperature, params.top_k, params.min_p, params.repetition_penalty) == (0.5, 9, 0.1, 1.1)
    assert (params.logit_bias, params.ignore_eos, params.min_tokens) == ({65: 2.0}, True, 1)
    assert (request.priority, request.cache_salt, request.session_id) == (-3, "pepper", "talk")


def test_the_clients_request_id_names_the_answer_and_the_engine_never_sees_it_twice(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    for _ in range(2):
        answer = http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "mine"})
        assert answer.headers["x-request-id"] == "mine"
        assert answer.json()["id"] == "cmpl-mine"
    first, second = [request.request_id for request in engine.requests]
    assert first != second
    assert first.startswith("cmpl-mine-0-")


@pytest.mark.parametrize("bad", ["a b", "x" * 257, ""])
def test_a_bad_request_id_is_refused(http: httpx.Client, bad: str) -> None:
    answer = http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": bad})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Request-Id")


# --- Fields of vLLM ----------------------------------------------------------------------------------


def test_bans_reach_the_engine_as_tokens(http: httpx.Client, engine: ScriptedEngine) -> None:
    post(http, allowed_token_ids=[72, 5, 72], bad_words=["ab", " c", "ab"])
    params = engine.requests[0].sampling_params
    assert params.allowed_token_ids == (5, 72)
    # One token per character: the form with a space before is longer, so it is not added.
    assert params.bad_words_token_ids == ((97, 98), (99,))


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, "ay"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, "ay"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, "Sa"),
        ({"truncate_prompt_tokens": 3}, "Say"),
        ({"truncate_prompt_tokens": 200}, "Say"),
        ({"truncate_prompt_tokens": -1}, "Say"),
        ({"truncation_side": "right"}, "Say"),
    ],
)
def test_a_prompt_is_truncated(
    http: httpx.Client, engine: ScriptedEngine, fields: dict[str, Any], kept: str
) -> None:
    answer = post(http, echo=True, max_tokens=2, **fields)
    assert engine.requests[0].prompt_token_ids == [ord(c) for c in kept]
    assert answer["choices"][0]["text"] == kept + "He", "the echo must be the truncated prompt"
    assert answer["usage"]["prompt_tokens"] == len(kept)


def test_a_prompt_that_is_cut_to_the_context_leaves_room_for_one_token(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    post(http, prompt="a" * 500, truncate_prompt_tokens=-1, max_tokens=16)
    assert len(engine.requests[0].prompt_token_ids) == 199
    assert engine.requests[0].sampling_params.max_tokens == 1


def test_prompt_logprobs_are_those_of_vllm(http: httpx.Client, engine: ScriptedEngine) -> None:
    [choice] = post(http, max_tokens=1, prompt_logprobs=1, prompt="Say")["choices"]
    assert engine.requests[0].sampling_params.prompt_logprobs == 1
    assert choice["prompt_logprobs"] == [
        None,
        {
            "97": {"logprob": -0.5, "rank": 2, "decoded_token": "a"},
            "120": {"logprob": -0.25, "rank": 1, "decoded_token": "x"},
        },
        {
            "121": {"logprob": -0.5, "rank": 2, "decoded_token": "y"},
            "120": {"logprob": -0.25, "rank": 1, "decoded_token": "x"},
        },
    ]
    assert choice["logprobs"] is None
    assert "prompt_logprobs" not in post(http, max_tokens=1)["choices"][0]
    assert post(http, max_tokens=1, prompt_logprobs=0, prompt="S")["choices"][0]["prompt_logprobs"] == [None]


ECHOED = {
    "text_offset": [0, 1, 2, 3],
    "token_logprobs": [None, -0.5, -0.5, -0.5],
    "tokens": ["S", "a", "y", "H"],
    "top_logprobs": [None, {"x": -0.25, "a": -0.5}, {"x": -0.25, "y": -0.5}, {"x": -0.25, "H": -0.5}],
}


def test_an_echo_with_logprobs_begins_with_those_of_the_prompt(http: httpx.Client) -> None:
    [choice] = post(http, echo=True, logprobs=1, max_tokens=1)["choices"]
    assert choice["text"] == "SayH"
    assert choice["logprobs"] == ECHOED
    first, *_ = stream(http, echo=True, logprobs=1, max_tokens=3)
    assert (first["choices"][0]["text"], first["choices"][0]["logprobs"]) == ("SayH", ECHOED)
    offsets = [
        e["choices"][0]["logprobs"]["text_offset"] for e in stream(http, echo=True, logprobs=1, max_tokens=3)
    ]
    assert offsets == [[0, 1, 2, 3], [4], [5]]


def test_an_echo_of_ids_shows_special_tokens_as_vllm_does(http: httpx.Client) -> None:
    assert post(http, prompt=[72, 1, 105], echo=True, max_tokens=0)["choices"][0]["text"] == "H<user>i"


@pytest.mark.parametrize("logprobs", [None, 1])
def test_an_echo_of_no_tokens_is_the_prompt_alone(http: httpx.Client, logprobs: int | None) -> None:
    answer = post(http, echo=True, max_tokens=0, logprobs=logprobs)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Say", "length")
    assert answer["usage"]["completion_tokens"] == 1, "as in vLLM"
    if logprobs is not None:
        assert choice["logprobs"] == {key: value[:3] for key, value in ECHOED.items()}
    [event] = stream(http, echo=True, max_tokens=0)
    assert event["choices"][0]["text"] == "Say"


def test_an_echo_with_token_ids_has_no_text(http: httpx.Client) -> None:
    [choice] = post(http, echo=True, max_tokens=1, return_token_ids=True)["choices"]
    assert choice["text"] == "H"
    assert choice["prompt_token_ids"] == [ord(c) for c in "Say"]


def test_logprobs_show_tokens_as_ids_on_demand(http: httpx.Client) -> None:
    [choice] = post(http, max_tokens=1, logprobs=1, return_tokens_as_token_ids=True)["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:72"]
    assert choice["logprobs"]["top_logprobs"] == [{"token_id:120": -0.25, "token_id:72": -0.5}]


def test_usage_comes_with_every_chunk_on_demand(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = stream(http, max_tokens=3, stream_options=options)
    assert [chunk["usage"] for chunk in chunks] == [
        {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count} for count in (1, 2, 3)
    ]
    assert last["usage"]["total_tokens"] == 6
    without = stream(http, max_tokens=3, stream_options={"continuous_usage_stats": True})
    assert all("usage" not in chunk for chunk in without), "as in vLLM, include_usage has to be set too"


def test_a_bad_word_is_also_banned_with_a_space_before_it_if_that_takes_no_more_tokens() -> None:
    ids = {
        "the": [1],
        " the": [2],
        "do": [3, 4],
        " do": [5, 4],
        "as": [6],
        " as": [7, 6],
        "be": [8, 9],
        " be": [8, 9],
    }

    class Words(CharacterTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            assert not add_special_tokens
            return ids[text]

    words = ["the", " the", "do", "as", "be"]
    assert bad_words_in_tokens(words, Words()) == ((1,), (2,), (3, 4), (5, 4), (6,), (8, 9))


def test_the_lists_of_a_request_are_checked_once_for_all_its_prompts(
    http: httpx.Client, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []
    of_sampling = SamplingFields.sampling_params

    def count(fields: SamplingFields, **arguments: Any) -> SamplingParams:
        checked.append(arguments["max_tokens"])
        return of_sampling(fields, **arguments)

    monkeypatch.setattr(SamplingFields, "sampling_params", count)
    prompts = ["a" * 190, "a" * 195, "a"]
    post(http, prompt=prompts, n=2, max_tokens=20, truncate_prompt_tokens=196, logit_bias={"5": 1})
    assert checked == [10]
    requests = sorted(engine.requests, key=lambda request: request.request_id)
    assert [request.sampling_params.max_tokens for request in requests] == [10, 10, 5, 5, 20, 20]
