"""Transport by NIXL over UCX: RDMA between hosts, GPU memory if UCX can reach it. Optional: `kv-baton[nixl]`.

    register   an agent of the owner with a progress thread that sleeps; its metadata is the endpoint
    connect    an agent *per peer*; verifies the owner by its identity page, read through NIXL
    prepare    descriptor lists: each span once, strided, its blocks numbered
    post_read  batches by number; a read counts if the identity page, read after it, is still right

It is used only if the reader does all the work: cross-memory attach on one host, RDMA devices on both hosts.
Otherwise UCX would emulate reads through the owner's process, which a dying reader can kill. `connect` then
raises, and the engines use `tcp`. (UCX_TLS is left to the operator and UCX.)

One-sided *writes* are not offered, because the written side cannot end one: destroying the writer's agent or
deregistering the memory returns SUCCESS without waiting for writes in flight. A write over NIXL would need
the writer's confirmation that it has stopped, which a dead writer cannot give.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton.core.errors import PeerError, TransferError
from baton.core.ids import Address
from baton.core.layout import CopySpan, Region
from baton.transport.base.decoding import Endpoint, decode_endpoint
from baton.transport.base.host_identity import HostProcess, require_same_host, this_process
from baton.transport.base.identity_page import (
    IDENTITY_BYTES,
    NONCE_BYTES,
    IdentityPage,
    identity_bytes,
    let_peers_read,
    prove_identity,
)
from baton.transport.base.interface import OpId, PeerHandle, Prepared
from baton.transport.base.peers import PeersTransport
from baton.transport.base.spans import SpanTable, check_regions
from baton.transport.nixl.agent import NixlAgent, bindings, memory_kind
from baton.transport.nixl.peer import IdentityReader, NixlCounters, NixlPeer, PreparedGroup

VERSION = 1
METADATA_BYTES_MAX = 1 << 20
RDMA_DEVICES = Path("/sys/class/infiniband")


class NixlEndpoint(Endpoint, frozen=True, forbid_unknown_fields=True):
    agent: str
    metadata: bytes
    process: HostProcess
    has_rdma: bool
    identity_address: int
    generation: int
    nonce: bytes
    regions: tuple[Region, ...]


@dataclass(frozen=True)
class NixlPrepared(Prepared):
    peer: NixlPeer
    table: SpanTable
    groups: Sequence[PreparedGroup]


class NixlTransport(PeersTransport[NixlPeer]):
    """Transport of one rank. Thread-safe."""

    name = "nixl"

    def __init__(
        self,
        address: Address,
        *,
        on_completion: Callable[[], None] | None = None,
    ) -> None:
        """Raises ConfigError if NIXL is not installed."""
        bindings()
        super().__init__(address, on_completion)
        self._identity = IdentityPage(address.epoch)
        self._owner: NixlAgent | None = None
        self.counters = NixlCounters()

    def register(self, regions: Sequence[Region]) -> bytes:
        assert self._owner is None, "register() is called once"
        check_regions(regions)
        process = this_process()
        let_peers_read()
        self._regions = tuple(regions)
        name = self._agent_name("owner")
        owner = NixlAgent(name, has_progress_thread=True)
        owner.register([*self._regions, Region(self._identity.address, IDENTITY_BYTES)])
        self._owner = owner
        return msgspec.msgpack.encode(
            NixlEndpoint(
                version=VERSION,
                engine_id=self._address.engine_id,
                epoch=self._address.epoch,
                agent=name,
                metadata=owner.metadata(),
                process=process,
                has_rdma=has_rdma(),
                identity_address=self._identity.address,
                generation=self._identity.generation,
                nonce=self._identity.nonce,
                regions=self._regions,
            )
        )

    def connect(self, address: Address, endpoint: bytes) -> NixlPeer:
        named = _decode_endpoint(address, endpoint)
        expected = identity_bytes(named.epoch, named.generation, named.nonce)
        _require_true_reads(named, expected)
        agent = NixlAgent(self._agent_name(f"to:{named.agent}"), has_progress_thread=False)
        try:
            agent.register(self._regions)
            if agent.load(named.metadata) != named.agent:
                raise PeerError(f"the nixl endpoint of {address.engine_id} names another agent")
            identity = IdentityReader.of(agent, named.agent, named.identity_address)
        except BaseException:
            agent.destroy()
            raise
        peer = NixlPeer(
            address,
            named.regions,
            agent,
            named.agent,
            identity,
            expected,
            self.completions,
            self.counters,
        )
        return self.add(peer)

    def prepare(self, peer: PeerHandle, spans: Sequence[CopySpan]) -> NixlPrepared:
        assert isinstance(peer, NixlPeer)
        table = SpanTable(spans, self._regions, peer.regions)
        return NixlPrepared(peer, table, peer.prepare(table, self._regions))

    def post_read(
        self, prepared: Prepared, local_blocks: Sequence[int], remote_blocks: Sequence[int]
    ) -> OpId:
        assert isinstance(prepared, NixlPrepared)
        return prepared.peer.post(prepared.groups, *prepared.table.check_blocks(local_blocks, remote_blocks))

    def close(self) -> None:
        # First of all, because reads in progress must not count once the memory is freed.
        self._identity.void()
        self.close_peers()
        if self._owner is not None:
            self._owner.destroy()
        self._identity.close()

    def _agent_name(self, role: str) -> str:
        """A name unique over engines, restarts, ranks and agents: NIXL confuses agents of equal names."""
        return f"{self._address.engine_id}:{self._address.epoch:x}:{secrets.token_hex(8)}:{role}"


def has_rdma() -> bool:
    """Whether this host has a device that can read remote memory."""
    return RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())


def _decode_endpoint(address: Address, endpoint: bytes) -> NixlEndpoint:
    named = decode_endpoint(NixlEndpoint, "nixl", VERSION, address, endpoint)
    if len(named.nonce) != NONCE_BYTES or not 0 <= named.generation < 2**64:
        raise PeerError(
            f"malformed nixl endpoint of {address.engine_id}: nonce or generation of a wrong size"
        )
    if len(named.metadata) > METADATA_BYTES_MAX:
        raise PeerError(
            f"malformed nixl endpoint of {address.engine_id}: {len(named.metadata)} bytes of metadata"
        )
    check_regions([*named.regions, Region(named.identity_address, IDENTITY_BYTES)])
    return named


def _require_true_reads(named: NixlEndpoint, expected: bytes) -> None:
    """Raises TransferError if UCX would let the owner's process answer reads: see the module docstring."""
    for region in named.regions:
        memory_kind(region)
    if has_rdma() and named.has_rdma:
        return
    try:
        require_same_host(this_process(), named.process)
        prove_identity(named.process.pid, named.identity_address, expected, engine_id=named.engine_id)
    except TransferError as error:
        raise TransferError(
            f"no RDMA device on both sides, and no cross-memory attach ({error}); NIXL would emulate reads "
            "through the owner's process, so another transport is needed"
        ) from error
