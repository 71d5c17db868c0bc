"""Errors, headers and counts of one request, by the events that its machine hears."""

from collections.abc import Sequence
from typing import Any

import pytest

from baton.router.request.answers import GIVEN_HEADER, LegAnswer
from baton.router.request.events import (
    ClientGone,
    Close,
    Closed,
    Count,
    Draining,
    Effect,
    Failed,
    Head,
    Leg,
    Opened,
    Over,
    Piece,
    Send,
    Stopped,
    StreamEnded,
    TakeBack,
)
from baton.router.request.learning import SAMPLE_CHUNKS
from baton.router.values.errors import LegFailure
from tests.router import machine_run

PROMPT = list(range(100))
RATE = 100.0  # Tokens a second.
JSON = {"content-type": "application/json"}
STREAM = {"content-type": "text/event-stream"}
CHUNK = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"text": "b", "finish_reason": "stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


class Run(machine_run.Run):
    """A request whose closed legs end at once."""

    def __init__(self, body: dict[str, Any] | None = None, **options: Any) -> None:
        asked = {"prompt": PROMPT, "max_tokens": 9, "temperature": 0} | (body or {})
        settings = {"policy": "round_robin", "hedge_prefill": False, **options}
        super().__init__(asked, rate=RATE, now_s=1.0, **settings)

    def on(self, event: Any, now_s: float = 2.0) -> Sequence[Effect]:
        new = super().on(event, now_s)
        for effect in new:
            if isinstance(effect, Close):
                self.on(Closed(effect.leg), now_s)
        return new

    def leg(self, role: str) -> Leg:
        """The last leg of this role."""
        return self.legs(role)[-1]

    def fail(self, role: str, kind: Any, now_s: float = 2.0) -> None:
        leg = self.leg(role)
        self.on(Failed(leg, LegFailure(kind, leg.engine.url, "why", was_sent=kind != "unreachable")), now_s)

    def prefill(self, now_s: float = 2.0) -> Leg:
        leg = self.leg("prefill")
        text = (
            '{"choices": [{"text": "a", "finish_reason": null}], "kv_transfer_params": {"baton_ticket": "t"}}'
        )
        self.on(Opened(leg, LegAnswer(200, JSON, text.encode())), now_s)
        return leg

    def open_stream(self, *events: bytes) -> Leg:
        leg = self.leg("decode")
        self.on(Opened(leg, LegAnswer(200, STREAM, b"".join(events), is_stream=True)))
        return leg

    def error(self) -> tuple[int, str]:
        (over,) = self.all(Over)
        assert over.error is not None
        return over.error.status, str(over.error)


LOCAL: dict[str, Any] = {"min_prefill_tokens": 1_000}  # Decode engines compute the prompt.


def test_a_client_that_leaves_is_counted_as_such() -> None:
    run = Run()
    run.on(ClientGone())
    (over,) = run.all(Over)
    assert (over.status, over.error) == (499, None)
    transfer_id = run.leg("prefill").body["kv_transfer_params"]["transfer_id"]
    assert [back.params for back in run.all(TakeBack)] == [{"transfer_id": transfer_id}]


def test_a_request_without_an_answer_is_told_that_the_router_stops() -> None:
    run = Run()
    run.on(Stopped())
    assert run.error() == (503, "the router is shutting down")


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("broken", (502, "the decode engine failed before the first byte of an answer")),
        ("unreachable", (502, "the decode engine failed before the first byte of an answer")),
        ("timeout", (504, "no decode engine answered in time")),
    ],
)
def test_the_error_of_the_last_decode_engine_is_the_clients(kind: str, error: tuple[int, str]) -> None:
    run = Run(num_decode=2, **LOCAL)
    first = run.leg("decode")
    run.fail("decode", kind)
    assert run.leg("decode").engine is not first.engine
    run.fail("decode", kind)
    assert run.error() == error
    assert run.counts("retries") == [("decode",)]
    assert sorted(run.counts("legs")) == [("decode", url, kind) for url in ("http://d0", "http://d1")]


def test_an_answer_that_is_too_large_is_asked_of_no_other_engine() -> None:
    run = Run(num_decode=2, **LOCAL)
    run.fail("decode", "too_large")
    status, text = run.error()
    assert status == 400
    assert text.startswith("the answer has over ")
    assert run.counts("retries") == []


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("broken", (502, "the prefill engine failed before the first byte of an answer")),
        ("timeout", (504, "no prefill engine answered in time")),
    ],
)
def test_the_error_of_the_last_prefill_engine_is_the_clients(kind: str, error: tuple[int, str]) -> None:
    run = Run(on_prefill_failure="fail")
    run.fail("prefill", kind)
    run.fail("prefill", kind)
    assert run.error() == error
    assert run.counts("retries") == [("prefill",)]


