"""KV events of stores: which chunks can be found in them, as far as this engine knows.

    written   every rank has a store that has its part       stored
    found     a lookup                                       stored; or removed, if it is not there any more
    lost      a rank's load found it gone or damaged         removed
    evicted   a sweep of this engine                         removed, unless another store has it
    cleared   the weights have changed                       all removed

A write that failed on any rank is not reported, nor is what was evicted or lost before its report came. What
other engines, servers and commands remove is noticed by the next lookup or load. No I/O.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from baton.connectors.storage.stores.metadata import SaveId
from baton.connectors.storage.stores.prompts import Prompt
from baton.connectors.store_events import StoreEvents
from baton.core.kv_events import KVCacheEvent

EVENT_CHUNKS_MAX = 1 << 16  # Chunks that one engine follows, for each kind of layers.


@dataclass(slots=True)
class _Save:
    prompt: Prompt
    index: int  # Index of the chunk in the prompt.
    tail: int
    is_valid: bool = True


class Sighting(NamedTuple):
    """What a lookup has seen of one kind of a chunk."""

    key: bytes
    kind: int
    chunk: int  # Index of the chunk in the prompt.
    tail: int
    is_stored: bool


class ChunkEvents:
    """Only `looking_up` and `sweeping` are thread-safe; the scheduler's thread calls the other methods."""

    def __init__(self, of_kinds: Sequence[StoreEvents]) -> None:
        """`of_kinds`: for each kind of layers, its events."""
        self._of_kinds = tuple(of_kinds)
        self._saves: dict[SaveId, _Save] = {}
        self._lock = threading.Lock()  # Guards the fields below.
        self._seen: list[tuple[Prompt, list[Sighting]]] = []
        self._evicted: set[bytes] = set()  # Chunks evicted since the last `take`.
        self._num_sweeps = self._num_clears = 0
        self._last_evicted: frozenset[bytes] = frozenset()
        self._is_sweeping = False

    @property
    def is_waiting(self) -> bool:
        """Whether the ranks will report writes."""
        return bool(self._saves)

    def saving(self, save: SaveId, prompt: Prompt, index: int, tail: int) -> None:
        """The ranks are told to save a chunk. They report each save once."""
        self._saves[save] = _Save(prompt, index, tail)

    def written(self, ended: Iterable[SaveId], failed: Collection[SaveId]) -> None:
        """All ranks have reported these saves. `failed`: at least one of them has not written it."""
        found: dict[tuple[int, int], tuple[Prompt, list[tuple[int, bytes, range]]]] = {}
        for save_id in ended:
            save = self._saves.pop(save_id, None)
            if save is None or save_id in failed or not save.is_valid:
                continue
            _, key, kind = save_id
            blocks = save.prompt.stored_blocks(save.index, save.tail, kind)
            found.setdefault((id(save.prompt), kind), (save.prompt, []))[1].append((save.index, key, blocks))
        for (_, kind), (prompt, chunks) in found.items():
            chunks.sort(key=lambda chunk: chunk[0])
            self._store(prompt, kind, [(key, blocks) for _, key, blocks in chunks])

    def lost(self, chunks: Iterable[tuple[bytes, int]]) -> None:
        """Keys and kinds of what a rank could not load, because it is gone or was removed as damaged."""
        for key, kind in chunks:
            self._of_kinds[kind].removed(key)
            self._doubt({key})

    def clear(self) -> None:
        """Nothing that was stored can be found any more."""
        self._doubt({key for _, key, _ in self._saves})
        with self._lock:
            self._num_clears += 1
            self._seen.clear()
        for events in self._of_kinds:
            events.clear()

    @contextmanager
    def looking_up(self, prompt: Prompt) -> Iterator[list[Sighting]]:
        """The context of a lookup, which adds what it sees, in the prompt's order. Dropped if it raises."""
        with self._lock:
            num_sweeps, num_clears = self._num_sweeps, self._num_clears
        seen: list[Sighting] = []
        yield seen
        with self._lock:
            # A sweep that ended meanwhile may have removed a chunk after it was seen.
            evicted = self._last_evicted if num_sweeps != self._num_sweeps else frozenset()
            if num_clears == self._num_clears:
                self._seen.append((prompt, [one for one in seen if one.key not in evicted]))

    @contextmanager
    def sweeping(self) -> Iterator[set[bytes]]:
        """The context of a sweep, which adds the keys of the chunks that no store has any more."""
        evicted: set[bytes] = set()
        with self._lock:
            self._is_sweeping = True
        try:
            yield evicted
        finally:
            with self._lock:
                self._is_sweeping = False
                self._num_sweeps += 1
                self._last_evicted = frozenset(evicted)
                self._evicted |= evicted
                self._seen = [(p, [one for one in seen if one.key not in evicted]) for p, seen in self._seen]

    def take(self) -> list[KVCacheEvent]:
        """Events since the last call. What a lookup saw during a sweep is reported after the sweep."""
        with self._lock:
            evicted, self._evicted = self._evicted, set()
            seen: list[tuple[Prompt, list[Sighting]]] = []
            if not self._is_sweeping:
                seen, self._seen = self._seen, []
        for key in evicted:
            for events in self._of_kinds:
                events.removed(key)
        self._doubt(evicted)
        for prompt, of_prompt in seen:
            self._report(prompt, of_prompt)
        return [event for events in self._of_kinds for event in events.take()]

    def _report(self, prompt: Prompt, seen: Sequence[Sighting]) -> None:
        for kind, events in enumerate(self._of_kinds):
            of_kind = [one for one in seen if one.kind == kind]
            for one in of_kind:
                if not one.is_stored:
                    events.removed(one.key)
            stored = [
                (one.key, prompt.stored_blocks(one.chunk, one.tail, kind)) for one in of_kind if one.is_stored
            ]
            self._store(prompt, kind, stored)

    def _store(self, prompt: Prompt, kind: int, chunks: Sequence[tuple[bytes, range]]) -> None:
        """A request may have lost its last token since, and the name of the block with it."""
        num_blocks = prompt.request.num_tokens // prompt.block_tokens
        known = [(key, blocks) for key, blocks in chunks if blocks.stop <= num_blocks]
        self._of_kinds[kind].stored(prompt.request, known)

    def _doubt(self, keys: Collection[bytes]) -> None:
        """Chunks with these keys were removed. Reports of earlier writes may come later."""
        for (_, key, _), save in self._saves.items() if keys else ():
            if key in keys:
                save.is_valid = False
