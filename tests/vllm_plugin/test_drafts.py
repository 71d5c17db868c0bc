"""A draft model that only D has: its layers are told apart, left out of reads, and zeroed."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from baton.connectors.pull import EngineIdentity, PullSchedulerHalf, PullWorkerHalf
from baton.core.config import EngineConfig
from baton.core.ids import Epoch
from baton.core.layout import SLOT
from baton.hosts.vllm.drafts import last_layers
from baton.hosts.vllm.host_policy import vllm_policy
from tests.connectors import pull_world
from tests.connectors.pull_world import BLOCK
from tests.vllm_plugin.world import VllmEngine, VllmWorld

DRAFT = "draft_model.layers.0"
STALE = 7.0  # KV of an earlier request.
PROMPT = list(range(20, 32))  # Three blocks; the first is in D's cache.


def test_the_last_layers_are_the_drafts() -> None:
    two_caches = [("model.0.attn", 0), ("model.0.indexer", 0), ("model.1.attn", 1), ("model.1.indexer", 1)]
    with_draft = [*two_caches, ("model.2.attn", 2), ("model.2.indexer", 2)]
    assert last_layers(with_draft, 2, 1) == {"model.2.attn", "model.2.indexer"}
    assert last_layers(two_caches, 2, 1) == frozenset()  # A pipeline stage without the draft.


@pytest.mark.parametrize(("num_target", "num_draft"), [(2, 2), (1, 1)])
def test_unexpected_numbers_of_layers_make_none_a_drafts(
    caplog: pytest.LogCaptureFixture, num_target: int, num_draft: int
) -> None:
    registered = [("a.0", 0), ("a.1", 1), ("b.0", 0)]
    assert last_layers(registered, num_target, num_draft) == frozenset()
    assert "3 layers with a cache are registered" in caplog.text


class DraftingEngine(VllmEngine):
    """An engine whose last layer is a draft model's."""

    digest = ""

    def _identity(self, config: EngineConfig) -> EngineIdentity:
        policy = vllm_policy(
            find_packing=lambda caches: SLOT, find_drafts=lambda names: (DRAFT,) if self.digest else ()
        )
        return msgspec.structs.replace(EngineIdentity.of_engine(config), draft=self.digest, policy=policy)

    def make_half(self, config: EngineConfig, url: str, epoch: Epoch) -> PullSchedulerHalf:
        return PullSchedulerHalf(
            self._identity(config),
            epoch=epoch,
            clock=lambda: self.world.now,
            control=lambda agent, lock: pull_world.Station(self.world, url, agent),
        )

    def make_worker(self, config: EngineConfig, epoch: Epoch, **parts: Any) -> PullWorkerHalf:
        return DraftingWorker(self._identity(config), epoch=epoch, **parts)

    @property
    def draft_cache(self) -> torch.Tensor:
        [worker] = self.workers
        assert isinstance(worker, DraftingWorker)
        return worker.draft_cache


class DraftingWorker(PullWorkerHalf):
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.draft_cache = torch.full_like(next(iter(kv_caches.values())), STALE)
        drafts = {DRAFT: self.draft_cache} if self._identity.draft else {}
        super().register_kv_caches(kv_caches | drafts)


class EngineA(DraftingEngine):
    digest = "a"


class EngineB(DraftingEngine):
    digest = "b"


@pytest.fixture
def world() -> Iterator[VllmWorld]:
    world = VllmWorld()
    yield world
    world.close()


@pytest.mark.parametrize(
    ("p_kind", "d_kind", "expected"),
    [
        (VllmEngine, EngineA, 0.0),
        (EngineB, EngineA, 0.0),
        (EngineA, EngineA, 1.0),
        (EngineA, VllmEngine, None),
    ],
)
def test_the_models_layers_arrive_and_the_drafts_are_those_of_the_same_draft_or_zero(
    world: VllmWorld, p_kind: type[VllmEngine], d_kind: type[VllmEngine], expected: float | None
) -> None:
    world.engine_kind = p_kind
    p = world.engine("p")
    world.engine_kind = d_kind
    d = world.engine("d")
    if isinstance(p, DraftingEngine):
        p.draft_cache[:] = 1.0
    request = d.submit("r", PROMPT, p.prefill("r", PROMPT))
    d.half.get_num_new_matched_tokens(request, BLOCK)
    d.admit(request, num_local=BLOCK)
    world.settle()
    block_ids = d.read_out(request).block_ids
    assert d.holds(PROMPT, block_ids)
    if isinstance(d, DraftingEngine):
        local, *loaded = block_ids
        others = sorted({*range(len(d.draft_cache))} - {*loaded})
        assert (d.draft_cache[loaded] == expected).all()
        assert local in others
        assert (d.draft_cache[others] == STALE).all()
    world.assert_settles_whole()