def test_a_prompt_that_no_prefill_engine_computes_is_counted_as_local() -> None:
    run = Run()
    run.fail("prefill", "broken")
    run.fail("prefill", "broken")
    assert run.counts("prefills") == [("local", "prefill_failed")]
    assert "baton_ticket" not in (run.leg("decode").body.get("kv_transfer_params") or {})


@pytest.mark.parametrize(("least", "role"), [(100, "prefill"), (101, "decode")])
def test_a_prompt_of_the_least_length_is_handed_over(least: int, role: str) -> None:
    run = Run(min_prefill_tokens=least)
    assert [leg.role for leg in run.all(Leg)] == [role]


def test_a_whole_answer_has_its_length_and_tells_where_its_prompt_was_computed() -> None:
    run = Run()
    run.prefill()
    body = b'{"choices": [{"text": "abc", "finish_reason": "stop"}]}'
    run.on(Opened(run.leg("decode"), LegAnswer(200, JSON, body)), 4.0)
    (head,), (sent,) = run.all(Head), run.all(Send)
    assert head.status == 200
    assert head.headers["content-length"] == str(len(sent.data))
    assert (head.headers["x-baton-prefill"], head.headers["x-request-id"]) == ("remote", "id")
    assert sent.is_last
    assert run.counts("prefills") == [("remote", "")]
    assert [count.value for count in run.all(Count) if count.metric == "first_byte_seconds"] == [3.0]
    (over,) = run.all(Over)
    assert (over.status, over.error) == (200, None)
    assert not any(engine.load or engine.num_queued_at for engine in run.fleet.engines)
    assert sorted(run.counts("legs")) == [("decode", "http://d0", "200"), ("prefill", "http://p1", "200")]


def test_predicted_times_are_corrected_by_the_times_that_prefills_take() -> None:
    run = Run()
    before_s = run.view.lateness.late_after_s(5.0)
    run.prefill(5.0)  # The prompt was expected to take 1 s, and took 4.
    assert run.view.lateness.late_after_s(5.0) == 4.0 * before_s


def test_a_refused_ticket_is_computed_by_the_same_engine_without_it() -> None:
    run = Run()
    run.prefill()
    refused = run.leg("decode")
    body = b'{"error": {"message": "no", "param": "kv_transfer_params.baton_ticket"}}'
    run.on(Opened(refused, LegAnswer(400, JSON, body)))
    again = run.leg("decode")
    assert again is not refused
    assert again.engine is refused.engine
    assert "baton_ticket" not in (again.body.get("kv_transfer_params") or {})
    assert run.counts("prefills") == [("remote", ""), ("local", "ticket_refused")]
    assert run.counts("handoffs") == [("http://p1", "http://d0", "refused")]
    assert len(run.all(TakeBack)) == 1


def streaming(**options: Any) -> Run:
    return Run({"stream": True}, **{**LOCAL, **options})


def test_a_stream_tells_where_its_prompt_was_computed() -> None:
    run = streaming()
    run.open_stream(CHUNK)
    (head,) = run.all(Head)
    assert head.headers["x-baton-prefill"] == "local"
    assert run.counts("prefills") == [("local", "short_prompt")]
    run.on(Piece(run.leg("decode"), LAST + DONE))
    run.on(StreamEnded(run.leg("decode")))
    assert b"".join(sent.data for sent in run.all(Send)).endswith(DONE)
    assert run.all(Send)[-1].is_last
    assert run.counts("legs") == [("decode", "http://d0", "200")]


@pytest.mark.parametrize(
    ("end", "error", "outcome"),
    [
        ("ended", "the decode engine ended the stream without [DONE]", "broken"),
        ("broken", "the decode engine failed in the middle of the answer (broken)", "broken"),
        ("timeout", "the decode engine failed in the middle of the answer (timeout)", "timeout"),
    ],
)
def test_a_stream_that_breaks_is_counted_and_reported(end: str, error: str, outcome: str) -> None:
    run = streaming(resumes=0)
    leg = run.open_stream(CHUNK)
    if end == "ended":
        run.on(StreamEnded(leg))
    else:
        run.fail("decode", end)
    assert error.encode() in run.all(Send)[-1].data
    assert run.all(Send)[-1].is_last
    assert run.counts("broken_streams") == [()]
    assert run.counts("legs") == [("decode", leg.engine.url, outcome)]
    (event,) = [one for one in run.fleet.roster.log.last() if one["kind"] == "broken_stream"]
    assert (event["engine"], event["why"], event["request_id"]) == (leg.engine.url, error, "id")


