"""vLLM's own proxies, unmodified, before vLLM with our connectors: as tests/proxies before Baton's server."""

from collections.abc import Iterator

import httpx
import pytest

from tests.proxies.stock import Pair, Proxy, ProxyStarter, check_tokens, check_tokens_of_many
from tests.proxies.upstream import NotFetched, StockProxies, stock_proxies
from tests.vllm.engines import ANSWER_S, MODEL, Server, Site
from tests.vllm.plain import P_CONTROL_PORT
from tests.vllm.prompts import Single, prompts

TRANSFERS = "baton:kv_transfer_seconds_count"


@pytest.fixture(scope="module")
def stock() -> StockProxies:
    try:
        return stock_proxies()
    except NotFetched as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=["toy", "push_demo"])
def proxy(
    request: pytest.FixtureRequest, stock: StockProxies, site: Site, plain_pair: tuple[Server, Server]
) -> Iterator[Proxy]:
    p, d = plain_pair
    pair = Pair(MODEL, _port(p), _port(d), "p", p_control_port=P_CONTROL_PORT)
    with httpx.Client(timeout=ANSWER_S, trust_env=False) as client:
        proxies = ProxyStarter(site.fleet, stock, client)
        yield proxies.toy(pair) if request.param == "toy" else proxies.push_demo(pair)


def test_the_tokens_are_those_of_a_single_vllm(
    proxy: Proxy, plain_pair: tuple[Server, Server], single: Single
) -> None:
    asked = [prompt for prompt in prompts() if len(prompt) in (8, 128, 129, 513, 1000, 2000)]
    _, d = plain_pair
    before = d.metric(TRANSFERS)
    check_tokens(proxy, asked, single.tokens, cache_salt=_salt(proxy))  # Nothing of it is in D's cache.
    d.wait_metric(TRANSFERS, lambda count: count >= before + len(asked))


def test_so_they_are_when_many_ask_at_once(proxy: Proxy, single: Single) -> None:
    asked = [prompt for prompt in prompts() if len(prompt) <= 513][:8]
    check_tokens_of_many(proxy, asked, single.tokens, cache_salt=f"{_salt(proxy)} at once")


def _port(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


def _salt(proxy: Proxy) -> str:
    """vLLM refuses one that looks like a path."""
    return f"proxy-{proxy.url.rpartition(':')[2]}"
