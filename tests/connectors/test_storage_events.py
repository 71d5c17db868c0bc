"""KV events of stores: true when they are reported, whatever the order of writes, lookups and sweeps."""

from typing import Any

from baton.connectors.storage.stores.events import ChunkEvents, Sighting
from baton.connectors.storage.stores.layer_kinds import kinds_of
from baton.connectors.storage.stores.prompts import Prompt
from baton.connectors.store_events import EventGroup, StoreEvents
from baton.core.hashing import root_hash
from baton.core.kv_events import MEDIUM_STORAGE, BlockStored
from baton.core.kv_groups import KVCacheGroup
from baton.engine.api import EngineRequest, SamplingParams
from baton.engine.request import Request

BLOCK, CHUNK_BLOCKS = 4, 2
CHUNK = BLOCK * CHUNK_BLOCKS
FULL = (KVCacheGroup((0,)),)
HYBRID = (KVCacheGroup((0,)), KVCacheGroup((1,), 3))  # A chunk's file has one block of the window.


def prompt_of(num_tokens: int = 4 * CHUNK, groups: tuple[KVCacheGroup, ...] = FULL, **fields: Any) -> Prompt:
    asked = EngineRequest(
        request_id="r",
        prompt_token_ids=list(range(num_tokens)),
        sampling_params=SamplingParams(),
        arrival_time_s=0,
        **fields,
    )
    kinds = kinds_of(groups, chunk_blocks=CHUNK_BLOCKS, block_tokens=BLOCK)
    prompt = Prompt(Request(asked, block_size=BLOCK), CHUNK, BLOCK, root_hash("seed"), kinds)
    prompt.extend_keys()
    return prompt


def events_of(num_kinds: int = 1, chunks_max: int | None = None) -> ChunkEvents:
    groups = [EventGroup(index if num_kinds > 1 else None) for index in range(num_kinds)]
    return ChunkEvents(
        [
            StoreEvents(block_tokens=BLOCK, medium=MEDIUM_STORAGE, groups=[group], chunks_max=chunks_max)
            for group in groups
        ]
    )


def heard(events: ChunkEvents, prompt: Prompt) -> list[str]:
    """The events: stored (+) or removed (-), the blocks by their number in the prompt, and the group."""
    numbers = {block: number for number, block in enumerate(prompt.request.block_hashes)}  # type: ignore[attr-defined]
    found = []
    for event in events.take():
        assert event.medium == MEDIUM_STORAGE  # type: ignore[union-attr]
        blocks = [numbers[block] for block in event.block_hashes]  # type: ignore[union-attr,index]
        if isinstance(event, BlockStored):
            first, end = blocks[0] * BLOCK, (blocks[-1] + 1) * BLOCK
            assert event.token_ids == prompt.request.all_token_ids[first:end]
            assert numbers.get(event.parent_block_hash, -1) == blocks[0] - 1  # type: ignore[call-overload]
        sign = "+" if isinstance(event, BlockStored) else "-"
        found.append(f"{sign}{blocks}" + ("" if event.group_idx is None else f" of {event.group_idx}"))  # type: ignore[union-attr]
    return found


def save(events: ChunkEvents, prompt: Prompt, *indices: int, step: int = 1, kind: int = 0) -> set[Any]:
    ids = set()
    for index in indices:
        save_id = (step, prompt.keys[index], kind)
        events.saving(save_id, prompt, index, 0)
        ids.add(save_id)
    return ids


def seen(prompt: Prompt, *found: bool) -> list[Sighting]:
    return [Sighting(prompt.keys[index], 0, index, 0, is_stored) for index, is_stored in enumerate(found)]


def test_a_chunk_is_reported_when_every_rank_has_written_it() -> None:
    events, prompt = events_of(), prompt_of()
    saves = save(events, prompt, 0, 1, 3)
    assert heard(events, prompt) == []
    assert events.is_waiting
    events.written(saves, failed=())
    assert heard(events, prompt) == ["+[0, 1, 2, 3]", "+[6, 7]"]
    assert not events.is_waiting


def test_a_failed_write_gives_no_event() -> None:
    events, prompt = events_of(), prompt_of()
    saves = save(events, prompt, 0, 1)
    events.written(saves, failed={(1, prompt.keys[1], 0)})
    assert heard(events, prompt) == ["+[0, 1]"]


