"""Chunks in host memory: their slots, which of them stay, and the KV events about them.

Before every call that admits or uses keys the policy gets the request's retention
(`baton.stores.policies.retaining`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

from baton.connectors.storage.memory.identity import OffloadIdentity
from baton.connectors.storage.memory.stats import OffloadStats
from baton.connectors.storage.prompts import StoredPrompt
from baton.connectors.store_events import StoreEvents
from baton.core.hashing import BlockHash
from baton.core.kv_groups import NULL_BLOCK_ID, KVCacheGroup
from baton.core.transfer_params import OffloadChoice
from baton.stores.host.slots import Entry, SlotIndex
from baton.stores.policies.eviction import make_policy
from baton.stores.policies.retaining import Retainer
from baton.stores.policies.sessions import Sessions
from baton.stores.policies.twice import TwiceEstimated


@dataclass(slots=True, eq=False)
class Prompt(StoredPrompt):
    choice: OffloadChoice
    _: KW_ONLY
    key_set: set[BlockHash] = field(default_factory=set)  # Keys that a store of this prompt does not evict.
    asked_keys: Sequence[BlockHash] = ()  # Keys of the last match, until blocks are allocated.
    open_stores: set[int] = field(default_factory=set)  # Jobs that read its blocks.

    @property
    def loadable_end(self) -> int:
        """End of the loadable tokens: whole blocks, and at least one token is left to compute its logits."""
        return (self.request.num_tokens - 1) // self.block_tokens * self.block_tokens

    def blocks_of(self, chunk: int) -> slice:
        """The chunk's slice of a table."""
        return slice(chunk * self.chunk_blocks, (chunk + 1) * self.chunk_blocks)

    def has_hole(self, chunk: int, groups: Sequence[KVCacheGroup]) -> bool:
        """Whether a block is missing: a prefix hit may begin one block later than computed blocks do."""
        return any(
            NULL_BLOCK_ID in table[self.blocks_of(chunk)]
            for group, table in zip(groups, self.tables, strict=True)
            if not group.is_state
        )


class HostChunks:
    def __init__(
        self, identity: OffloadIdentity, events: StoreEvents, stats: OffloadStats, clock: Callable[[], float]
    ) -> None:
        """`stats`: gets the chunks' counts."""
        settings, num_slots = identity.settings, identity.num_slots
        self._identity = identity
        self._events = events
        self._stats = stats
        self._clock = clock
        self._retainer: Retainer[BlockHash] = Retainer(
            partial(make_policy, settings.eviction), settings.tenant_max_share
        )
        self._sessions: Sessions[BlockHash] = Sessions()
        self._policy: TwiceEstimated[BlockHash] = TwiceEstimated(self._retainer.make, num_slots)
        self.index: SlotIndex[BlockHash] = SlotIndex(num_slots, self._policy)

    def act_for(self, prompt: Prompt) -> None:
        self._retainer.act_for(prompt.retention, self._clock())

    def use(self, prompt: Prompt, keys: Collection[BlockHash]) -> None:
        """Uses chunks that are held."""
        for key in keys:
            self.index.use(key)
        self._sessions.used(prompt.retention.session, keys)

    def reserve(self, prompt: Prompt, chunk: int) -> Entry[BlockHash] | None:
        """A slot for a chunk that is to be stored. None: none can be evicted, or only this prompt's."""
        key, parent = prompt.keys[chunk], prompt.keys[chunk - 1] if chunk else None
        reserved = self.index.reserve(key, prompt.key_set, parent)
        if reserved is None:
            return None
        if reserved.evicted is not None:
            self._stats.add(evicted_chunks=1)
            self._events.removed(reserved.evicted)
        self._sessions.stored(prompt.retention.session, (key,))
        return reserved.entry

    def announce(self, prompt: Prompt, chunks: Iterable[int]) -> None:
        """Reports chunks as stored, except those that were reported before."""
        if self._identity.publishes_events:
            size = prompt.chunk_blocks
            self._events.stored(
                prompt.request,
                [(prompt.keys[chunk], range(chunk * size, (chunk + 1) * size)) for chunk in chunks],
            )

    def forget(self, entries: Iterable[Entry[BlockHash]]) -> None:
        """Other requests must not try these: they may be bad."""
        for entry in entries:
            if self.index.forget(entry):
                self._events.removed(entry.key)

    def finish(self, prompt: Prompt) -> None:
        """The end of a prompt is to be evicted before its beginning, which is useful without it."""
        self.index.refresh(reversed(prompt.keys))
        if prompt.retention.ends_session:
            self._retainer.demote(self._sessions.end(prompt.retention.session))

    def count_hits_with_twice_the_memory(self, prompt: Prompt) -> None:
        """Counts `twice_hit_tokens` for the last match that the host asked for; takes states as stored."""
        num_found = self._policy.num_found_by_twice(prompt.asked_keys)
        prompt.asked_keys = ()
        if num_found:
            end_chunk = prompt.num_local_tokens // prompt.chunk_tokens + num_found
            end = min(prompt.loadable_end, end_chunk * prompt.chunk_tokens)
            self._stats.add(twice_hit_tokens=end - prompt.num_local_tokens)
