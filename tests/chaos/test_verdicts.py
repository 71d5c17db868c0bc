"""Verdicts and counts of answers read from HTTP bodies and SSE events."""

import json

import pytest

from lab.chaos.answers import Answer, read_body, read_event
from lab.chaos.cell import Record
from lab.chaos.verdicts import LOGPROB_DIFFERENCE_MAX, count, verdict_on

EXPECTED = Answer(
    question=0, started_s=0.0, token_ids=[5, 6, 7], logprobs=[-0.1, -0.2, -0.3], text="abc", is_complete=True
)


def answer(**fields: object) -> Answer:
    right: dict[str, object] = {
        "question": 0,
        "started_s": 1.0,
        "ended_s": 2.0,
        "status": 200,
        "token_ids": [5, 6, 7],
        "logprobs": [-0.1, -0.2, -0.3],
        "text": "abc",
        "is_complete": True,
    }
    return Answer(**{**right, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({}, "right"),
        ({"logprobs": [-0.1, -0.2, -0.3 - LOGPROB_DIFFERENCE_MAX / 2]}, "right"),
        ({"logprobs": [-0.1, -0.2, -0.3 - LOGPROB_DIFFERENCE_MAX * 2]}, "wrong"),
        ({"logprobs": []}, "wrong"),
        ({"token_ids": [5, 6, 8]}, "wrong"),
        ({"token_ids": [5, 6]}, "wrong"),
        ({"token_ids": [5, 6, 7, 8]}, "wrong"),
        ({"text": "abd"}, "wrong"),
        ({"is_complete": False, "token_ids": [5], "text": "a", "logprobs": [-0.1]}, "unclear"),
        (
            {"is_complete": False, "token_ids": [5], "text": "a", "logprobs": [], "error": "died"},
            "clear error",
        ),
        ({"is_complete": False, "token_ids": [6], "text": "a", "logprobs": [], "error": "died"}, "wrong"),
        ({"is_complete": False, "error": "died", "failure": "ReadError"}, "unclear"),
        ({"is_complete": False, "failure": "ReadError"}, "unclear"),
        ({"is_complete": False, "is_hung": True}, "hung"),
        ({"is_complete": False, "was_left": True}, "left"),
        ({"is_complete": False, "was_left": True, "token_ids": [9]}, "wrong"),
    ],
)
def test_the_verdict_compares_an_answer_with_the_single_engines(
    fields: dict[str, object], verdict: str
) -> None:
    assert verdict_on(answer(**fields), EXPECTED) == verdict


def test_a_streams_events_are_joined() -> None:
    streamed = Answer(question=0, started_s=0.0, status=200)
    events: list[object] = [
        {"choices": [{"text": "a", "token_ids": [5], "logprobs": {"token_logprobs": [-0.1]}}]},
        {"choices": [{"text": "bc", "token_ids": [6, 7], "logprobs": {"token_logprobs": [-0.2, -0.3]}}]},
        {"choices": [], "usage": {"completion_tokens": 3}},
    ]
    for event in events:
        read_event(streamed, f"data: {json.dumps(event)}")
        read_event(streamed, "")
    assert verdict_on(streamed, EXPECTED) == "unclear"
    read_event(streamed, "data: [DONE]")
    assert verdict_on(streamed, EXPECTED) == "right"


def test_a_chat_streams_events_are_joined() -> None:
    streamed = Answer(question=0, started_s=0.0, status=200)
    contents = ({"role": "assistant"}, {"content": "a"}, {"content": "bc"})
    for delta, ids, logprobs in zip(contents, ([], [5], [6, 7]), ([], [-0.1], [-0.2, -0.3]), strict=True):
        content = [{"logprob": logprob} for logprob in logprobs]
        choice = {"delta": delta, "token_ids": ids, "logprobs": {"content": content}}
        read_event(streamed, f"data: {json.dumps({'choices': [choice]})}")
    read_event(streamed, "data: [DONE]")
    assert verdict_on(streamed, EXPECTED) == "right"


@pytest.mark.parametrize(
    ("status", "body", "verdict"),
    [
        (503, b'{"error": {"message": "draining", "type": "x"}}', "clear error"),
        (503, b'{"error": {"message": ""}}', "unclear"),
        (503, b'{"detail": "not found"}', "unclear"),
        (500, b"Internal Server Error", "unclear"),
        (500, b"[1]", "unclear"),
        (
            200,
            b'{"choices": [{"message": {"content": "abc"}, "token_ids": [5, 6, 7], "logprobs": '
            b'{"content": [{"logprob": -0.1}, {"logprob": -0.2}, {"logprob": -0.3}]}}]}',
            "right",
        ),
    ],
)
def test_only_an_error_with_a_message_in_openais_form_is_clear(
    status: int, body: bytes, verdict: str
) -> None:
    got = Answer(question=0, started_s=0.0, status=status)
    read_body(got, body)
    assert verdict_on(got, EXPECTED) == verdict


