"""Offload under the real scheduler, one case at a time, with ranks whose KV can be checked.

Worlds of `lab.sim` draw several ranks, and copies that are late or fail.
"""

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from baton.connectors.prompt_identity import WITHOUT_ADAPTERS, RequestNames, UnnamedPrompt
from baton.connectors.storage.memory.copies import Copies, CopyEnd
from baton.connectors.storage.memory.identity import OffloadIdentity
from baton.connectors.storage.memory.scheduler import OffloadSchedulerHalf
from baton.connectors.storage.memory.settings import GIB, OffloadSettings
from baton.connectors.storage.memory.worker import OffloadWorkerHalf
from baton.core.errors import ConfigError
from baton.engine.request import Request
from baton.testing.host.memory import RankMemory
from baton.testing.host.model import Words
from baton.testing.host.ranks import Ranks
from tests.connectors.host_views import view_fields
from tests.connectors.store_world import StoreWorld
from tests.engine_sched.world import (
    BLOCK,
    engine_config,
    engine_request,
)

STEMS = [[1 + (7 * stem + i) % 48 for i in range(40)] for stem in range(3)]


class ListCopies(Copies):
    """Copies in memory, at once."""

    def __init__(self, memory: RankMemory, num_rows: int) -> None:
        self.blocks = memory.words
        self.rows: list[Words | None] = [None] * num_rows
        self.ended: list[CopyEnd] = []

    def store(self, job: int, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        for block_id, row in zip(block_ids, rows, strict=True):
            self.rows[row] = self.blocks[block_id].copy()
        self.ended.append(CopyEnd(job))

    def load(self, job: int, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        for block_id, row in zip(block_ids, rows, strict=True):
            self.blocks[block_id] = self.rows[row]
        self.ended.append(CopyEnd(job))

    def take_ended(self) -> list[CopyEnd]:
        ended, self.ended = self.ended, []
        return ended

    def wait(self, jobs: Collection[int], timeout_s: float) -> bool:
        return True

    def close(self, timeout_s: float) -> None:
        return


class OffloadWorld(StoreWorld):
    def __init__(
        self,
        *,
        num_slots: int = 12,
        num_blocks: int = 20,
        settings: dict[str, Any] | None = None,
        make_copies: type[ListCopies] = ListCopies,
        names: RequestNames = WITHOUT_ADAPTERS,
        **engine: Any,
    ) -> None:
        config = engine_config(num_blocks=num_blocks, max_model_len=60, **engine)
        offload = OffloadSettings(cpu_gib=1.0, **(settings or {}))
        groups = config.kv_cache_groups
        identity = OffloadIdentity(
            **view_fields(),
            settings=offload,
            block_tokens=BLOCK,
            block_bytes=GIB // num_slots // len(groups) // offload.blocks_per_chunk,
            groups=groups,
            names=names,
        )
        self.now_s = 0.0
        self.half = OffloadSchedulerHalf(identity, clock=lambda: self.now_s)
        ranks = Ranks(config)
        copies = make_copies(ranks.memories[0], identity.num_rows)
        worker = OffloadWorkerHalf(identity, lambda caches, identity: copies)
        worker._copies = copies  # There are no tensors to register.
        super().__init__(config, self.half, ranks, [worker])

    def serve(self, name: str, prompt: Sequence[int], **request: Any) -> None:
        self.add(engine_request(name, prompt, max_tokens=1, **request))
        self.run()

    def num_kept(self, name: str, prompt: Sequence[int], **request: Any) -> int:
        """Blocks of a prompt that returns."""
        assert self.scheduler.reset_prefix_cache()
        self.serve(name, prompt, **request)
        last = self.answers[name].last
        assert last is not None
        return last.num_transferred_tokens // BLOCK

    def check(self, on_failure: str = "recompute") -> None:
        super().check(on_failure)
        assert not self.half._stores
        assert not self.half._loads
        assert not self.half._prompts
        self.half._index.assert_consistent()


def test_the_end_of_a_prompt_is_evicted_first() -> None:
    """Nothing of a prompt can be found without its beginning."""
    world = OffloadWorld(num_slots=12, num_blocks=60)
    for name, prompt in {"a": STEMS[0], "b": STEMS[1][:16]}.items():  # Ten chunks, and four.
        world.add(engine_request(name, prompt, max_tokens=1))
        world.run()
    assert world.scheduler.reset_prefix_cache()
    world.add(engine_request("again", STEMS[0], max_tokens=3))
    world.run()
    last = world.answers["again"].last
    assert last is not None
    assert last.num_transferred_tokens == 8 * BLOCK
    world.check()


class NamedByFirstWord(RequestNames):
    """Names of requests as if they had other inputs than tokens: the first word of their ids."""

    def extra_of(self, request: Any) -> bytes:
        first: str = request.request_id.split()[0]
        if first == "unnamed":
            raise UnnamedPrompt("cannot be named")
        return first.encode()


def test_chunks_are_found_by_requests_of_the_same_inputs_only() -> None:
    world = OffloadWorld(num_slots=60, num_blocks=60, names=NamedByFirstWord())
    for inputs, num_kept in (("image", 9), ("embeddings", 9), ("unnamed", 0)):
        assert world.num_kept(f"{inputs} 1", STEMS[0]) == 0
        assert world.num_kept(f"{inputs} 2", STEMS[0]) == num_kept
    world.check()


def test_a_chunk_that_has_partly_left_a_window_is_not_stored() -> None:
    """The engine's own cache still has the prompt, but host memory does not."""
    world = OffloadWorld(num_slots=60, num_blocks=60, windows=(None, 9))
    world.add(engine_request("first", STEMS[0][:32], max_tokens=1))
    world.run()
    world.half.reset_cache()
    world.add(engine_request("longer", [*STEMS[0][:32], *STEMS[1][:8]], max_tokens=1))
    world.run()
    assert world.scheduler.reset_prefix_cache()
    world.add(engine_request("short", STEMS[0][:9], max_tokens=3))
    world.run()
    world.check()


def test_only_blocks_within_a_window_are_loaded() -> None:
    world = OffloadWorld(num_slots=60, num_blocks=60, windows=(None, 9))
    world.add(engine_request("a", STEMS[0], max_tokens=1))
    world.run()
    assert world.scheduler.reset_prefix_cache()
    world.add(engine_request("again", STEMS[0], max_tokens=3))
    metadata = world.scheduler.schedule().kv_connector_metadata
    (load,) = metadata.loads  # type: ignore[union-attr]
    # Nine full blocks with full attention; three blocks for nine tokens of a window and one more.
    assert len(load.block_ids) == len(set(load.block_ids)) == 9 + 3


def test_chunks_longer_than_a_window_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="blocks_per_chunk: chunks must not be longer than the window of 9 tokens"
    ):
        OffloadWorld(windows=(None, 9), settings={"blocks_per_chunk": 4})


# --- Retention --------------------------------------------------------------------------------------


def retention(**asked: Any) -> dict[str, Any]:
    return {"baton_retention": asked}


def test_a_prompt_with_a_priority_stays_until_its_ttl_is_over() -> None:
    world = OffloadWorld(num_slots=12, num_blocks=60)
    world.serve("kept", STEMS[0][:21], params=retention(priority=5, ttl_s=60))
    world.serve("b", STEMS[1])
    world.serve("c", STEMS[2])
    world.now_s = 59.0
    assert world.num_kept("again", STEMS[0][:21]) == 5
    world.now_s = 59.0 + 60.0  # The TTL counts from the last use.
    world.serve("d", STEMS[1])
    assert world.num_kept("late", STEMS[0][:21]) == 0
    world.check()


def test_a_tenant_evicts_its_own_chunks_only() -> None:
    world = OffloadWorld(num_slots=12, num_blocks=60, settings={"tenant_max_share": 0.5})
    world.serve("other", STEMS[0][:21], salt="other")
    for stem in (1, 2, 1, 2):
        world.serve(f"flood-{len(world.answers)}", STEMS[stem], params={"baton_tenant": "flood"})
    assert world.num_kept("again", STEMS[0][:21], salt="other") == 5
    assert world.half._index.num_free == 1, "six slots of one tenant, five of the other"
    world.check()


def test_chunks_of_an_ended_session_make_room_first() -> None:
    world = OffloadWorld(num_slots=12, num_blocks=60)
    shared, own = STEMS[0][:9], [*STEMS[0][:8], *STEMS[1][:13]]
    world.serve("system", shared)
    world.serve("plain", STEMS[2][:13])
    world.serve("turn", own, session="s")
    world.serve("last", own, session="s", params=retention(ends_session=True))
    world.serve("new", STEMS[1][:28])  # Four slots are free, and it takes seven.
    assert world.num_kept("plain again", STEMS[2][:13]) == 3
    assert world.num_kept("shared again", shared) == 2
    assert world.num_kept("turn again", own) == 2, "what only the session has used is gone"
    world.check()


def ask_for_loan(world: OffloadWorld, params: dict[str, Any]) -> dict[str, Any] | None:
    """Asks for a loan of the five chunks of the first stem; the pull protocol is left out."""
    half = world.half
    half._lender = SimpleNamespace(lend=lambda *args: (5 * BLOCK, {"baton_ticket": "t"}))  # type: ignore[assignment]
    request = Request(engine_request("loan", STEMS[0][:21], params=params), block_size=BLOCK)
    half.on_new_request(request)
    is_held, answer = half.request_finished(request, [])
    half._lender = None
    assert not is_held
    return answer


def test_a_loan_does_not_get_the_priority_of_the_request_before_it() -> None:
    world = OffloadWorld(num_slots=12, num_blocks=60)
    world.serve("lent", STEMS[0][:21])
    world.serve("kept", STEMS[1][:9], params=retention(priority=5))
    lent = ask_for_loan(world, {"baton_lend_stored": True})
    assert lent == {"baton_ticket": "t", "baton_cached_tokens": 5 * BLOCK}
    world.serve("new", STEMS[2])  # This request takes all slots that may be evicted.
    assert world.num_kept("again", STEMS[0][:21]) == 0
    world.check()


def test_what_another_connector_lends_from_the_cache_is_not_lent_twice() -> None:
    world = OffloadWorld(num_slots=12, num_blocks=60)
    world.serve("lent", STEMS[0][:21])
    assert ask_for_loan(world, {"baton_lend_stored": True, "do_remote_decode": True}) is None
