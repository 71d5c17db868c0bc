"""Self-test of a rank's KV cache at start, which an unlisted version of vLLM has to pass (`versions`).

    write     random bytes into some blocks of every cache, through the tensors that vLLM has registered
    read      one block of each group into another, as a consumer reads from a producer: by the layout
              that peers get, the plan of one rank's reads, and a transport
    compare   all of these blocks, through the tensors; restore what was there

So the layout describes vLLM's memory, or the start is refused. It does not show where the attention of an
unlisted vLLM writes a token in its block: `packing` measures that on a CPU, and gives the blocks of a GPU a
name of this version, so that they move as a whole and to engines of this version only.

Nothing runs at start, so no block is in use.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import torch

from baton.connectors.pull.metadata import ReadBlocks, ReadEnd
from baton.connectors.pull.reads.cache_layout import is_of_states
from baton.connectors.pull.reads.links import PeerLinks
from baton.core.errors import TransferError
from baton.core.ids import Address, EngineId, Epoch, Pair
from baton.core.layout import Region
from baton.protocol.handshake import RankCard
from baton.protocol.plan import GroupPair
from baton.transport import register_all
from baton.transport.cuda_ipc.driver import HANDLE_BYTES, CudaDriver, SharedMemory
from baton.transport.cuda_ipc.transport import CudaIpcTransport
from baton.transport.local.transport import LocalTransport
from baton.transport.memory import MemoryNetwork, MemoryTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.core.layout import RankLayout
    from baton.transport.base.interface import Transport

READ_TIMEOUT_S: Final = 20.0
MIN_BLOCKS: Final = 5
_ADDRESS: Final = Address(EngineId("self-test"), Epoch(1))


def run_self_test(layout: RankLayout, kv_caches: Mapping[str, torch.Tensor]) -> str:
    """Read a block of every cache into another block. Returns what was read, in words.

    `kv_caches`: the tensors that `layout` was made of, in the same order. Raises TransferError or PeerError
    that names what differs; the blocks that it names are restored then too.
    """
    if layout.num_blocks < MIN_BLOCKS:
        raise TransferError(f"the cache has {layout.num_blocks} blocks, and the self-test needs {MIN_BLOCKS}")
    of_tokens = [cache for cache in kv_caches.values() if not is_of_states(cache)]
    of_states = [cache for cache in kv_caches.values() if is_of_states(cache)]
    groups: defaultdict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    for layer, cache in zip(layout.layers, of_tokens, strict=True):
        groups[layer.group][layer.name] = cache
    for state, cache in zip(layout.states, of_states, strict=True):
        groups[state.group][state.name] = cache
    with _Reader(layout) as reader:
        return "; ".join(
            f"group {group} ({len(caches)} layers), {_read_group(reader, group, caches)}"
            for group, caches in sorted(groups.items())
        )


def _read_group(reader: _Reader, group: int, caches: Mapping[str, torch.Tensor]) -> str:
    """Layers of one group have memory of their own or share all of it; other groups may use the same."""
    last = len(next(iter(caches.values()))) - 1
    source, target = 1, last - 1
    # Far apart, so that a wrong stride is seen, and with neighbours, so that a long copy is.
    watched = (source, target - 1, target, last)
    before = {name: [_bytes_of(cache[block]).clone() for block in watched] for name, cache in caches.items()}
    generator = torch.Generator().manual_seed(group)
    try:
        for cache in caches.values():
            for block in watched:
                page = _bytes_of(cache[block])
                page.copy_(torch.randint(0, 256, page.shape, dtype=torch.uint8, generator=generator))
        # Read back, because caches that share their memory have only the bytes that were written last.
        written = {name: [_bytes_of(cache[b]).clone() for b in watched] for name, cache in caches.items()}
        _synchronize(caches)
        end = reader.read(group, source, target)
        for name, cache in caches.items():
            pages = dict(zip(watched, written[name], strict=True))
            pages[target] = pages[source]
            for block in watched:
                _check_equal(name, block, _bytes_of(cache[block]), pages[block])
    finally:
        for name, cache in caches.items():
            for block, page in zip(watched, before[name], strict=True):
                _bytes_of(cache[block]).copy_(page)
        _synchronize(caches)
    return f"{end.nbytes} bytes by {end.transport}"


def _check_equal(name: str, block: int, found: torch.Tensor, wanted: torch.Tensor) -> None:
    if torch.equal(found, wanted):
        return
    different = (found != wanted).flatten().nonzero()
    raise TransferError(
        f"the layout of {name} does not describe its memory: after a read, {len(different)} of "
        f"{wanted.numel()} bytes of block {block} differ, the first at {int(different[0])}"
    )


def _bytes_of(page: torch.Tensor) -> torch.Tensor:
    """One block of a cache, as bytes of the same memory."""
    return page.view(torch.uint8)


def _synchronize(caches: Mapping[str, torch.Tensor]) -> None:
    for device in {cache.device for cache in caches.values() if cache.is_cuda}:
        torch.cuda.synchronize(device)


class _Reader:
    """Producer and consumer in one: the reads of a rank from itself."""

    def __init__(self, layout: RankLayout) -> None:
        self._layout = layout
        self._rank = layout.pp_rank * layout.tp_size + layout.tp_rank
        self._has_news = threading.Event()
        self._transports = _make_transports(layout.regions, self._has_news.set)

    def __enter__(self) -> _Reader:
        layout = self._layout
        try:
            card = RankCard(
                layout.tp_rank, layout, register_all(self._transports, layout.regions), _ADDRESS.epoch
            )
            self._links = PeerLinks(layout, self._transports, (*self._transports,), lambda job: job())
            self._links.meet(_ADDRESS, (card,) * (self._rank + 1))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for transport in self._transports.values():
            transport.close()

    def read(self, group: int, source: int, target: int) -> ReadEnd:
        """Raises TransferError if the read fails."""
        pairs = (Pair(self._rank, self._rank),)
        num_tokens = self._layout.block_tokens
        groups = GroupPair(group, group)
        self._links.read(
            ReadBlocks(group, _ADDRESS, pairs, 0, num_tokens, (target,), (source,), groups=groups)
        )
        while not (ended := self._links.take_ended()):
            if not self._has_news.wait(READ_TIMEOUT_S):
                raise TransferError(f"a read of one block did not end within {READ_TIMEOUT_S:g} s")
            self._has_news.clear()
        (end,) = ended
        if not end.ok:
            raise TransferError(end.error)
        return end


def _make_transports(regions: Sequence[Region], on_completion: Callable[[], None]) -> dict[str, Transport]:
    """Apart from those of the connector, whose peers and counts stay as they are."""
    if any(region.device != "cpu" for region in regions):
        driver = _OwnAllocations()
        return {"cuda_ipc": CudaIpcTransport(_ADDRESS, driver=driver, on_completion=on_completion)}
    return {
        "local": LocalTransport(_ADDRESS, on_completion=on_completion),
        # Used where the system forbids cross-memory attach: this proves nothing about vLLM.
        "memory": MemoryTransport(_ADDRESS, MemoryNetwork(), on_completion=on_completion),
    }


class _OwnAllocations(CudaDriver):
    """A process cannot open its own handles, and need not: a handle is the region's address here."""

    def share(self, region: Region) -> SharedMemory:
        return SharedMemory(region.address.to_bytes(HANDLE_BYTES, "little"), 0)

    def open(self, handle: bytes, device: int) -> int:
        return int.from_bytes(handle, "little")

    def close(self, address: int) -> None:
        return
