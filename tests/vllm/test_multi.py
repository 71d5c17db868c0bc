"""Our connector beside vLLM's own disk store in vLLM's MultiConnector, on P and D."""

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import Server, Site, VllmPlan, check_handoffs, in_company, transfer
from tests.vllm.prompts import Single, prompts

ASKED = [prompt for prompt in prompts() if len(prompt) in (64, 129, 300, 513, 1500)]


def multi(role: str, engine_id: str, folder: Path) -> dict[str, Any]:
    """Ours is asked first, because it has what only a peer has."""
    disk = {"shared_storage_path": str(folder / engine_id)}
    store = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": disk}
    return in_company(transfer("BatonPullConnector", role, engine_id), store)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def pair(site: Site, single: Single, folder: Path) -> tuple[Server, Server]:
    p = VllmPlan("p-multi", multi("kv_producer", "p-multi", folder))
    d = VllmPlan("d-multi", multi("kv_consumer", "d-multi", folder))
    servers = site.cast("multi", p, d)
    return servers[p.name], servers[d.name]


def test_both_connectors_work(site: Site, pair: tuple[Server, Server], folder: Path, single: Single) -> None:
    with site.router(*pair) as router:
        check_handoffs(router, pair[1], ASKED, single.tokens)
    assert list((folder / "p-multi").iterdir()), "the store beside ours has been written to"


def test_bad_params_end_neither_connector(pair: tuple[Server, Server], single: Single) -> None:
    for engine in pair:
        for params in ({"do_remote_prefill": True}, {"do_remote_prefill": True, "baton_ticket": "x"}):
            assert engine.tokens(ASKED[1], params) == single.tokens(ASKED[1])
        assert engine.is_healthy()
