"""A real vLLM whose version is not listed starts if it passes the self-test, and is refused otherwise."""

import re
import select
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.checkpoints.random_model import write_checkpoint
from baton.cli.processes import free_ports
from tests.vllm.engines import START_S, Site, VllmPlan, check_handoffs, transfer
from tests.vllm.prompts import Prompt, prompts

VERSION = "0.99.0"
# Loaded in each process of the engine, before its connector is made.
UNLISTED = f"""
import vllm
from baton.hosts.vllm import BatonPushConnector

vllm.__version__ = "{VERSION}"

class UnlistedConnector(BatonPushConnector): ...
"""
# A program whose connector halves FIELDS of each layer's layout.
MISREPORTED = f"""
import msgspec
from baton.connectors.pull import worker

{UNLISTED}
layout_of = worker.layout_of

def misreported(*arguments):
    layout = layout_of(*arguments)
    halved = [
        msgspec.structs.replace(layer, **{{name: getattr(layer, name) // 2 for name in FIELDS}})
        for layer in layout.layers
    ]
    return msgspec.structs.replace(layout, layers=tuple(halved))

worker.layout_of = misreported
"""
NO_CACHING = ("--no-enable-prefix-caching",)
WINDOWS = ("--layers", "6", "--sliding-window", "100")
# Family: options of the model and of vLLM, the groups and kinds of caches.
FAMILIES = {
    "llama": ((), (), 1, "FullAttentionSpec"),
    "gemma3": (WINDOWS, ("--block-size", "32"), 3, "FullAttentionSpec, SlidingWindowSpec"),
    "granite_hybrid": (("--layers", "4"), NO_CACHING, 4, "FullAttentionSpec, MambaSpec"),
}
_LONG = next(prompt for prompt in prompts() if len(prompt) == 1500)
ASKED = [(9 + length, *_LONG[:length]) for length in (8, 100, 129, 300, 600)]


def unlisted(
    name: str, role: str, folder: Path, options: tuple[str, ...] = (), program: str = UNLISTED
) -> VllmPlan:
    (folder / "unlisted.py").write_text(program)
    given = transfer("UnlistedConnector", role, name, kv_connector_module_path="unlisted")
    return VllmPlan(name, given, extra=options, path=(str(folder),))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def caches(site_of: Callable[..., Site], family: str) -> Iterator[Site]:
    site = site_of("--family", family, *FAMILIES[family][0])
    yield site
    site.dismiss()


def test_an_unlisted_version_hands_over_the_same_tokens(caches: Site, family: str, tmp_path: Path) -> None:
    _, extra, num_groups, kinds = FAMILIES[family]
    engine = caches.cast("single", VllmPlan("single", None, extra=extra))["single"]
    expected: dict[Prompt, list[int]] = {prompt: engine.tokens(prompt) for prompt in ASKED}
    plans = [
        unlisted(name, role, tmp_path, extra) for name, role in (("p", "kv_producer"), ("d", "kv_consumer"))
    ]
    engines = caches.cast("unlisted", *plans)
    for server in engines.values():
        warnings = [line for line in server.log().splitlines() if f"vLLM {VERSION} is not among" in line]
        assert len(warnings) == 1, server.log()[-8000:]
        assert f"passes the self-test: {kinds}; " in warnings[0]
        assert warnings[0].count("bytes by local") == num_groups
    with caches.router(engines["p"], engines["d"], "pull") as router:
        check_handoffs(router, engines["d"], ASKED, expected.__getitem__)


def test_latents_are_tested_too(site: Site, tmp_path: Path) -> None:
    """`test_other_caches` hands them over."""
    site.dismiss()
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
    other = Site(site.fleet, write_checkpoint(tmp_path / "latent", family="deepseek_v2", fields=latent))
    server = other.cast("latent", unlisted("p", "kv_producer", tmp_path))["p"]
    assert "passes the self-test: MLAAttentionSpec; group 0 (4 layers), " in server.log()
    other.dismiss()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (["block_stride"], r"layout: layer '[^']*self_attn.attn': block_stride is \d+, expected"),
        (["block_stride", "head_stride", "head_bytes"], r"the layout of \S*self_attn.attn does not describe"),
    ],
)
def test_an_unlisted_version_whose_blocks_lie_elsewhere_does_not_start(
    site: Site, tmp_path: Path, fields: list[str], reason: str
) -> None:
    """The engine's own check of the layout refuses it, or the bytes that a read brings."""
    site.cast("refused")
    (port,) = free_ports(1)
    program = f"FIELDS = {fields}\n{MISREPORTED}"
    child = unlisted("misreported", "kv_producer", tmp_path, program=program).start(site, port)
    ended, _, _ = select.select([child], [], [], START_S)
    assert ended, child.log_tail()
    log = child.log_path.read_text(errors="replace")
    site.end(child)
    refusal = f"this is vLLM {VERSION}, which is not among the tested versions and fails the self-test: "
    assert re.search(rf"ConfigError: vllm: {re.escape(refusal)}{reason}.*Install 0\.31, 0\.32 or 0\.33", log)
