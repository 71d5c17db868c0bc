"""vLLM's stock proxies, unmodified, with `baton serve`: the tokens are those of a single engine."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from baton.cli.processes import Fleet, free_ports
from tests.proxies.stock import (
    WAIT_S,
    Answer,
    Pair,
    Proxy,
    ProxyStarter,
    check_tokens,
    check_tokens_of_many,
)
from tests.proxies.upstream import NotFetched, StockProxies, stock_proxies
from tests.system.engines import Engine, Engines, make_prompt

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("forked_programs"),
]

SIZES = (1, 15, 16, 150, 700)


@pytest.fixture(scope="module")
def stock() -> StockProxies:
    try:
        return stock_proxies()
    except NotFetched as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def fleet(stock: StockProxies, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("logs")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def control_port() -> int:
    """P's."""
    (port,) = free_ports(1)
    return port


@pytest.fixture(scope="module")
def engines(fleet: Fleet, model: Path, control_port: int) -> Iterator[list[Engine]]:
    """P, and D with P's control address in `allowed_peers`."""
    peer = f"127.0.0.1:{control_port}"
    with closing(Engines(fleet)) as engines:
        yield engines.start(
            (
                "p",
                model,
                {
                    "kv_connector": "BatonPushConnector",
                    "kv_role": "kv_producer",
                    "kv_connector_extra_config": {"port": control_port},
                },
            ),
            (
                "d",
                model,
                {
                    "kv_connector": "BatonPushConnector",
                    "kv_role": "kv_consumer",
                    "kv_load_failure_policy": "fail",  # A push that fails must be visible.
                    "kv_connector_extra_config": {"allowed_peers": [peer]},
                },
            ),
            # No consumer ends the loan of a refused push, and no test waits for its expiry.
            options={"p": ["--max-num-batched-tokens", "128", "--drain-timeout-s", "0.1"]},
        )


@pytest.fixture(scope="module")
def pair(engines: list[Engine], model: Path, control_port: int) -> Pair:
    p, d = engines
    return Pair(str(model), _port(p), _port(d), "p", p_control_port=control_port)


@pytest.fixture(scope="module")
def proxies(fleet: Fleet, stock: StockProxies) -> Iterator[ProxyStarter]:
    with httpx.Client(timeout=WAIT_S, trust_env=False) as client:
        yield ProxyStarter(fleet, stock, client)


@pytest.fixture(scope="module")
def toy_proxy(proxies: ProxyStarter, pair: Pair) -> Proxy:
    return proxies.toy(pair)


@pytest.fixture(scope="module")
def push_demo(proxies: ProxyStarter, pair: Pair) -> Proxy:
    return proxies.push_demo(pair)


@pytest.fixture(params=["toy_proxy", "push_demo"])
def proxy(request: pytest.FixtureRequest) -> Proxy:
    proxy = request.getfixturevalue(request.param)
    assert isinstance(proxy, Proxy)
    return proxy


def test_the_tokens_are_those_of_a_single_engine(
    proxy: Proxy, engines: list[Engine], expected: Answer
) -> None:
    p, d = engines
    transfers = d.metric("kv_transfer_seconds_count")
    check_tokens(proxy, [make_prompt(size, size) for size in SIZES], expected)
    assert d.metric("kv_transfer_seconds_count") - transfers == len(SIZES), "D computed a prompt itself"
    p.wait_at_rest()
    d.wait_at_rest()


def test_so_they_are_when_many_ask_at_once(proxy: Proxy, engines: list[Engine], expected: Answer) -> None:
    check_tokens_of_many(proxy, [make_prompt(1000 + seed, 40 * seed + 3) for seed in range(8)], expected)
    for engine in engines:
        engine.wait_at_rest()


def test_a_chat_is_answered_and_streamed(proxy: Proxy) -> None:
    body = {
        "messages": [{"role": "user", "content": "How are you?"}],
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
    }
    whole = proxy.client.post(f"{proxy.url}/v1/chat/completions", json=body).json()
    with proxy.client.stream(
        "POST", f"{proxy.url}/v1/chat/completions", json={**body, "stream": True}
    ) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events.pop() == "[DONE]"
    pieces = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]


def test_a_producer_that_is_not_allowed_is_refused_by_its_field(
    proxies: ProxyStarter, pair: Pair, engines: list[Engine]
) -> None:
    """The proxy sends localhost and the engine's configuration has an address; the error names the remedy."""
    error = proxies.push_demo(pair, kv_host="localhost").refusal(make_prompt(7))
    assert error["param"] == "kv_transfer_params.remote_host"
    assert "allowed_peers" in error["message"]


def _port(engine: Engine) -> int:
    return int(engine.url.rpartition(":")[2])
