"""Chunks of one rank: names and forms, and copies between their bodies and the rank's cache.

register   a CacheBlocks for each kind of layers, and the layout of a chunk
form_of    names under the current key, then under the previous one; sections
copy_out   blocks --> body
copy_in    body, or one section of it --> blocks
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.connectors.pull.reads.cache_layout import is_of_states
from baton.connectors.storage.stores.identity import StorageIdentity, layout_digest
from baton.connectors.storage.stores.metadata import ChunkPart
from baton.core.layout import SLOT
from baton.stores.base.chunk_name import ChunkName
from baton.stores.chunks.chunk import sections_of
from baton.stores.chunks.transfers import Form

if TYPE_CHECKING:
    import torch

    from baton.connectors.storage.stores.cache_blocks import CacheBlocks


class RankChunks:
    """Any thread calls the methods after `register`. Only the rank's thread sets the namespaces."""

    def __init__(self, identity: StorageIdentity) -> None:
        self._identity = identity
        self._keys = identity.signing_keys
        self.namespaces: tuple[str, ...] = ()  # One for each key.
        self.layout = ""
        self.layers: dict[str, int] = {}  # Place in the order of layers, by name of a cache.
        self._blocks: tuple[CacheBlocks, ...] = ()  # One for each kind of layers.
        self._tails: dict[int, CacheBlocks] = {}  # Blocks of tails, by number of blocks.

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from baton.connectors.storage.stores.cache_blocks import blocks_of_kinds

        self.layout = layout_digest(kv_caches, self._identity.block_tokens, self._packing_of(kv_caches))
        self._blocks = blocks_of_kinds(kv_caches, self._identity)
        self.layers = {name: place for place, name in enumerate(kv_caches)}

    def _packing_of(self, kv_caches: dict[str, torch.Tensor]) -> str:
        """How the host's attention packs a block (`baton.core.layout`)."""
        find = self._identity.policy.find_packing
        if find is None:
            return SLOT
        with_tokens = {name: cache for name, cache in kv_caches.items() if not is_of_states(cache)}
        packing = find(with_tokens) if with_tokens else SLOT
        # The bytes of a state do not show the order of its parts.
        return f"{packing}; {self._identity.state_parts}" if self._identity.state_parts else packing

    def form_of(self, part: ChunkPart) -> Form:
        blocks = self._blocks_of(part)
        window, form = blocks.kind.window_of_files, blocks.form
        names = [ChunkName(namespace, part.key, self._identity.rank, window) for namespace in self.namespaces]
        signed = list(zip(names, self._keys, strict=True))
        return Form(signed, form.entries, form.nbytes, form.section_ends, part.section)

    def copy_out(self, part: ChunkPart, body: memoryview) -> None:
        blocks = self._blocks_of(part)
        blocks.copy_out(part.block_ids, blocks.form.body_in(body))

    def copy_in(self, part: ChunkPart, body: memoryview) -> None:
        """`body`: only the part's section, if it has one."""
        blocks, place = self._blocks_of(part), self.place_of(part)
        blocks.copy_in(blocks.form.body_in(body, place), part.block_ids, place)

    def nbytes_of(self, part: ChunkPart) -> int:
        place = self.place_of(part)
        return self._blocks_of(part).form.nbytes if place is None else place.stop - place.start

    def place_of(self, part: ChunkPart) -> slice | None:
        """Place of the part's section in the body. None: the part is no section."""
        if part.section is None:
            return None
        return sections_of(self._blocks_of(part).form.section_ends)[part.section]

    def sections_of(self, part: ChunkPart) -> list[tuple[int, int]]:
        """First layer and bytes of each section of the chunk."""
        form = self._blocks_of(part).form
        return [
            (min(self.layers[name] for name in form.names_in(place)), place.stop - place.start)
            for place in sections_of(form.section_ends)
        ]

    def _blocks_of(self, part: ChunkPart) -> CacheBlocks:
        blocks = self._blocks[part.kind]
        if not part.tail:
            return blocks
        if (of_tail := self._tails.get(part.tail)) is None:
            of_tail = self._tails[part.tail] = blocks.of_tail(part.tail)
        return of_tail