def test_what_is_evicted_or_lost_before_the_report_of_its_write_gives_no_event() -> None:
    events, prompt = events_of(), prompt_of()
    saves = save(events, prompt, 0, 1, 2)
    with events.sweeping() as evicted:
        evicted.add(prompt.keys[0])
    events.lost([(prompt.keys[1], 0)])
    assert heard(events, prompt) == []
    events.written(saves, failed=())
    assert heard(events, prompt) == ["+[4, 5]"]


def test_a_lookup_reports_what_is_there_and_what_is_not_any_more() -> None:
    events, prompt = events_of(), prompt_of()
    with events.looking_up(prompt) as found:
        found += seen(prompt, True, True, True, False)
    assert heard(events, prompt) == ["+[0, 1, 2, 3, 4, 5]"]
    with events.looking_up(prompt) as found:  # Another engine has evicted the second chunk.
        found += seen(prompt, True, False, False)
    assert heard(events, prompt) == ["-[2, 3]", "-[4, 5]"]


def test_a_lookup_that_fails_reports_nothing() -> None:
    events, prompt = events_of(), prompt_of()
    try:
        with events.looking_up(prompt) as found:
            found += seen(prompt, True)
            raise OSError("the bucket does not answer")
    except OSError:
        assert heard(events, prompt) == []


def test_what_a_sweep_evicts_is_not_reported_by_a_lookup_that_saw_it_before() -> None:
    events, prompt = events_of(), prompt_of()
    with events.sweeping() as evicted:
        with events.looking_up(prompt) as found:
            found += seen(prompt, True, True)
        assert heard(events, prompt) == [], "the sweep may have removed them"
        late = events.looking_up(prompt)
        found = late.__enter__()
        found += seen(prompt, True, True, True)
        evicted.add(prompt.keys[1])
    late.__exit__(None, None, None)
    assert heard(events, prompt) == ["+[0, 1]", "+[4, 5]"]


def test_an_evicted_chunk_is_removed_and_can_come_back() -> None:
    events, prompt = events_of(), prompt_of()
    events.written(save(events, prompt, 0), failed=())
    assert heard(events, prompt) == ["+[0, 1]"]
    with events.sweeping() as evicted:
        evicted.update({prompt.keys[0], b"another engine's"})
    assert heard(events, prompt) == ["-[0, 1]"]
    events.written(save(events, prompt, 0, step=2), failed=())
    assert heard(events, prompt) == ["+[0, 1]"]


def test_a_block_of_a_tail_and_of_a_chunk_is_removed_with_the_last_of_them() -> None:
    events, short, longer = events_of(), prompt_of(CHUNK + BLOCK), prompt_of()
    (tail,) = short.tail_keys(1)
    events.saving((1, tail, 0), short, 1, 1)
    events.written({(1, tail, 0)}, failed=())
    events.written(save(events, longer, 1), failed=())
    assert heard(events, longer) == ["+[2]", "+[2, 3]"]
    events.lost([(tail, 0)])
    assert heard(events, longer) == []
    events.lost([(longer.keys[1], 0)])
    assert heard(events, longer) == ["-[2, 3]"]


def test_each_kind_of_layers_reports_the_blocks_that_its_files_have() -> None:
    events, prompt = events_of(2), prompt_of(groups=HYBRID)
    saves = save(events, prompt, 0, 1) | save(events, prompt, 1, kind=1)
    events.written(saves, failed=())
    assert heard(events, prompt) == ["+[0, 1, 2, 3] of 0", "+[3] of 1"]
    events.lost([(prompt.keys[1], 1)])
    assert heard(events, prompt) == ["-[3] of 1"]


def test_the_first_chunks_are_withdrawn_when_there_are_too_many() -> None:
    events, prompt = events_of(chunks_max=3), prompt_of()
    with events.looking_up(prompt) as found:
        found += seen(prompt, True, True, True, True)
    assert heard(events, prompt) == ["+[0, 1, 2, 3, 4, 5, 6, 7]", "-[0, 1]"]


def test_events_have_the_salt_of_a_prompts_first_block() -> None:
    events, prompt = events_of(), prompt_of(cache_salt="tenant")
    events.written(save(events, prompt, 0, 2), failed=())
    assert [event.extra_keys for event in events.take()] == [[("tenant",), None], [None, None]]  # type: ignore[union-attr]
