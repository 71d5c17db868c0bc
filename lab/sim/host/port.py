"""Transport of one rank. Its reads are those of the world's network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.core.errors import PeerError, TransferError
from baton.core.ids import Address, Pair
from baton.core.layout import CopySpan, Region
from baton.testing.host.model import WORD_BYTES
from baton.transport.base.interface import Completion, OpId, PeerHandle, Prepared, Transport
from baton.transport.base.spans import SpanTable
from lab.sim.kernel.connection import Connection
from lab.sim.kernel.reads import Copy, Read

if TYPE_CHECKING:
    from baton.testing.host.memory import RankMemory
    from lab.sim.host.engine import Engine


@dataclass(eq=False)
class _Peer(PeerHandle):
    address: Address
    port: Port
    link: Connection

    @property
    def lost(self) -> str | None:  # type: ignore[override]
        is_seen = self.port.engine.cluster.parts.replaces_links
        return "the connection was reset" if self.link.is_lost and is_seen else None


@dataclass(eq=False)
class _Prepared(Prepared):
    peer: _Peer
    table: SpanTable


@dataclass(eq=False)
class Port(Transport):
    name = "memory"

    engine: Engine
    rank: int
    memory: RankMemory
    address: Address
    _regions: tuple[Region, ...] = ()
    _num_ops: int = 0
    _ended: list[Completion] = field(default_factory=list)

    def register(self, regions: Sequence[Region]) -> bytes:
        """The staging buffer follows the cache in memory. Nothing uses it here."""
        assert regions[0].address == self.memory.address
        self._regions = tuple(regions)
        ports = self.engine.cluster.ports
        endpoint = b"%d" % (len(ports) + 1)
        ports[endpoint] = self
        return endpoint

    def connect(self, address: Address, endpoint: bytes) -> PeerHandle:
        cluster = self.engine.cluster
        port = cluster.ports.get(endpoint)
        if port is None or port.address != address:
            raise PeerError(f"the endpoint of {address.engine_id} is of another engine")
        if not port.engine.is_alive or cluster.world.chance(cluster.world.faults.connect_error):
            raise TransferError(f"{address.engine_id} cannot be reached")
        return _Peer(address, port, cluster.reads.dial(port.engine, self.engine))

    def prepare(self, peer: PeerHandle, spans: Sequence[CopySpan]) -> Prepared:
        assert isinstance(peer, _Peer)
        return _Prepared(peer, SpanTable(spans, self._regions, peer.port._regions))

    def post_read(
        self, prepared: Prepared, local_blocks: Sequence[int], remote_blocks: Sequence[int]
    ) -> OpId:
        assert isinstance(prepared, _Prepared)
        peer, network, world = prepared.peer, self.engine.cluster.reads, self.engine.world
        if peer.link.is_lost:
            raise TransferError("the connection is lost")
        found = prepared.table.expand(local_blocks, remote_blocks)
        local = (found.local - self.memory.address).tolist()
        remote = (found.remote - peer.port.memory.address).tolist()
        copies: list[Copy] = list(zip(local, remote, found.nbytes.tolist(), strict=True))
        if len(copies) == 1:
            copies = _halved(copies[0])
        self._num_ops += 1
        op, began = OpId(self._num_ops), world.now

        def end(error: str | None) -> None:
            self._ended.append(Completion(op, error is None, 0, world.now - began, error))
            self.engine.poke()

        network.post(
            Read(
                number=len(network.posted) + 1,
                consumer=self.engine,
                source=peer.port.engine,
                ranks=Pair(peer.port.rank, self.rank),
                link=peer.link,
                targets=self.memory.blocks_of((local, nbytes) for local, _, nbytes in copies),
                origins=peer.port.memory.blocks_of((remote, nbytes) for _, remote, nbytes in copies),
                copies=copies,
                owner=(self, op),
                on_end=end,
            )
        )
        return op

    def poll(self) -> list[Completion]:
        ended, self._ended = self._ended, []
        return ended

    def wait_completion(self, timeout_s: float) -> bool:
        return bool(self._ended)

    def cancel(self, op: OpId) -> None:
        self.engine.cluster.reads.cancel((self, op))

    def disconnect(self, peer: PeerHandle) -> None:
        assert isinstance(peer, _Peer)
        self.engine.cluster.reads.disconnect(peer.link, "disconnected")

    def close(self) -> None:
        return


def _halved(copy: Copy) -> list[Copy]:
    local, remote, nbytes = copy
    half = nbytes // 2 // WORD_BYTES * WORD_BYTES
    if not half:
        return [copy]
    return [(local, remote, half), (local + half, remote + half, nbytes - half)]
