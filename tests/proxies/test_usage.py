"""Usage of a prompt whose last token P leaves out, because its state after all tokens is of no use to D.

Clients get the answer of D, which has the whole prompt.
"""

import sys
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest

from baton.checkpoints.random_model import write_checkpoint
from baton.cli.processes import Fleet, free_ports
from tests.proxies.stock import START_S, WAIT_S, Pair, Proxy, ProxyStarter, completion_of
from tests.proxies.upstream import NotFetched, stock_proxies
from tests.system.engines import Engine, Engines, make_prompt

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("forked_programs"),
]

NUM_TOKENS, MAX_TOKENS = 40, 5


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("logs")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def pair(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    model = tmp_path_factory.mktemp("model") / "hybrid"
    write_checkpoint(model, family="granite_hybrid", layers=4, hidden=64, heads=4, kv_heads=2, seed=0)
    with closing(Engines(fleet)) as engines:
        p, d = engines.start(
            ("p", model, {"kv_role": "kv_producer"}), ("d", model, {"kv_role": "kv_consumer"})
        )
        yield p, d


@pytest.fixture(params=["toy proxy", "router", "router without the first token"])
def front(request: pytest.FixtureRequest, fleet: Fleet, pair: tuple[Engine, Engine]) -> Iterator[Proxy]:
    p, d = pair
    with httpx.Client(timeout=WAIT_S, trust_env=False) as client:
        if request.param == "toy proxy":
            try:
                stock = stock_proxies()
            except NotFetched as error:
                pytest.skip(str(error))
            ports = [int(engine.url.rpartition(":")[2]) for engine in pair]
            yield ProxyStarter(fleet, stock, client).toy(Pair("hybrid", *ports, "p"))
            return
        (port,) = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "baton.cli", "route", "--port", str(port)]
        command += ["--prefill", p.url, "--decode", d.url]
        command += ["--no-first-token"] if "without" in request.param else []
        child = fleet.start(f"route-{port}", command)
        fleet.wait_ready({child: f"{url}/health"}, timeout_s=START_S)
        yield Proxy(url, client)


def test_usage_counts_the_whole_prompt(front: Proxy, pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    transfers = d.metric("kv_transfer_seconds_count")
    prompt = make_prompt(len(front.url) + int(front.url[-3:]), NUM_TOKENS)
    asked = completion_of(prompt, max_tokens=MAX_TOKENS)
    answer = front.client.post(f"{front.url}/v1/completions", json=asked).json()
    assert answer["usage"]["prompt_tokens"] == NUM_TOKENS
    assert answer["usage"]["completion_tokens"] == MAX_TOKENS
    assert answer["usage"]["total_tokens"] == NUM_TOKENS + MAX_TOKENS
    assert d.metric("kv_transfer_seconds_count") == transfers + 1, "D computed the prompt itself"
    p.wait_at_rest()
    d.wait_at_rest()


def test_a_shortened_prompt_is_what_p_computed(pair: tuple[Engine, Engine]) -> None:
    """So the test above is about a shortened prompt: P lends all tokens but the last, and has no token."""
    p, d = pair
    prompt = make_prompt(4, NUM_TOKENS)
    left = p.complete(prompt, {"do_remote_decode": True}, max_tokens=1).json()
    assert left["usage"]["prompt_tokens"] == NUM_TOKENS
    assert left["usage"]["completion_tokens"] == 0
    answer = d.complete(prompt, left["kv_transfer_params"]).json()
    assert answer["usage"]["prompt_tokens"] == NUM_TOKENS
