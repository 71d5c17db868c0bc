"""Stores of KV and updates of the weights at any moment: what is loaded was computed with these weights."""

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.connectors.storage.memory.copies import CopyEnd
from baton.connectors.storage.memory.scheduler import OffloadSchedulerHalf
from baton.connectors.storage.stores import form
from baton.connectors.storage.stores.scheduler import StorageSchedulerHalf
from baton.core.identity import KVIdentity
from baton.engine.api import EngineRequest
from tests.connectors.test_offload_scheduling import ListCopies, OffloadWorld
from tests.connectors.test_shared_storage_random_worlds import STEMS, StorageWorld, add_some
from tests.connectors.weights_world import NAMES, ChangesWeights
from tests.engine_sched.world import engine_request

pytestmark = pytest.mark.usefixtures("failed_lookups_raise")


class LateCopies(ListCopies):
    """Copies whose ends are reported in the next step."""

    late: Sequence[CopyEnd] = ()

    def take_ended(self) -> list[CopyEnd]:
        ended, self.late = self.late, super().take_ended()
        return list(ended)


class ChangingOffload(ChangesWeights, OffloadWorld):
    def __init__(self, rng: random.Random, folder: Path, **world: Any) -> None:
        self.rng = rng
        super().__init__(**{"num_slots": 60, "make_copies": LateCopies, **world})


class ChangingStorage(ChangesWeights, StorageWorld):
    pass


KINDS = [ChangingOffload, ChangingStorage]
Kind = type[ChangingOffload] | type[ChangingStorage]


def play(kind: Kind, rng: random.Random, folder: Path) -> int:
    """Returns the number of loaded tokens."""
    options: dict[str, Any] = {}
    if kind is ChangingOffload:
        options["num_slots"] = rng.choice([12, 40])
    else:
        options.update(num_ranks=rng.randint(1, 2), rot_share=rng.choice([0.0, 0.05]))
        options["layerwise"] = rng.random() < 0.3
    world: Any = kind(
        rng,
        folder,
        caching=False,
        num_blocks=rng.randint(16, 40),
        budget=rng.choice([8, 40]),
        max_num_seqs=rng.randint(1, 6),
        **options,
    )
    for number in range(rng.randint(4, 14)):
        add_some(world, number)
        if rng.random() < 0.4 and not world.scheduler.remote.arriving_requests():
            running = [request.request_id for request in world.scheduler.queues.running]
            kept = {request_id for request_id in running if rng.random() < 0.5}
            world.change_weights(*rng.choice(NAMES), kept=kept)
    world.run()
    world.check()
    return sum(answer.last.num_transferred_tokens for answer in world.answers.values() if answer.last)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=60, deadline=None)
def test_every_loaded_block_was_computed_with_the_current_weights(kind: Kind, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(form, "SECTION_BYTES_MIN", 1)
        play(kind, random.Random(seed), Path(folder))


def play_many(kind: Kind) -> None:
    for seed in (21, 57, 127, *range(200)):  # The first ones find faults that few worlds find.
        with tempfile.TemporaryDirectory() as folder:
            play(kind, random.Random(seed), Path(folder))


# --- Faults that these worlds find --------------------------------------------------------------------


def leave_out_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVIdentity, "digest", property(lambda identity: "the same for all weights"))


def after_change(act: Callable[[Any], None]) -> Callable[[pytest.MonkeyPatch], None]:
    @wraps(act)
    def spoil(patch: pytest.MonkeyPatch) -> None:
        for kind in (OffloadSchedulerHalf, StorageSchedulerHalf):
            change: Any = kind.set_weights

            def spoilt(
                half: Any, weights: str | None, version: str | None, change: Any = change
            ) -> bool | None:
                is_done: bool | None = change(half, weights, version)
                act(half)
                return is_done

            patch.setattr(kind, "set_weights", spoilt)

    return spoil


@after_change
def keep_stale_requests(half: Any) -> None:
    for prompt in half._prompts.values():
        prompt.is_stale = False


@after_change
def deliver_loads(half: Any) -> None:
    if isinstance(half, OffloadSchedulerHalf):
        half._failed_loads.clear()
    else:
        half._cancel.clear()
        half._loads = [replace(load, is_failed=False) for load in half._loads]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spoil", [leave_out_weights, keep_stale_requests, deliver_loads])
def test_the_worlds_find_faults(kind: Kind, spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch)
    with pytest.raises(AssertionError):
        play_many(kind)


# --- One case at a time -------------------------------------------------------------------------------


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return request.param(random.Random(1), tmp_path, caching=False, num_blocks=60)


def first(name: str, max_tokens: int = 1) -> EngineRequest:
    return engine_request(name, STEMS[0][:37], max_tokens=max_tokens)


def test_weights_that_come_back_find_their_chunks_again(world: Any) -> None:

    def num_loaded(name: str) -> int:
        loaded: int = world.serve_again(name, first(name))
        return loaded

    start = world.half._identity.kv_identity if isinstance(world, ChangingStorage) else None
    assert [num_loaded("first"), num_loaded("again")] == [0, 36]
    world.change_weights(None, "a")
    assert [num_loaded("a"), num_loaded("a again")] == [0, 36]
    world.change_weights()
    assert [num_loaded("unnamed"), num_loaded("unnamed again")] == [0, 36]
    world.change_weights(None, "a")
    assert num_loaded("back") == 36
    world.change_weights()
    assert num_loaded("other unnamed") == 0
    if start is not None:  # The same folder, loaded again.
        world.change_weights(start.weights, None)
        assert num_loaded("the first weights") == 36
    world.check()


def test_after_a_reset_nothing_is_found(world: Any) -> None:
    world.serve_again("first", first("first"))
    assert world.half.reset_cache() is True
    world._use_current_weights(world.answers["first"].asked)
    assert world.serve_again("again", first("again")) == 0
    world.check()


@pytest.mark.parametrize("num_steps", range(4))
def test_a_load_under_way_is_computed(world: Any, num_steps: int) -> None:
    world.serve_again("first", first("first"))
    world.add(first("second", max_tokens=3))
    for _ in range(num_steps):
        world.step()
    is_loading = world.scheduler.remote.num_loading
    world.change_weights(None, "new")
    world.run()
    world.check()
    if is_loading:
        assert world.answers["second"].last.num_transferred_tokens == 0
    assert len(world.answers["second"].token_ids) == 3
