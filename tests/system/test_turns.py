"""A conversation through the router: P fetches the KV of the last turn from D."""

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from baton.cli.processes import Fleet, free_ports
from tests.system.engines import START_S, WAIT_S, Engines, make_prompt, tokens_of

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TURNS = {"kv_role": "kv_both", "kv_connector_extra_config": {"turns": {"min_tokens": 16}}}


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path) as fleet:
        yield fleet


def test_three_turns_are_those_of_one_engine_and_p_computes_only_what_is_new(
    fleet: Fleet, small_model: Path
) -> None:
    with closing(Engines(fleet)) as engines, httpx.Client(timeout=WAIT_S, trust_env=False) as client:
        p, d = engines.start(("P", small_model, TURNS), ("D", small_model, TURNS))
        (port,) = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "baton.cli", "route", "--port", str(port)]
        router = fleet.start("router", [*command, "--prefill", p.url, "--decode", d.url])
        fleet.wait_ready({router: f"{url}/health"}, timeout_s=START_S)
        history: list[int] = []
        for turn in range(3):
            prompt = [*history, *make_prompt(turn, 70)]
            fields = {"temperature": 0, "ignore_eos": True, "max_tokens": 24, "return_token_ids": True}
            body = {"prompt": prompt, **fields}
            headers = {"X-Session-Id": "one conversation"}
            answer = client.post(f"{url}/v1/completions", json=body, headers=headers)
            assert answer.headers["x-baton-prefill"] == "remote"
            assert "kv_transfer_params" not in answer.json()
            # Alone, without cached or fetched KV.
            alone = d.complete(prompt, max_tokens=24, cache_salt="alone")
            assert tokens_of(answer) == tokens_of(alone)
            history = [*prompt, *tokens_of(answer)]
        # After P's own prefix hit: the answers of two turns, and the last partial block.
        assert p.metric("external_prefix_cache_hits_total") >= 2 * 24
        assert d.metric("num_requests_delayed_free") == 1, "the last turn's is kept, the others were fetched"