def test_the_steps_of_a_stream_are_samples_of_its_engines_speed() -> None:
    run = streaming()
    leg = run.open_stream(CHUNK)
    run.on(Piece(leg, CHUNK * SAMPLE_CHUNKS), 10.0)
    before = leg.num_chunks_before
    assert before >= SAMPLE_CHUNKS
    assert leg.num_chunks == 0
    run.on(Piece(leg, CHUNK * (SAMPLE_CHUNKS - 1)), 11.0)
    assert (leg.num_chunks_before, leg.num_chunks) == (before, SAMPLE_CHUNKS - 1)
    run.on(Piece(leg, CHUNK), 12.0)
    assert (leg.num_chunks_before, leg.num_chunks) == (before + SAMPLE_CHUNKS, 0)


def test_an_engine_that_drains_hands_its_stream_to_another_one() -> None:
    run = streaming(num_decode=2)
    leg = run.open_stream(b'data: {"choices": [{"text": "a", "token_ids": [5], "finish_reason": null}]}\n\n')
    run.fleet.drain(leg.engine, 9.0, is_leaving=False)
    run.on(Draining(leg))
    assert run.counts("resumed_streams") == [("planned",)]
    (event,) = [one for one in run.fleet.roster.log.last() if one["kind"] == "resume"]
    assert (event["engine"], event["why"], event["request_id"]) == (leg.engine.url, "it drains", "id")
    assert run.leg("decode").engine is not leg.engine


def test_a_stream_that_breaks_goes_on_at_another_engine() -> None:
    run = streaming(num_decode=2)
    leg = run.open_stream(b'data: {"choices": [{"text": "a", "token_ids": [5], "finish_reason": null}]}\n\n')
    run.fail("decode", "broken")
    assert run.counts("resumed_streams") == [("broken",)]
    assert run.leg("decode").engine is not leg.engine
    assert run.counts("broken_streams") == []
    again = run.leg("decode")
    run.on(Opened(again, LegAnswer(200, STREAM, b"", is_stream=True)))
    assert (
        again.engine.last_error
        == f"{again.engine.url}: it does not continue answers; it is of an older version"
    )


@pytest.mark.parametrize("resumes", [1, 2])
def test_a_stream_is_resumed_as_often_as_the_operator_allows(resumes: int) -> None:
    run = streaming(num_decode=4, resumes=resumes)
    run.open_stream(b'data: {"choices": [{"text": "a", "token_ids": [5], "finish_reason": null}]}\n\n')
    for _ in range(resumes):
        run.fail("decode", "broken")
        headers = {**STREAM, GIVEN_HEADER: "1"}
        run.on(Opened(run.leg("decode"), LegAnswer(200, headers, b"", is_stream=True)))
    run.fail("decode", "broken")
    assert run.counts("resumed_streams") == [("broken",)] * resumes
    assert run.counts("broken_streams") == [()]


def test_failures_count_for_the_model_that_the_request_names() -> None:
    run = Run({"model": "adapter"}, **LOCAL)
    engine = run.leg("decode").engine
    engine.names = ("m", "adapter")
    run.fail("decode", "broken")
    assert engine.answers["adapter"].tally(2.0, 10.0) == (1, 1)


@pytest.mark.parametrize(
    ("counts", "outcome"),
    [
        ("total=100; local=0; transferred=0", "computed"),
        ("total=100; local=0; transferred=99", "handed_over"),
        ("total=100; local=0; transferred=7", "handed_over"),
        ("total=100; local=96; transferred=0", None),  # D had it already.
        ("nonsense", None),
        ("", None),
    ],
)
def test_what_the_decode_engine_has_loaded_is_counted_for_the_pair(counts: str, outcome: str | None) -> None:
    run = Run()
    run.prefill()
    headers = {**JSON, "x-baton-prompt": counts}
    body = b'{"choices": [{"text": "abc", "finish_reason": "stop"}]}'
    run.on(Opened(run.leg("decode"), LegAnswer(200, headers, body)))
    assert run.counts("handoffs") == ([] if outcome is None else [("http://p1", "http://d0", outcome)])
    assert len(run.all(TakeBack)) == (outcome == "computed")


