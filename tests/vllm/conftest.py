"""Tests of Baton inside a real vLLM: in .venv-vllm (`make test-vllm`), and not collected elsewhere."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.system.collector import Collector
from tests.vllm.engines import SECRET, Server, Site
from tests.vllm.forking import ForkingFleet
from tests.vllm.plain import PLAIN, SINGLE, D, P
from tests.vllm.prompts import Single, ask_single
from tests.vllm.releases import find_release, lacking_ops

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

# Last, because each ends the engines that the other modules share.
OTHER_CASTS = frozenset(
    {
        "test_aligned_states",
        "test_dialects",
        "test_drafts",
        "test_foreign_connectors",
        "test_gpt_oss",
        "test_hybrid",
        "test_multi",
        "test_offload",
        "test_other_caches",
        "test_readme",
        "test_refused",
        "test_requests",
        "test_self_test",
        "test_server_differences",
        "test_shared_storage",
        "test_states",
        "test_tier",
        "test_host_fields",
        "test_weights",
    }
)
ENVIRONMENT = {
    "BATON_SECRET": SECRET,
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # Per rank.
    "TORCHDYNAMO_DISABLE": "1",  # Otherwise the first request with logprobs compiles for 8 s.
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # Endpoints that change weights and reset caches.
    "HF_HUB_OFFLINE": "1",
    "OTEL_TRACES_SAMPLER": "parentbased_always_off",  # Only traces that a test asks for.
    "OTEL_BSP_SCHEDULE_DELAY": "50",
    "VLLM_SSM_CONV_STATE_LAYOUT": "DS",  # The layout that TP sizes and hosts can divide.
}


@pytest.hookimpl(trylast=True)  # This follows the grouping by parameters, and keeps it.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lacking = lacking_ops(find_release())
    for item in items:
        if ops := lacking.get(item.path.name):
            item.add_marker(pytest.mark.skip(f"the kernels under this vLLM lack {', '.join(ops)}"))
    items.sort(key=lambda item: (item.path.stem in OTHER_CASTS, item.path.stem == "test_restarts"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 4,096 positions, made by `baton model new`."""
    return new_model(tmp_path_factory.mktemp("model") / "tiny")


def new_model(folder: Path, *options: str) -> Path:
    command = [sys.executable, "-m", "baton.cli", "model", "new", str(folder), *options]
    subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="session")
def site(model: Path, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    env = {**os.environ, **ENVIRONMENT, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    with (
        # Engines that are killed leave files there. Short: vLLM's sockets are there too.
        TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True) as folder,
        ForkingFleet(tmp_path_factory.mktemp("logs"), env={**env, "TMPDIR": folder}) as fleet,
    ):
        site = Site(fleet, model)
        yield site
        site.dismiss()  # Closes their clients too: an open socket at the end is an error.


@pytest.fixture(scope="module")
def site_of(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Site]]:
    """Engines of another model, by the options of `baton model new`; earlier engines have been ended."""
    site.dismiss()
    made: list[Site] = []

    def make(*options: str) -> Site:
        made.append(Site(site.fleet, new_model(tmp_path_factory.mktemp("model") / "other", *options)))
        return made[-1]

    yield make
    for other in made:
        other.dismiss()


@pytest.fixture(scope="session")
def single(site: Site) -> Single:
    """Run before the other tests and ended, because three engines at once would need ten gigabytes all the
    time.
    """
    servers = site.cast(PLAIN, SINGLE, P, D)
    answers = ask_single(servers["single"])
    site.dismiss("single")
    return answers


@pytest.fixture(scope="module")
def plain_pair(site: Site, single: Single) -> tuple[Server, Server]:
    """P and D of the plain cast."""
    servers = site.cast(PLAIN, P, D)
    return servers["p"], servers["d"]
