"""Reading ahead: bounded memory, owners, and loads from what was read while requests waited."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.connectors.storage.connectors import BatonSharedStorageConnector
from baton.connectors.storage.stores.events import ChunkEvents
from baton.connectors.storage.stores.read_ahead import ReadAhead
from baton.connectors.storage.stores.settings import FilesTier
from baton.connectors.store_events import StoreEvents
from baton.core.errors import BadTransferParams
from baton.core.transfer_params import prefetches_of_hints
from baton.engine.request import Request
from tests.connectors.storage_world import BLOCK, CHUNK, WAIT_S, files_in, wait_for
from tests.connectors.test_shared_storage_halves import EMPTY, TABLE, Halves, prefill_of, request_of

A, B, C = (b"a", 0), (b"b", 0), (b"c", 0)


BODY = memoryview(b"body")


def test_a_chunk_is_read_once_for_all_its_owners_and_stays_for_the_last() -> None:
    ahead = ReadAhead(10)
    assert ahead.want("r1", A, 4)
    assert not ahead.want("r2", A, 4)
    assert ahead.find(A) is None
    ahead.keep(A, BODY)
    assert ahead.forget("r1") == []
    assert ahead.find(A) is BODY
    assert ahead.forget("r2") == []
    assert (ahead.find(A), ahead.nbytes) == (None, 0)


def test_memory_is_reserved_when_a_chunk_is_wanted() -> None:
    ahead = ReadAhead(10)
    assert [ahead.want("r", chunk, 4) for chunk in (A, B, C)] == [True, True, False]
    assert sorted(ahead.forget("r")) == [A, B]
    assert ahead.want("r", C, 10)


def test_a_chunk_that_is_read_too_late_or_not_at_all_takes_no_memory() -> None:
    ahead = ReadAhead(10)
    assert ahead.want("r", A, 4)
    assert ahead.forget("r") == [A]
    ahead.keep(A, BODY)
    assert (ahead.find(A), ahead.nbytes) == (None, 0)
    assert ahead.want("r", B, 4)
    ahead.drop(B)
    ahead.drop(B)
    assert ahead.nbytes == 0
    assert ahead.want("r", B, 4)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from("wkdf"), st.sampled_from("xyz"), st.sampled_from([A, B, C]))))
def test_memory_is_bounded_and_all_of_it_is_free_at_the_end(
    calls: list[tuple[str, str, tuple[bytes, int]]],
) -> None:
    ahead = ReadAhead(9)
    for call, owner, chunk in calls:
        if call == "w":
            ahead.want(owner, chunk, 4)
        elif call == "k":
            ahead.keep(chunk, BODY)
        elif call == "d":
            ahead.drop(chunk)
        else:
            ahead.forget(owner)
        assert ahead.nbytes <= 9
    for owner in "xyz":
        ahead.forget(owner)
    assert ahead.nbytes == 0


def stored(tmp_path: Path) -> Halves:
    """The halves of an engine that has stored three chunks."""
    halves = Halves.start(tmp_path)
    halves.shake_hands()
    first = request_of("first", 3 * CHUNK + 1)
    halves.scheduler.on_new_request(first)
    # The request's lookup ends before its chunks are there.
    wait_for(lambda: halves.scheduler.get_num_new_matched_tokens(first, 0)[0] is not None)
    halves.step(prefill_of(first, first.num_tokens))
    halves.step(EMPTY)
    wait_for(lambda: len(files_in(tmp_path)) == 3)
    halves.scheduler.request_finished(first, [])
    return halves


def num_held(halves: Halves) -> int:
    return sum(entry.body is not None for entry in halves.ranks[0]._ahead._entries.values())


def test_what_is_read_ahead_from_a_slower_store_is_written_to_the_faster_one(tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    stored(slow).close()
    halves = Halves.start(slow, path=None, tiers=tuple(FilesTier(path=str(each)) for each in (fast, slow)))
    halves.shake_hands()
    request = request_of("waits", 3 * CHUNK + 1)
    halves.scheduler.on_new_request(request)
    wait_for(lambda: halves.scheduler.get_num_new_matched_tokens(request, 0)[0] == 3 * CHUNK)
    assert len(halves.step(EMPTY).read_ahead) == 1
    wait_for(lambda: len(files_in(fast)) == 3)
    halves.close()


def test_a_request_that_waits_loads_from_host_memory(tmp_path: Path) -> None:
    halves = stored(tmp_path)
    half, (rank,), cache = halves.scheduler, halves.ranks, halves.caches[0]["layer"]
    computed = cache[1:7].clone()
    request = request_of("waits", 3 * CHUNK + 1)
    half.on_new_request(request)
    wait_for(lambda: half.get_num_new_matched_tokens(request, 0)[0] == 3 * CHUNK)
    (order,) = halves.step(EMPTY).read_ahead  # Others are scheduled.
    assert (order.owner, len(order.parts)) == ("waits", 3)
    wait_for(lambda: num_held(halves) == 3)
    assert halves.step(EMPTY).read_ahead == ()
    for path in files_in(tmp_path):
        path.unlink()
    cache.zero_()
    half.update_state_after_alloc(request, TABLE, 3 * CHUNK)
    halves.step(EMPTY)
    rank._transfers.drain()
    rank.get_finished(set())
    assert torch.equal(cache[1:7], computed)
    stats = rank.get_kv_connector_stats()
    assert stats is not None
    assert (stats.data["loaded_chunks"], stats.data["prefetched_chunks"]) == (3, 3)
    assert halves.step(prefill_of(request, 1, 0)).forget == ("waits",)
    assert rank._ahead.nbytes == 0
    halves.close()


def test_what_is_scheduled_at_once_is_not_read_ahead(tmp_path: Path) -> None:
    halves = stored(tmp_path)
    half = halves.scheduler
    request = request_of("at once", 3 * CHUNK + 1)
    half.on_new_request(request)
    wait_for(lambda: half.get_num_new_matched_tokens(request, 0)[0] == 3 * CHUNK)
    half.update_state_after_alloc(request, TABLE, 3 * CHUNK)
    assert halves.step(EMPTY).read_ahead == ()
    halves.close()


def test_a_request_that_ends_while_it_waits_frees_its_memory(tmp_path: Path) -> None:
    halves = stored(tmp_path)
    half = halves.scheduler
    request = request_of("aborted", 3 * CHUNK + 1)
    half.on_new_request(request)
    wait_for(lambda: half.get_num_new_matched_tokens(request, 0)[0] == 3 * CHUNK)
    halves.step(EMPTY)
    half.request_finished(request, [])
    assert half.has_pending_push_work()
    halves.step(EMPTY)
    wait_for(lambda: halves.ranks[0]._ahead.nbytes == 0)
    assert not half.has_pending_push_work()
    halves.close()


def test_a_hint_reads_a_prompt_ahead_until_its_time_is_up(tmp_path: Path) -> None:
    halves = stored(tmp_path)
    half, now = halves.scheduler, [100.0]
    half._clock = lambda: now[0]
    half._events = half._lookups._events = ChunkEvents([StoreEvents(block_tokens=BLOCK)])
    carrier = request_of("carrier", 3)
    carrier.kv_transfer_params = {"baton_prefetch": list(range(2 * CHUNK + 1))}
    half.on_new_request(carrier)
    assert half.has_pending_push_work()
    half.request_finished(carrier, [])
    wait_for(lambda: bool(halves.step(EMPTY).read_ahead))
    wait_for(lambda: num_held(halves) == 2)
    assert not half.has_pending_push_work()
    assert half.take_events() == [], "the host has no names for a hint's blocks"
    now[0] += 31
    halves.step(EMPTY)
    assert halves.ranks[0]._ahead.nbytes == 0
    halves.close()


class RequestWithHints:
    """A request with a field for hints, like a request of vLLM."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.kv_hints: object = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._request, name)


