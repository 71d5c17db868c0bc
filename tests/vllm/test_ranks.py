"""A prefill engine of two ranks hands over to one of one rank."""

from collections.abc import Iterator

import pytest

from tests.vllm.engines import Server, Site, VllmPlan, transfer
from tests.vllm.prompts import Single, prompts

P = VllmPlan("p-two-ranks", transfer("BatonPushConnector", "kv_producer", "p-two-ranks"), cores="0|1")
D = VllmPlan("d-one-rank", transfer("BatonPushConnector", "kv_consumer", "d-one-rank"), cores="1")
ASKED = [prompt for prompt in prompts() if len(prompt) in (8, 128, 129, 300, 513, 2000)]


@pytest.fixture(scope="module")
def pair(site: Site, single: Single) -> tuple[Server, Server]:
    servers = site.cast("ranks", P, D)
    return servers[P.name], servers[D.name]


@pytest.fixture(scope="module", params=["pull", "push"])
def router(request: pytest.FixtureRequest, site: Site, pair: tuple[Server, Server]) -> Iterator[Server]:
    with site.router(*pair, request.param) as router:
        yield router


def test_tokens_are_one_engines(router: Server, pair: tuple[Server, Server], single: Single) -> None:
    for prompt in ASKED:
        assert router.tokens(prompt, cache_salt=router.name) == single.tokens(prompt), len(prompt)
    assert router.metric("baton:router_prefills_total", where="local") == 0


def test_the_ticket_names_both_ranks(pair: tuple[Server, Server]) -> None:
    assert pair[0].prefill(ASKED[2])["tp_size"] == 2