def test_a_stream_that_ends_in_an_error_event_is_clear_and_done_does_not_complete_it() -> None:
    streamed = Answer(question=0, started_s=0.0, status=200)
    read_event(streamed, 'data: {"choices": [{"text": "a", "token_ids": [5]}]}')
    read_event(streamed, 'data: {"error": {"message": "the engine died"}}')
    read_event(streamed, "data: [DONE]")
    assert verdict_on(streamed, EXPECTED) == "clear error"


def test_counts_of_a_cell() -> None:
    answers = [
        answer(started_s=0.0, ended_s=0.5),
        answer(started_s=0.0, ended_s=1.5),
        answer(started_s=9.5, ended_s=13.0),  # Open when the fault began.
        answer(started_s=10.5, ended_s=12.0),
        answer(started_s=15.5, ended_s=16.0),
        answer(started_s=10.1, ended_s=10.2, is_complete=False, error="died"),
        answer(started_s=10.1, ended_s=40.2, is_complete=False, failure="cut"),
        answer(started_s=10.1, ended_s=10.2, token_ids=[5, 9, 7]),
    ]
    counts = count(answers, {0: EXPECTED}, began_s=10.0, ended_s=15.0)
    assert (counts.requests, counts.right, counts.clear_errors, counts.wrong) == (8, 5, 1, 1)
    assert (counts.unclear, counts.hung, counts.left) == (1, 0, 0)
    assert counts.longest_wait_s == pytest.approx(30.1)
    assert counts.median_wait_s == 1.5
    assert counts.after_begin_s == 2.0
    assert counts.open_longest_s == 3.0
    assert counts.after_end_s == 1.0
    assert counts.errors == ("died",)
    assert any("token 1 is 9, not 6" in detail for detail in counts.details)
    assert any("cut" in detail for detail in counts.details)


def test_streams_that_had_to_be_continued_are_counted() -> None:
    def broken(question: int, **fields: object) -> Answer:
        return answer(
            question=question, started_s=9.0, ended_s=11.0, is_complete=False, error="died", **fields
        )

    answers = [broken(0), broken(0, token_ids=[]), broken(1)]
    for gap_s in (0.25, 0.75):
        right = answer(started_s=9.0, ended_s=11.0)
        for instant_s in (9.5, 9.5 + gap_s, 9.75 + gap_s):
            right.note_event(instant_s)
        answers.append(right)
    counts = count(answers, {0: EXPECTED, 1: EXPECTED}, began_s=10.0, ended_s=15.0, whole={0})
    assert (counts.broken_streams, counts.open_pause_s) == (1, 0.75)
    assert Record(mode="pull", fault="kill-d", commit="abc", counts=counts).defects == [
        "1 streams not continued"
    ]


OTHER = Answer(question=0, started_s=0.0, token_ids=[8, 9], text="xy", is_complete=True)
MIXED = {"token_ids": [5, 9], "text": "ay", "logprobs": []}


@pytest.mark.parametrize(
    ("started_s", "ended_s", "fields", "verdict"),
    [
        (9.0, 11.0, {}, "right"),
        (9.0, 11.0, {"token_ids": [8, 9], "text": "xy", "logprobs": []}, "right"),
        (14.0, 16.0, {"token_ids": [8, 9], "text": "xy", "logprobs": []}, "right"),
        (8.0, 9.0, {"token_ids": [8, 9], "text": "xy", "logprobs": []}, "wrong"),
        (15.5, 16.0, {"token_ids": [8, 9], "text": "xy", "logprobs": []}, "wrong"),
        (9.0, 11.0, MIXED, "wrong"),
        (9.0, 11.0, {**MIXED, "is_complete": False, "error": "died"}, "wrong"),
    ],
)
def test_an_answer_during_updates_of_weights_is_wholly_of_one_version(
    started_s: float, ended_s: float, fields: dict[str, object], verdict: str
) -> None:
    answers = [answer(started_s=started_s, ended_s=ended_s, **fields)]
    counts = count(answers, {0: EXPECTED}, {0: OTHER}, began_s=10.0, ended_s=15.0)
    assert (counts.right, counts.wrong) == (verdict == "right", verdict == "wrong")


def test_counts_of_no_answers() -> None:
    counts = count([], {}, began_s=1.0, ended_s=2.0)
    assert (counts.requests, counts.longest_wait_s, counts.after_end_s) == (0, 0.0, None)
