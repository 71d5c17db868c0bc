"""Timelines of an engine's requests, with the parts of its connector, and the page that has them."""

from typing import Any

import httpx

from baton.engine.api import EngineOutput, EngineRequest, SamplingParams
from baton.server.timeline import RECENT_MAX, EngineTimelines
from tests.server.fakes import LiveServer

BOOT_S, WALL_S = 1000.0, 5000.0  # Lead of these clocks over the monotonic one.


class Clock:
    now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def request(name: str) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(max_tokens=9),
        arrival_time_s=10.5,
    )


def begun(*names: str) -> tuple[EngineTimelines, Clock]:
    clock = Clock()
    timelines = EngineTimelines(
        "m",
        clock=clock,
        wall_clock=lambda: clock() + WALL_S,
        connector_clock=lambda: clock() + BOOT_S,
    )
    for name in names:
        timelines.begin(name.split("/")[0], [request(name)], 10.0, None)
    return timelines, clock


def output(**fields: Any) -> EngineOutput:
    return EngineOutput(request_id="a-b/0", **fields)


def test_times_count_from_the_arrival_of_the_http_request() -> None:
    timelines, clock = begun("a-b/0")
    clock.now_s = 13.0
    timelines.note_output(
        output(new_token_ids=[7], scheduled_at_s=12.0, num_cached_tokens=2, num_transferred_tokens=1)
    )
    clock.now_s = 14.0
    timelines.note_output(output(new_token_ids=[8, 9], scheduled_at_s=12.0))
    timelines.end("a-b/0", "length")
    timelines.end("a-b/0", "abort")  # The iterator closes after the request has ended.
    [one] = timelines.find("a-b")
    assert (one.arrived_at_s, one.admitted_s) == (5010.0, 0.5)
    assert (one.scheduled_s, one.first_token_s, one.last_token_s, one.ended_s) == (2.0, 3.0, 4.0, 4.0)
    assert (one.prompt_tokens, one.output_tokens, one.finish_reason) == (3, 3, "length")
    assert timelines.find("a") == []


TIMES = {"claimed_s": 1011.0, "ready_s": 1011.5, "allocated_s": 1011.25, "started_s": 1011.5}
FETCHED = {
    "request_id": "a-b/0",
    "producer": "p",
    "tokens": 3,
    "bytes": 300,
    "wire_ms": 250.0,
    "descriptors": 4,
    "transport": "tcp",
    "times": {**TIMES, "read_s": 1012.0, "ended_s": 1012.5},
}


def test_a_connectors_records_are_put_on_the_same_clock() -> None:
    for stats in ({"transfers": [FETCHED]}, {"BatonPullConnector": {"transfers": [FETCHED]}, "Mine": {}}):
        timelines, _ = begun("a-b/0")
        timelines.observe_connector(stats)
        fetch = timelines.find("a-b")[0].fetch
        assert fetch is not None
        assert (fetch.claimed_s, fetch.ready_s, fetch.read_s, fetch.ended_s) == (1.0, 1.5, 2.0, 2.5)
        assert (fetch.outcome, fetch.wire_s, fetch.transport) == ("delivered", 0.25, "tcp")


def test_a_fetch_that_failed_and_a_loan_that_ended_later_are_shown() -> None:
    timelines, _ = begun("a-b/0")
    timelines.end("a-b/0", "length")
    failed = {**FETCHED, "reason": "read failed", "times": {**TIMES, "read_s": 0.0, "ended_s": 1013.0}}
    loan = {"request_id": "a-b/0", "blocks": 2, "outcome": "expired", "lent_s": 1014.0, "ended_s": 1044.0}
    timelines.observe_connector({"failed": [failed], "loans": [loan]})
    timelines.observe_connector({"loans": [{**loan, "request_id": "another"}]})
    [one] = timelines.find("a-b")
    assert one.fetch is not None
    assert (one.fetch.outcome, one.fetch.read_s, one.fetch.ended_s) == ("read failed", None, 3.0)
    assert one.loan is not None
    assert (one.loan.outcome, one.loan.lent_s, one.loan.ended_s) == ("expired", 4.0, 34.0)


def test_the_number_of_remembered_requests_is_bounded() -> None:
    timelines, _ = begun(*(f"r{n}/0" for n in range(RECENT_MAX + 5)))
    assert timelines.find("r4") == []
    assert len(timelines.find("r5")) == 1


def test_the_page_shows_each_choice_without_prompt_or_answer(live: LiveServer, http: httpx.Client) -> None:
    body = {"prompt": "a secret prompt", "max_tokens": 3, "n": 2}
    answer = http.post("/v1/completions", json=body, headers={"X-Request-Id": "r/1"})
    assert answer.status_code == 200
    page = http.get("/baton/requests/r%2F1")
    assert "secret" not in page.text
    assert [(one["id"], one["choice"], one["model"]) for one in page.json()["timelines"]] == [
        ("r/1", 0, "toy"),
        ("r/1", 1, "toy"),
    ]
    assert http.get("/baton/requests/other").json() == {"timelines": []}
