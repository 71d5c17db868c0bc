"""Every error has OpenAI's format and the right status, and affects only its own request."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from baton.engine.api import EngineOutput, RequestError, SchedulerStats
from baton.http.settings import HttpSettings
from baton.server.app import build_app
from baton.server.tokens import MAX_CHARS_PER_TOKEN
from tests.server.fakes import JSON, MAX_MODEL_LEN, VOCAB_SIZE, LiveServer, ScriptedEngine, service_around


def error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


def complete(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"prompt": "Say", **body})


def test_an_error_carries_the_requests_id(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", content=b"{", headers={"X-Request-Id": "mine", **JSON})
    assert error(answer, 400)["param"] == "body"
    assert answer.headers["x-request-id"] == "mine"


def test_an_unknown_model_is_404(http: httpx.Client) -> None:
    assert error(complete(http, model="gpt-99"), 404)["code"] == "model_not_found"
    assert error(http.post("/tokenize", json={"model": "x", "prompt": "a"}), 404)["param"] == "model"


def test_an_unknown_path_and_method_have_the_same_shape(http: httpx.Client) -> None:
    assert "/v1/nothing" in error(http.get("/v1/nothing"), 404)["message"]
    error(http.get("/v1/completions"), 405)
    assert http.head("/health").status_code == 405
    for path in ("/docs", "/openapi.json"):
        error(http.get(path), 404)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"prompt": "a" * MAX_MODEL_LEN}, "prompt"),
        ({"prompt": ["a", "a" * MAX_MODEL_LEN]}, "prompt[1]"),
        ({"prompt": "a", "max_tokens": MAX_MODEL_LEN + 1}, "max_tokens"),
        ({"prompt": "a" * (MAX_MODEL_LEN * MAX_CHARS_PER_TOKEN + 1)}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": [VOCAB_SIZE]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": ["a"] * 20, "n": 100}, "n"),
        ({"suffix": "b"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": ["a"] * 100, "allowed_token_ids": [3] * 12_000}, "allowed_token_ids"),
        ({"prompt": ["a" * 150] * 100, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": ["a" * 150] * 100, "echo": True, "logprobs": 20}, "logprobs"),
        ({"top_k": 10**4000}, "top_k"),
    ],
)
def test_requests_that_cannot_run_are_refused_before_the_engine(
    http: httpx.Client, engine: ScriptedEngine, body: dict[str, Any], field: str
) -> None:
    found = error(complete(http, **body), 400)
    assert (found["type"], found["param"]) == ("invalid_request_error", field)
    assert engine.requests == []


def test_a_body_beyond_the_limit_is_413_and_not_read_to_its_end(engine: ScriptedEngine) -> None:
    num_read = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal num_read
        while True:
            num_read += 1
            yield b"x" * (1 << 20)

    async def main() -> None:
        with service_around(engine) as service:
            transport = httpx.ASGITransport(build_app(service))
            async with httpx.AsyncClient(transport=transport, base_url="http://toy") as client:
                answer = await client.post("/v1/completions", content=chunks(), headers=JSON)
        assert error(answer, 413)["code"] == "body_too_large"

    asyncio.run(main())
    assert num_read == HttpSettings().max_body_bytes // (1 << 20) + 1


def test_the_engines_refusal_is_400_and_its_failure_500(http: httpx.Client, engine: ScriptedEngine) -> None:
    def failing(is_users: bool) -> EngineOutput:
        return EngineOutput(
            request_id="",
            new_token_ids=[],
            finish_reason="error",
            error=RequestError("no room", is_users=is_users, field="max_tokens" if is_users else None),
        )

    engine.failure = failing(True)
    refused = error(complete(http), 400)
    assert (refused["message"], refused["param"]) == ("no room", "max_tokens")
    engine.failure = failing(False)
    assert error(complete(http), 500)["message"] == "no room"
    engine.failure = None
    assert complete(http).status_code == 200


def test_an_error_before_the_first_token_of_a_stream_has_its_status(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.failure = EngineOutput(
        request_id="", new_token_ids=[], finish_reason="error", error=RequestError("no KV")
    )
    assert error(complete(http, stream=True), 500)["message"] == "no KV"


def test_an_error_within_a_stream_is_an_event_then_done(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.failure = EngineOutput(
        request_id="", new_token_ids=[], finish_reason="error", error=RequestError("no KV")
    )
    engine.fail_at = 2
    with http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert [json.loads(line)["choices"][0]["text"] for line in lines[:2]] == ["H", "e"]
    assert json.loads(lines[2])["error"]["message"] == "no KV"
    assert lines[3:] == ["[DONE]"]


def test_our_own_bug_is_500_without_details_and_with_a_traceback_in_the_log(
    http: httpx.Client, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(request: Any) -> str:
        raise ZeroDivisionError("a secret detail")

    engine.answer = broken
    assert error(complete(http), 500)["message"] == "internal server error"
    assert "a secret detail" in caplog.text
    engine.answer = "fine"
    assert complete(http).status_code == 200


def test_a_dead_engine_is_503_for_answers_and_health(
    live: LiveServer, http: httpx.Client, engine: ScriptedEngine
) -> None:
    assert http.get("/health").status_code == 200
    live.call(engine.die)
    assert error(complete(http), 503)["code"] == "engine_dead"
    assert error(http.get("/health"), 503)["code"] == "engine_dead"


def test_an_engine_without_its_connector_is_unhealthy_and_still_answers(
    live: LiveServer, http: httpx.Client
) -> None:
    live.call(lambda: live.service.metrics.observe_stats(SchedulerStats(kv_connector_retired=True)))
    unhealthy = error(http.get("/health"), 503)
    assert unhealthy["code"] == "connector_retired"
    assert "KV connector has failed permanently" in unhealthy["message"]
    assert complete(http).status_code == 200


def test_an_engine_that_is_not_ready_reports_why_and_its_requests_wait(
    live: LiveServer, http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.unready_reason = "the engine starts its ranks anew: rank 1 is gone"
    answer = http.get("/health")
    assert error(answer, 503)["message"] == engine.unready_reason
    assert error(answer, 503)["code"] == "not_ready"
    assert answer.headers["Retry-After"] == "1"
    assert complete(http).status_code == 200
    engine.unready_reason = None
    assert http.get("/health").status_code == 200


def test_a_draining_server_takes_no_new_requests(live: LiveServer, http: httpx.Client) -> None:
    live.service.is_draining = True
    assert error(complete(http), 503)["code"] == "draining"
    error(http.get("/health"), 503)
