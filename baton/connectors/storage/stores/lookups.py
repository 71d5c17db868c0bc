"""Lookups of prompts: as far as everything that the layers need at its end is stored (`layer_kinds`)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from baton.connectors.storage.stores.events import ChunkEvents, Sighting
from baton.connectors.storage.stores.identity import StorageIdentity
from baton.connectors.storage.stores.layer_kinds import num_served
from baton.connectors.storage.stores.lookup_thread import LookupThread
from baton.connectors.storage.stores.prompts import NOTHING, Found, HintedRequest, Prompt
from baton.core.hashing import BlockHash
from baton.core.kv_groups import has_states
from baton.stores.backends.tiers import Place, Tiers
from baton.stores.base.chunk_name import ChunkName

CHUNKS_AT_ONCE = 64  # Looked up at a time; the lookup ends with the first that is not stored.


class PromptLookups(LookupThread[Found]):
    def __init__(
        self,
        identity: StorageIdentity,
        tiers: Tiers,
        events: ChunkEvents | None,
        on_end: Callable[[], None],
        *,
        namespaces: Callable[[], tuple[str, ...]],
    ) -> None:
        """`namespaces`: those of the weights that the host has now; read on the thread, too."""
        super().__init__(NOTHING, identity.settings, on_end)
        self._identity = identity
        self._kinds = identity.layer_kinds
        self._tiers = tiers
        self._events = events
        self._namespaces = namespaces
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def look_up(self, prompt: Prompt, now: float) -> None:
        """Also for an engine that only saves, because stored chunks need no copy."""
        namespaces, keys = self._namespaces(), list(prompt.extend_keys())
        if has_states(self._identity.groups):  # The state after all tokens cannot compute the last one again.
            del keys[(prompt.request.num_tokens - 1) // self._identity.chunk_tokens :]
        if namespaces and (keys or prompt.tail_keys(0)):
            prompt.lookup = self.begin(partial(self._find, prompt, namespaces, keys), now)

    def take_counts(self) -> Counter[str]:
        """Counts of StorageStats."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts

    # --- Thread ----------------------------------------------------------------------------------

    def _find(self, prompt: Prompt, namespaces: tuple[str, ...], keys: list[BlockHash]) -> Found:
        """A value that exists is whole; the load verifies its content. Raises StoreError."""
        # A hint is not reported: the host has no names for its blocks.
        events = None if isinstance(prompt.request, HintedRequest) else self._events
        seeing: AbstractContextManager[list[Sighting]]
        seeing, found = nullcontext([]) if events is None else events.looking_up(prompt), NOTHING
        try:
            with seeing as seen:
                if namespaces == self._namespaces():  # Otherwise the weights have changed.
                    found = self._find_prefix(prompt, namespaces, keys, seen)
        finally:
            with self._lock:
                self._counts.update(looked_up_chunks=len(keys), found_chunks=found.num_chunks)
        return found

    def _find_prefix(
        self, prompt: Prompt, namespaces: tuple[str, ...], keys: list[BlockHash], seen: list[Sighting]
    ) -> Found:
        """What can be loaded. Adds to `seen`. Raises StoreError."""
        kinds = {kind: number for number, kind in enumerate(self._kinds)}
        places: list[list[Place | None]] = []  # Places by chunk and kind.
        while len(places) < len(keys):
            batch = self._locate(keys[len(places) : len(places) + CHUNKS_AT_ONCE], namespaces)
            places += batch
            if self._kinds[0].window is None and None in [of_kinds[0] for of_kinds in batch]:
                break  # No longer prefix can be served.
        num_stored = num_served(
            self._kinds, len(places), lambda kind, chunk: places[chunk][kinds[kind]] is not None
        )
        tails = prompt.tail_keys(num_stored)
        of_tails = self._locate(tails, namespaces)
        tail = max(
            (blocks for blocks, (place,) in enumerate(of_tails, start=1) if place is not None), default=0
        )
        seen += [
            Sighting(keys[index], kind, index, 0, place is not None)
            for index, of_kinds in enumerate(places)
            for kind, place in enumerate(of_kinds)
        ]
        seen += [
            Sighting(key, 0, num_stored, blocks, place is not None)
            for blocks, (key, (place,)) in enumerate(zip(tails, of_tails, strict=True), start=1)
        ]
        found = places[:num_stored] + (of_tails[tail - 1 : tail] if tail else [])
        return Found(num_stored, tail, found)

    def _locate(self, keys: list[BlockHash], namespaces: tuple[str, ...]) -> list[list[Place | None]]:
        """Finds the slowest place of a rank's value, for each chunk and kind.

        None: a rank has no value in any namespace. Raises StoreError.
        """
        ranks, windows = range(self._identity.num_ranks), [kind.window_of_files for kind in self._kinds]
        found = self._tiers.locate(
            [
                str(ChunkName(namespace, key, rank, window))
                for key in keys
                for window in windows
                for rank in ranks
                for namespace in namespaces
            ]
        )
        values = iter(found)  # The lists below take them in the same order.
        return [
            [_slowest([_first([next(values) for _ in namespaces]) for _ in ranks]) for _ in windows]
            for _ in keys
        ]


def _first(places: Sequence[Place | None]) -> Place | None:
    return next((place for place in places if place is not None), None)


def _slowest(places: Sequence[Place | None]) -> Place | None:
    found = [place for place in places if place is not None]
    return max(found) if len(found) == len(places) else None
