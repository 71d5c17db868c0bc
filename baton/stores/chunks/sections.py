"""Reads one chunk section by section, from any thread and in any order, so that all are of one write.

    header        read once, together with section 0 if that is the first; each write has its own
    section       read from the store that had the header, and verified with it

Another engine may replace the value between two reads. A section of the new value fails the verification: the
chunk is reported as gone, and stays in the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.stores.backends.tiers import ReadValue, Tiers
from baton.stores.base.aligned import AlignedMemory
from baton.stores.base.store import Unusable
from baton.stores.chunks.chunk import SealedHeader, header_nbytes, sections_of

if TYPE_CHECKING:
    from baton.stores.base.chunk_name import ChunkName
    from baton.stores.chunks.chunk import Entries


@dataclass(frozen=True, slots=True)
class _Opened:
    name: str
    store: int
    nbytes: int  # Bytes of the header.
    header: SealedHeader


class SectionReader:
    """Thread-safe."""

    def __init__(
        self,
        tiers: Tiers,
        names: Sequence[tuple[ChunkName, bytes]],
        entries: Entries,
        ends: Sequence[int],
    ) -> None:
        """`names`: names, with the keys that sign the chunk there. `ends`: ends of the sections."""
        self._tiers = tiers
        self._names = names
        self._entries = entries
        self._places = sections_of(ends)
        self._ends = ends
        self._opened: list[_Opened] = []  # The first one counts.

    def read(self, section: int, memory: AlignedMemory) -> ReadValue[memoryview]:
        """The proven section, in this thread's memory. Raises Unusable."""
        place = self._places[section]
        if not self._opened:
            opened, found = self._open(section, memory)
            self._opened.append(opened)
            if self._opened[0].header.content != opened.header.content:
                raise Unusable("gone", "it was replaced while it was read")
            if found is not None:
                return found
        opened = self._opened[0]
        into = memory.take(place.stop - place.start)

        def prove(stored: memoryview) -> memoryview:
            try:
                opened.header.open(section, stored)
            except Unusable:
                self._check_unchanged(opened)
                raise
            return stored

        part = slice(opened.nbytes + place.start, opened.nbytes + place.stop)
        return self._tiers.read(opened.name, into, prove, part=part, only=opened.store)

    def _open(self, section: int, memory: AlignedMemory) -> tuple[_Opened, ReadValue[memoryview] | None]:
        """The header, and with it the first section if that is the one."""
        fault = Unusable("gone")
        for name, key in self._names:
            nbytes = header_nbytes(name, self._entries, self._ends)
            more = self._places[0].stop if section == 0 else 0

            def prove(
                stored: memoryview, name: ChunkName = name, key: bytes = key, nbytes: int = nbytes
            ) -> SealedHeader:
                header = SealedHeader(stored[:nbytes], name, self._entries, key, self._ends)
                if section == 0:
                    header.open(0, stored[nbytes:])
                return header

            into = memory.take(nbytes + more)
            try:
                read = self._tiers.read(str(name), into, prove, part=slice(0, nbytes + more))
            except Unusable as error:
                if fault.reason == "gone":
                    fault = error
                continue
            opened = _Opened(str(name), read.store, nbytes, read.proven)
            body = ReadValue(into[nbytes : nbytes + more], read.nbytes, read.store) if section == 0 else None
            return opened, body
        raise fault

    def _check_unchanged(self, opened: _Opened) -> None:
        """Raises Unusable if the value has another header now, so that a good one is not removed."""
        into = AlignedMemory().take(opened.nbytes)[: opened.nbytes]  # Aligned memory for direct I/O.
        store = self._tiers.stores[opened.store]
        store.read_part(opened.name, into, 0, opened.nbytes)
        if into != opened.header.content:
            raise Unusable("gone", "it was replaced while it was read")