def test_hints_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.connectors.storage.stores.scheduler.HINTS_MAX", 2)
    monkeypatch.setattr("baton.connectors.storage.stores.read_ahead_plan.HINTS_MAX", 2)
    halves = stored(tmp_path)
    half, goes_on = halves.scheduler, threading.Event()
    half.get_kv_connector_stats()

    def hang() -> None:  # A slow store.
        goes_on.wait(WAIT_S)

    half._lookups._jobs.put(hang)

    def hint(number: int) -> SimpleNamespace:
        return SimpleNamespace(
            action_type="prefetch", payload={"token_ids": list(range(number, number + CHUNK))}
        )

    for first in (0, 3):
        request = RequestWithHints(request_of(f"r{first}", 3))
        request.kv_hints = SimpleNamespace(actions=[hint(first + number) for number in range(3)])
        half.on_new_request(request)  # type: ignore[arg-type]
    assert list(half._ahead._hints) == ["hint 3", "hint 4"], (
        "the last two of each request; of these the last two"
    )
    goes_on.set()
    halves.close()
    stats = half.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["looked_up_chunks"] == 2, "what does not count is not looked up"


def test_hints_of_vllm_name_prompts() -> None:
    def action(kind: str, payload: object) -> SimpleNamespace:
        return SimpleNamespace(action_type=kind, payload=payload)

    actions = [
        action("prefetch", {"token_ids": [1, 2]}),
        action("retain", {"token_ids": [3]}),
        action("prefetch", {"token_ids": "4"}),
        action("prefetch", None),
        action("PREFETCH", {"token_ids": [5]}),
    ]
    assert prefetches_of_hints(SimpleNamespace(actions=actions)) == [(1, 2), (5,)]
    assert prefetches_of_hints(None) == []


@pytest.mark.parametrize("tokens", ["1 2", [1, -1], [1.5], [True], [2**32]])
def test_a_wrong_hint_is_named(tokens: object) -> None:
    with pytest.raises(BadTransferParams, match="baton_prefetch: must be a list of token ids"):
        BatonSharedStorageConnector.check_request({"baton_prefetch": tokens})
