"""Our connector beside vLLM's own disk store in vLLM's MultiConnector, on P and D."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import Server, Site, VllmPlan, transfer
from tests.vllm.prompts import Single, prompts

ASKED = [prompt for prompt in prompts() if len(prompt) in (64, 129, 300, 513, 1500)]


def multi(role: str, engine_id: str, folder: Path) -> dict[str, Any]:
    """Ours is asked first, because it has what only a peer has."""
    ours = transfer("BatonPullConnector", role, engine_id)
    del ours["engine_id"]  # vLLM gives each child the outer one.
    disk = {"shared_storage_path": str(folder / engine_id)}
    store = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": disk}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "engine_id": engine_id,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours, store]},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def pair(site: Site, single: Single, folder: Path) -> tuple[Server, Server]:
    p = VllmPlan("p-multi", multi("kv_producer", "p-multi", folder), cores="0")
    d = VllmPlan("d-multi", multi("kv_consumer", "d-multi", folder), cores="1")
    servers = site.cast("multi", p, d)
    return servers[p.name], servers[d.name]


@pytest.fixture(scope="module")
def router(site: Site, pair: tuple[Server, Server]) -> Iterator[Server]:
    with site.router(*pair) as router:
        yield router


def test_tokens_equal_one_engines(router: Server, single: Single) -> None:
    for prompt in ASKED:
        assert router.tokens(prompt, cache_salt=router.name) == single.tokens(prompt), len(prompt)
    assert router.metric("baton:router_prefills_total", where="local") == 0


def test_both_connectors_have_worked(pair: tuple[Server, Server], folder: Path, router: Server) -> None:
    _, d = pair
    d.wait_metric("baton:kv_transfer_seconds_count", lambda count: count >= len(ASKED))
    assert list((folder / "p-multi").iterdir()), "the store beside ours has been written to"


def test_bad_params_end_neither_connector(pair: tuple[Server, Server], single: Single) -> None:
    for engine in pair:
        for params in ({"do_remote_prefill": True}, {"do_remote_prefill": True, "baton_ticket": "x"}):
            assert engine.tokens(ASKED[1], params) == single.tokens(ASKED[1])
        assert engine.is_healthy()
