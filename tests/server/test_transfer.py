"""`kv_transfer_params`: validation, the params of answers, and their use with n samples."""

from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from baton.core.errors import BadTransferParams
from tests.server.fakes import LiveServer, ScriptedEngine, read_stream

COMPUTE = {"do_remote_decode": True, "do_remote_prefill": False}
FETCH = {"do_remote_prefill": True, "baton_ticket": "signed", "remote_engine_id": "p0"}
RETURNED = {"baton_ticket": "signed", "remote_block_ids": [[1, 2]]}


def complete(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"prompt": "Say", "max_tokens": 1, **body})


def refused_field(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    field: str = answer.json()["error"]["param"]
    return field


def test_the_connectors_params_are_at_the_answers_top_level(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.transfer_params = RETURNED
    assert complete(http, kv_transfer_params=COMPUTE).json()["kv_transfer_params"] == RETURNED
    assert engine.requests[0].kv_transfer_params == COMPUTE
    messages = [{"role": "user", "content": "Hi"}]
    chat = http.post("/v1/chat/completions", json={"messages": messages, "kv_transfer_params": COMPUTE})
    assert chat.json()["kv_transfer_params"] == RETURNED


def test_without_a_connector_the_key_is_absent(http: httpx.Client) -> None:
    assert "kv_transfer_params" not in complete(http).json()


def test_in_a_stream_they_come_with_the_finish_reason(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.transfer_params = RETURNED
    messages = [{"role": "user", "content": "Hi"}]
    for found in (
        read_stream(http, "/v1/completions", prompt="a", max_tokens=2, kv_transfer_params=COMPUTE),
        read_stream(
            http, "/v1/chat/completions", messages=messages, max_tokens=2, kv_transfer_params=COMPUTE
        ),
    ):
        with_params = [event for event in found if "kv_transfer_params" in event]
        assert [event["kv_transfer_params"] for event in with_params] == [RETURNED]
        assert with_params[0]["choices"][0]["finish_reason"] == "length"


def test_bad_params_are_refused_by_their_field_before_the_engine(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    answer = complete(http, kv_transfer_params={"do_remote_prefill": True})
    assert refused_field(answer) == "kv_transfer_params.baton_ticket"
    answer = complete(http, kv_transfer_params={**FETCH, "remote_port": "80"})
    assert refused_field(answer) == "kv_transfer_params.remote_port"
    assert engine.requests == []


def test_retention_is_checked_before_the_engine(http: httpx.Client, engine: ScriptedEngine) -> None:
    for retention, field in (
        ({"priority": "high"}, "baton_retention.priority"),
        ({"ttl_s": 0}, "baton_retention.ttl_s"),
        ({"ends_session": True}, "baton_retention.ends_session"),
    ):
        answer = complete(http, kv_transfer_params={"baton_retention": retention})
        assert refused_field(answer) == f"kv_transfer_params.{field}"
    assert "X-Session-Id" in answer.json()["error"]["message"], "how to mend it"
    assert refused_field(complete(http, kv_transfer_params={"baton_tenant": 5})).endswith("baton_tenant")
    assert engine.requests == []


def test_the_session_is_the_fields_or_the_headers(http: httpx.Client, engine: ScriptedEngine) -> None:
    params = {"baton_retention": {"priority": 3, "ends_session": True}}
    http.headers["X-Session-Id"] = "of-header"
    assert complete(http, kv_transfer_params=params).status_code == 200
    assert complete(http, session_id="of-body").status_code == 200
    messages = [{"role": "user", "content": "Hi"}]
    assert http.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    assert [request.session_id for request in engine.requests] == ["of-header", "of-body", "of-header"]
    assert engine.requests[0].kv_transfer_params == params
    http.headers["X-Session-Id"] = "a" * 257
    assert refused_field(complete(http)) == "X-Session-Id"


def test_the_connectors_check_decides(live: LiveServer, http: httpx.Client, engine: ScriptedEngine) -> None:
    seen: list[Any] = []

    def check_params(raw: Mapping[str, Any] | None) -> None:
        seen.append(raw)
        if raw is not None:
            raise BadTransferParams("this engine has no KV connector", field="kv_transfer_params")

    live.service.check_params = check_params
    assert refused_field(complete(http, kv_transfer_params=COMPUTE)) == "kv_transfer_params"
    assert complete(http).status_code == 200
    assert seen == [COMPUTE, None]
    assert len(engine.requests) == 1


def test_one_prefill_is_one_loan(http: httpx.Client, engine: ScriptedEngine) -> None:
    assert refused_field(complete(http, kv_transfer_params=COMPUTE, n=2)) == "n"
    assert (
        refused_field(complete(http, kv_transfer_params=COMPUTE, prompt=["a", "b"])) == "kv_transfer_params"
    )
    assert refused_field(complete(http, kv_transfer_params=FETCH, prompt=["a", "b"])) == "kv_transfer_params"
    stored = {"baton_lend_stored": True}
    assert refused_field(complete(http, kv_transfer_params=stored, n=2)) == "n"
    assert refused_field(complete(http, kv_transfer_params=stored, prompt=["a", "b"])) == "kv_transfer_params"
    assert engine.requests == []


def test_of_n_samples_one_fetches_and_the_others_follow_its_first_token(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    answer = complete(http, kv_transfer_params=FETCH, n=3, max_tokens=4)
    assert [choice["text"] for choice in answer.json()["choices"]] == ["Hell"] * 3
    assert [request.kv_transfer_params for request in engine.requests] == [FETCH, None, None]
    assert engine.events[:2] == ["0 submitted", "0 token"]


def test_retention_tenant_and_offload_are_of_all_samples(http: httpx.Client, engine: ScriptedEngine) -> None:
    kept = {"baton_retention": {"ttl_s": 60}, "baton_tenant": "search", "baton_offload": "load_only"}
    assert complete(http, kv_transfer_params={**FETCH, **kept}, n=2, max_tokens=4).status_code == 200
    assert [request.kv_transfer_params for request in engine.requests] == [{**FETCH, **kept}, kept]
    engine.requests.clear()
    one_token = {**COMPUTE, "baton_first_token": True, **kept}  # This prompt is not handed over.
    assert complete(http, kv_transfer_params=one_token, max_tokens=1).status_code == 200
    assert [request.kv_transfer_params for request in engine.requests] == [kept]


def test_if_the_fetching_sample_fails_no_other_is_submitted(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    def broken(request: Any) -> str:
        raise BadTransferParams("the ticket is for another prompt", field="kv_transfer_params.baton_ticket")

    engine.answer = broken
    answer = complete(http, kv_transfer_params=FETCH, n=3)
    assert refused_field(answer) == "kv_transfer_params.baton_ticket"
    assert len(engine.requests) == 1


def test_a_stop_string_in_the_first_token_still_ends_a_prefill_leg(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.transfer_params = RETURNED
    answer = complete(http, kv_transfer_params=COMPUTE, stop="H").json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["kv_transfer_params"] == RETURNED


@pytest.mark.parametrize(
    ("at_prefill", "cached", "transferred", "reported"),
    [
        ({}, 150, 150, 0),  # The prefill engine computed the whole prompt for this request.
        ({"baton_cached_tokens": 64}, 150, 150, 64),
        ({"baton_cached_tokens": 64}, 150, 50, 100),  # 100 were in this engine's own cache.
        ({"baton_cached_tokens": 64}, 0, 0, 0),  # The transfer failed, and this engine computed the prompt.
    ],
)
def test_tokens_computed_by_the_prefill_engine_are_not_counted_as_cached(
    http: httpx.Client,
    engine: ScriptedEngine,
    at_prefill: dict[str, int],
    cached: int,
    transferred: int,
    reported: int,
) -> None:
    engine.num_cached_tokens, engine.num_transferred_tokens = cached, transferred
    ticket = {"do_remote_prefill": True, "baton_ticket": "signed", "remote_engine_id": "p", **at_prefill}
    usage = complete(http, kv_transfer_params=ticket).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": reported, "transferred_tokens": transferred}


def test_a_prefill_engine_reports_its_cached_tokens(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.transfer_params = {"baton_ticket": "signed"}
    engine.num_cached_tokens = 32
    answer = complete(http, kv_transfer_params={"do_remote_decode": True})
    assert answer.json()["kv_transfer_params"] == {"baton_ticket": "signed", "baton_cached_tokens": 32}


def test_a_bad_number_of_cached_tokens_is_refused(http: httpx.Client) -> None:
    ticket = {"do_remote_prefill": True, "baton_ticket": "signed", "remote_engine_id": "p"}
    for wrong in (-1, "32", True, 2**60):
        answer = complete(http, kv_transfer_params={**ticket, "baton_cached_tokens": wrong})
        assert refused_field(answer) == "kv_transfer_params.baton_cached_tokens"
