"""vLLM's own proxies, unmodified, in front of vLLM with our connectors (tests/proxies: Baton's server).

Also in front of a vLLM that prefills and a Baton engine that decodes.
"""

from collections.abc import Iterator

import httpx
import pytest

from tests.proxies.stock import Pair, Proxy, ProxyStarter, check_tokens, check_tokens_of_many
from tests.proxies.upstream import NotFetched, StockProxies, stock_proxies
from tests.vllm.engines import ANSWER_S, MODEL, TRANSFERS, BatonPlan, Server, Site, transfer
from tests.vllm.plain import P_CONTROL_PORT, PLAIN, D, P
from tests.vllm.prompts import Single, prompts

BATON_D = BatonPlan(
    "baton-d-of-proxies",
    transfer(
        "BatonPushConnector",
        "kv_consumer",
        "baton-d-of-proxies",
        extra={"allowed_peers": [f"127.0.0.1:{P_CONTROL_PORT}"]},
    ),
)


@pytest.fixture(scope="module")
def stock() -> StockProxies:
    try:
        return stock_proxies()
    except NotFetched as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def baton_d(site: Site, single: Single) -> Iterator[Server]:
    yield site.cast(PLAIN, P, D, BATON_D)[BATON_D.name]
    site.dismiss(BATON_D.name)


@pytest.fixture(scope="module", params=["vllm", "baton"])
def pair(
    request: pytest.FixtureRequest, plain_pair: tuple[Server, Server], stock: StockProxies
) -> tuple[Server, Server]:
    """Return the proxy by the engine that decodes."""
    p, d = plain_pair
    return (p, d) if request.param == "vllm" else (p, request.getfixturevalue("baton_d"))


@pytest.fixture(scope="module", params=["toy", "push_demo"])
def proxy(
    request: pytest.FixtureRequest, stock: StockProxies, site: Site, pair: tuple[Server, Server]
) -> Iterator[Proxy]:
    p, d = pair
    engines = Pair(MODEL, _port(p), _port(d), "p", p_control_port=P_CONTROL_PORT)
    with httpx.Client(timeout=ANSWER_S, trust_env=False) as client:
        proxies = ProxyStarter(site.fleet, stock, client)
        yield proxies.toy(engines) if request.param == "toy" else proxies.push_demo(engines)


def test_the_tokens_are_those_of_a_single_vllm(
    proxy: Proxy, pair: tuple[Server, Server], single: Single
) -> None:
    asked = [prompt for prompt in prompts() if len(prompt) in (8, 128, 129, 513, 1000, 2000)]
    _, d = pair
    before, num_computed = d.metric(TRANSFERS), d.num_computed()
    # No prompt with this salt is in D's cache.
    check_tokens(proxy, asked, single.tokens, cache_salt=_salt(proxy))
    d.wait_metric(TRANSFERS, lambda count: count >= before + len(asked))
    d.check_computed(lambda: num_computed + len(asked))  # One token of each prompt.


def test_concurrent_requests_get_the_same_tokens(proxy: Proxy, single: Single) -> None:
    asked = [prompt for prompt in prompts() if len(prompt) <= 513][:8]
    check_tokens_of_many(proxy, asked, single.tokens, cache_salt=f"{_salt(proxy)} at once")


def _port(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


def _salt(proxy: Proxy) -> str:
    """vLLM refuses a model name that looks like a path."""
    return f"proxy-{proxy.url.rpartition(':')[2]}"
