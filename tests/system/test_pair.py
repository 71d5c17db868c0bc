"""One pair of engines: signed tokens are verified once, turns of a conversation, and P is drained at last."""

import os
import re
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from baton.cli.processes import Fleet, free_ports
from baton.transport.base.gather import LIBRARY
from tests.system.engines import START_S, TIMERS, WAIT_S, Engine, Engines, make_prompt, tokens_of

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.usefixtures("forked_programs")]

TRANSFER = {
    "kv_role": "kv_both",
    "kv_connector": "BatonPushConnector",
    "kv_connector_module_path": "tests.system.counting_push",
    "kv_connector_extra_config": {"turns": {"min_tokens": 16}, "timers": TIMERS},
}


@pytest.fixture(scope="module")
def count_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("count") / "verified"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, count_file: Path) -> Iterator[Fleet]:
    env = {**os.environ, "COUNT_FILE": str(count_file)}
    with Fleet(tmp_path_factory.mktemp("logs"), env=env) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def engines(fleet: Fleet, model: Path) -> Iterator[list[Engine]]:
    with closing(Engines(fleet)) as engines:
        yield engines.start(("p", model, TRANSFER), ("d", model, TRANSFER))


@pytest.fixture
def verified(count_file: Path) -> Path:
    count_file.write_text("")
    return count_file


def tokens_in(verified: Path) -> list[str]:
    return [line.split()[1] for line in verified.read_text().splitlines()]


def test_a_ticket_is_verified_once_in_a_request_that_pulls(engines: list[Engine], verified: Path) -> None:
    p, d = engines
    prompt = make_prompt(1)
    params = p.prefill(prompt)
    assert len(tokens_of(d.complete(prompt, params))) == 12
    assert tokens_in(verified) == [params["baton_ticket"]]
    assert d.metric("kv_peer_transfers_total") == 1
    metrics = d.client.get(f"{d.url}/metrics").text
    received = re.findall(r'baton:kv_transport_bytes_total\{.*transport="([^"]+)"', metrics)
    assert received == ["local:mapped"] or not LIBRARY.exists(), "a cache on this host is mapped"


def test_a_ticket_is_verified_once_in_a_request_that_is_refused(
    engines: list[Engine], verified: Path
) -> None:
    p, d = engines
    prompt = make_prompt(2)
    params = {**p.prefill(prompt), "baton_ticket": "nonsense"}
    for stream in (False, True):
        verified.write_text("")
        refused = d.complete(prompt, params, stream=stream)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "kv_transfer_params.baton_ticket"
        assert tokens_in(verified) == ["nonsense"]


def test_an_introduction_and_a_ticket_are_verified_once_in_a_request_that_streams(
    engines: list[Engine], verified: Path
) -> None:
    p, d = engines
    introduction = p.client.get(f"{p.url}/baton/introduction").json()["introduction"]
    params = {
        "do_remote_prefill": True,
        "transfer_id": "t",
        "remote_engine_id": "p",
        "baton_introduction": introduction,
    }
    prompt = make_prompt(3)
    answer = p.complete(prompt, {"do_remote_decode": True, "transfer_id": "t"}, max_tokens=1).json()
    assert len(tokens_of(d.complete(prompt, params))) == 12
    assert tokens_in(verified) == [introduction, answer["kv_transfer_params"]["baton_ticket"]]


def test_three_turns_are_those_of_one_engine_and_p_computes_only_what_is_new(
    fleet: Fleet, engines: list[Engine]
) -> None:
    p, d = engines
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "baton.cli", "route", "--port", str(port)]
    router = fleet.start("router", [*command, "--prefill", p.url, "--decode", d.url])
    fleet.wait_ready({router: f"{url}/health"}, timeout_s=START_S)
    fetched, lent = p.metric("external_prefix_cache_hits_total"), d.metric("num_requests_delayed_free")
    history: list[int] = []
    with httpx.Client(timeout=WAIT_S, trust_env=False) as client:
        for turn in range(3):
            prompt = [*history, *make_prompt(turn + 10, 70)]
            fields = {"temperature": 0, "ignore_eos": True, "max_tokens": 24, "return_token_ids": True}
            body = {"prompt": prompt, **fields}
            headers = {"X-Session-Id": "one conversation"}
            answer = client.post(f"{url}/v1/completions", json=body, headers=headers)
            assert answer.headers["x-baton-prefill"] == "remote"
            assert "kv_transfer_params" not in answer.json()
            # D answers alone, without cached or fetched KV.
            alone = d.complete(prompt, max_tokens=24, cache_salt="alone")
            assert tokens_of(answer) == tokens_of(alone)
            history = [*prompt, *tokens_of(answer)]
    # P fetches the answers of two turns, and the last partial block, beyond its own prefix hit.
    assert p.metric("external_prefix_cache_hits_total") - fetched >= 2 * 24
    kept = d.metric("num_requests_delayed_free") - lent
    assert kept == 1, "the last turn's is kept, the others were fetched"


def test_a_draining_producer_serves_its_loans_and_then_ends(engines: list[Engine]) -> None:
    p, d = engines
    first, second = make_prompt(21), make_prompt(22)
    tickets = [p.prefill(first), p.prefill(second)]
    p.child.send_signal(signal.SIGTERM)
    p.wait_draining()
    refused = p.complete(first, {"do_remote_decode": True}, max_tokens=1)
    assert refused.status_code == 503
    assert "Retry-After" in refused.headers

    for prompt, ticket in zip((first, second), tickets, strict=True):
        moved = d.metric("kv_transfer_bytes_total")
        answer = d.complete(prompt, ticket)
        assert d.metric("kv_transfer_bytes_total") > moved
        # Alone and without its prefix cache, so no other engine takes part in the answer.
        assert tokens_of(answer) == tokens_of(d.complete(prompt, cache_salt="alone"))
    assert select.select([p.child], [], [], WAIT_S)[0], "no loan is left to wait for"
    assert p.child.exit_status() == 0
    assert "KV connector: " in (log := p.child.log_path.read_text())
    assert " loans" in log
