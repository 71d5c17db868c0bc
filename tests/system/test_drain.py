"""Draining producers: no new work, and an end when all loans have ended."""

import select
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from baton.cli.processes import Fleet
from tests.system.engines import WAIT_S, Engine, Engines, make_prompt, tokens_of

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    with Fleet(tmp_path) as fleet, closing(Engines(fleet)) as engines:
        yield engines


def wait_draining(engine: Engine) -> None:
    while (health := engine.client.get(f"{engine.url}/health")).status_code == 200:
        pass
    assert health.status_code == 503
    assert health.json()["error"]["code"] == "draining"


def test_a_draining_producer_serves_its_loans_and_then_ends(engines: Engines, small_model: Path) -> None:
    p, d = engines.start(
        ("P", small_model, {"kv_role": "kv_producer"}), ("D", small_model, {"kv_role": "kv_consumer"})
    )
    first, second = make_prompt(1), make_prompt(2)
    tickets = [p.prefill(first), p.prefill(second)]
    p.child.send_signal(signal.SIGTERM)
    wait_draining(p)
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
    assert " 2 loans" in log
    d.wait_at_rest()


def test_a_second_signal_does_not_wait_for_loans(engines: Engines, small_model: Path) -> None:
    (p,) = engines.start(("P", small_model, {"kv_role": "kv_producer"}))
    p.prefill(make_prompt(1))  # No consumer comes for it; it would end with its lease after 30 s.
    p.child.send_signal(signal.SIGTERM)
    wait_draining(p)
    p.child.send_signal(signal.SIGTERM)
    assert select.select([p.child], [], [], 20.0)[0], "two signals mean now"
    assert p.child.exit_status() == 0