@pytest.mark.parametrize("is_longer", [False, True])
def test_a_prompt_that_is_too_long_for_the_prefill_engine_only_is_decoded(is_longer: bool) -> None:
    run = Run()
    leg = run.leg("prefill")
    leg.engine.max_model_len = 50
    run.fleet.engines[2].max_model_len = 500 if is_longer else 50
    run.on(Opened(leg, LegAnswer(400, JSON, b'{"error": {"message": "too long"}}')))
    if is_longer:
        assert run.counts("prefills") == [("local", "prefill_failed")]
        assert run.leg("decode").engine.url == "http://d0"
    else:
        assert [head.status for head in run.all(Head)] == [400]
        assert run.all(Send)[0].data == b'{"error": {"message": "too long"}}'


def test_an_answer_of_a_prefill_engine_that_is_no_json_is_a_failure() -> None:
    run = Run()
    leg = run.leg("prefill")
    run.on(Opened(leg, LegAnswer(200, JSON, b"no json")))
    assert leg.outcome == "broken"
    assert leg.is_broken
    assert leg.engine.last_error is not None
    assert leg.engine.last_error.startswith(f"{leg.engine.url}: ")
    assert "None" not in leg.engine.last_error
    assert run.leg("prefill").engine is not leg.engine


def test_a_push_opens_both_legs_at_once() -> None:
    run = Run(mode="push")
    assert {leg.role for leg in run.all(Leg)} == {"prefill", "decode"}
    assert run.counts("pushes") == [("at_once",)]


# --- First tokens that a prefill engine gives to the client ---------------------------------------------


def token(text: str, token_id: int, finish: str = "null", params: str = "null") -> bytes:
    choice = f'{{"text": "{text}", "token_ids": [{token_id}], "finish_reason": {finish}}}'
    return f'data: {{"choices": [{choice}], "kv_transfer_params": {params}}}\n\n'.encode()


TICKET = '{"baton_ticket": "t", "do_remote_prefill": true}'


def told_first(finish: str = "null") -> Run:
    """The prefill engine has given the first token."""
    run = Run({"stream": True})
    end = b"" if finish != "null" else DONE
    answer = LegAnswer(200, STREAM, token("a", 5, finish, TICKET) + end, is_stream=True)
    run.on(Opened(run.leg("prefill"), answer))
    return run


def test_the_client_gets_the_first_token_from_the_prefill_engine_and_the_rest_once() -> None:
    run = told_first()
    (head,) = run.all(Head)
    assert head.headers["x-baton-prefill"] == "remote"
    run.on(Opened(run.leg("decode"), LegAnswer(200, STREAM, token("a", 5) + token("b", 6), is_stream=True)))
    run.on(Piece(run.leg("decode"), LAST + DONE))
    run.on(StreamEnded(run.leg("decode")))
    text = b"".join(sent.data for sent in run.all(Send))
    assert [text.count(one) for one in (b'"a"', b'"b"')] == [1, 2]
    assert run.counts("first_tokens") == [("yes",)]
    assert run.counts("prefills") == [("remote", "")]


def test_an_engine_that_disagrees_about_the_first_token_breaks_the_stream() -> None:
    run = told_first()
    run.on(Opened(run.leg("decode"), LegAnswer(200, STREAM, token("X", 7), is_stream=True)))
    assert run.counts("first_tokens") == [("no",)]
    assert run.counts("broken_streams") == [()]
    assert b"the engines disagree about the first token" in run.all(Send)[-1].data
    assert b"X" not in b"".join(sent.data for sent in run.all(Send))


def test_a_prefill_engine_that_fails_after_the_last_token_breaks_the_stream() -> None:
    run = told_first('"stop"')
    run.fail("prefill", "broken")
    assert b'"the prefill engine failed at the end of the answer"' in run.all(Send)[-1].data
    assert run.all(Send)[-1].is_last
    assert run.counts("broken_streams") == [()]


def test_a_stream_is_told_that_the_router_stops() -> None:
    run = streaming()
    run.open_stream(CHUNK)
    run.on(Stopped())
    last = run.all(Send)[-1]
    assert last.is_last
    assert b"the router is shutting down" in last.data
    assert b"503" in last.data
    (over,) = run.all(Over)
    assert over.status == 200
