"""Loans without a consumer end at once in a real engine, not by time."""

import json
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from baton.cli.processes import Fleet
from tests.system.engines import WAIT_S, Engine, Engines, make_prompt, tokens_of

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.usefixtures("forked_programs")]

FIRST_TOKEN_LEG = {"do_remote_decode": True, "baton_first_token": True}


@pytest.fixture(scope="module")
def p(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    lends_long = {"timers": {"ttl_s": 60.0, "loan_max_s": 200.0}}  # Longer than any test waits.
    with Fleet(tmp_path_factory.mktemp("logs")) as fleet, closing(Engines(fleet)) as engines:
        (engine,) = engines.start(
            ("p", model, {"kv_role": "kv_producer", "kv_connector_extra_config": lends_long})
        )
        yield engine


def test_a_first_token_that_ends_the_answer_leaves_no_loan(p: Engine) -> None:
    prompt = make_prompt(1)
    (first,) = tokens_of(p.complete(prompt, max_tokens=1))
    answer = p.complete(prompt, FIRST_TOKEN_LEG, stop_token_ids=[first])
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    assert answer.json().get("kv_transfer_params") is None
    p.wait_at_rest()


def test_clients_that_leave_during_the_prefill_leave_no_loan(p: Engine) -> None:
    address = urlsplit(p.url)
    assert address.hostname is not None
    assert address.port is not None
    with ExitStack() as stack:
        calls = []
        for seed in range(100, 124):
            call = stack.enter_context(socket.create_connection((address.hostname, address.port)))
            fields = {"prompt": make_prompt(seed, 600), "max_tokens": 1}
            body = json.dumps({**fields, "kv_transfer_params": {"do_remote_decode": True}}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            call.sendall(head.encode() + body)
            call.settimeout(WAIT_S)
            calls.append(call)
        bodies = [_body(calls[0])]  # One has its answer; the others run or wait.
        for call in calls:
            call.shutdown(socket.SHUT_WR)
        bodies += [_body(call) for call in calls[1:]]
    tickets = [json.loads(body)["kv_transfer_params"] for body in bodies if body]
    assert len(tickets) < len(calls), "some clients left before their answer"
    for params in tickets:  # These answers were sent, so the client returns their loans.
        assert p.client.post(f"{p.url}/baton/take_back", json=params).status_code == 202
    p.wait_at_rest()


def test_a_second_signal_does_not_wait_for_loans(p: Engine) -> None:
    """The last test of this engine."""
    p.prefill(make_prompt(5))
    p.child.send_signal(signal.SIGTERM)
    p.wait_draining()
    p.child.send_signal(signal.SIGTERM)
    assert select.select([p.child], [], [], 20.0)[0], "two signals mean now"
    assert p.child.exit_status() == 0


def _body(call: socket.socket) -> bytes:
    """The params of the answer; empty if the connection was closed before."""
    answer = HTTPResponse(call)
    with suppress(HTTPException, ConnectionError):
        answer.begin()
        return answer.read()
    return b""
