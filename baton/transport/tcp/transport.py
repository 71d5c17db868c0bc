"""Transport between hosts: the owner serves its regions over tcp, the reader receives into its blocks.

    register   opens the owner's listener (tcp_owner); its address and token are the endpoint
    connect    a few lanes, each with a mutual handshake (tcp_wire, tcp_reader)
    post_read  chunks of the copies become requests; each answer is scattered into the blocks (`stream`),
               where its tag is checked (`sealing`)

Bytes go from block to socket and from socket to block; an encrypted connection needs one buffer on each side.
The handshake binds a connection to one incarnation, so a read can never come from a successor.
"""

import logging
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from baton.core.config import ClusterSecret
from baton.core.errors import ConfigError, TransferError
from baton.core.hosts import check_bind_host, is_loopback, is_wildcard
from baton.core.ids import Address
from baton.core.layout import CopySpan, Region
from baton.transport.base.interface import OpId, PeerHandle, Prepared
from baton.transport.base.peers import PeersTransport
from baton.transport.base.spans import PreparedSpans, SpanTable, require_host_memory
from baton.transport.tcp.owner import TcpCounters, TcpOwner, keep_alive
from baton.transport.tcp.reader import TcpPeer
from baton.transport.tcp.sealing import Integrity
from baton.transport.tcp.wire import (
    HANDSHAKE_TIMEOUT_S,
    VERSION,
    Session,
    TcpEndpoint,
    connection_keys,
    decode_tcp_endpoint,
    introduce,
)

logger = logging.getLogger(__name__)

LANES = 2


@dataclass(frozen=True, slots=True)
class TcpOptions:
    """Address that a rank's owner binds, and the address that its peers dial."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: the kernel chooses a free port.
    advertise_host: str | None = None  # None: `host`. Required when `host` is a wildcard address.
    advertise_port: int = 0  # 0: the port that the owner listens on.
    # Requested by this side; a connection uses the stronger of both. None: "encrypt" beyond this host.
    integrity: Integrity | None = None

    def __post_init__(self) -> None:
        if self.advertise_host is None and is_wildcard(self.host):
            raise ConfigError(
                f"is required when binding to {self.host}, because peers cannot dial a wildcard",
                field="tcp.advertise_host",
            )
        for name in ("port", "advertise_port"):
            if not 0 <= getattr(self, name) < 2**16:
                raise ConfigError(f"must be in [0, 65535], is {getattr(self, name)}", field=f"tcp.{name}")
        if self.integrity == "off" and not self.is_loopback:
            raise ConfigError(
                "off is allowed on the loopback only; otherwise use mac or encrypt", field="tcp.integrity"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether the owner can be reached within this host only."""
        return all(is_loopback(host) for host in (self.host, self.advertise_host or self.host))

    @property
    def level(self) -> Integrity:
        return self.integrity or ("mac" if self.is_loopback else "encrypt")


class TcpTransport(PeersTransport[TcpPeer]):
    """Transport of one rank. Thread-safe."""

    name = "tcp"

    def __init__(
        self,
        address: Address,
        options: TcpOptions = TcpOptions(),
        *,
        secret: ClusterSecret | None = None,
        num_lanes: int = LANES,
        thread_cpus: Collection[int] | None = None,
        on_completion: Callable[[], None] | None = None,
    ) -> None:
        check_bind_host(options.host, secret, field="tcp.host")
        super().__init__(address, on_completion)
        self._options = options
        if options.level == "off":
            logger.warning("tcp.integrity is off: KV that is changed between processes is not detected")
        self._secret = secret
        self._num_lanes = num_lanes
        self._thread_cpus = thread_cpus
        self._owner: TcpOwner | None = None
        self.counters = TcpCounters()

    @property
    def port(self) -> int:
        """Port of the listener, after `register`."""
        return self._owner.port if self._owner is not None else self._options.port

    def register(self, regions: Sequence[Region]) -> bytes:
        assert self._owner is None, "register() is called once"
        require_host_memory(self.name, regions)
        self._regions = tuple(regions)
        self._owner = TcpOwner(
            self._address,
            self._regions,
            self._options.host,
            self._options.port,
            self._secret,
            self._options.level,
            self._thread_cpus,
            self.counters,
        )
        return msgspec.msgpack.encode(
            TcpEndpoint(
                version=VERSION,
                engine_id=self._address.engine_id,
                epoch=self._address.epoch,
                host=self._options.advertise_host or self._options.host,
                port=self._options.advertise_port or self._owner.port,
                token=self._owner.token,
                regions=self._regions,
            )
        )

    def connect(self, address: Address, endpoint: bytes) -> TcpPeer:
        named = decode_tcp_endpoint(address, endpoint)
        if self._secret is None and not is_loopback(named.host):
            raise TransferError(
                f"cannot connect to {named.host}: without a cluster secret only this host is allowed; "
                "set BATON_SECRET"
            )
        keys = connection_keys(self._secret, named.token)
        sockets: list[socket.socket] = []
        lanes: list[tuple[socket.socket, Session]] = []
        try:
            for _ in range(self._num_lanes):
                sockets.append(_dial(named.host, named.port))
                session = introduce(
                    sockets[-1], keys, self._options.level, caller=self._address, target=address
                )
                lanes.append((sockets[-1], session))
            peer = TcpPeer(address, named, lanes, self.completions, self._thread_cpus)
            return self.add(peer)
        except BaseException as error:
            for sock in sockets:
                sock.close()
            if isinstance(error, OSError):
                raise TransferError(
                    f"cannot reach {address.engine_id} at {named.host}:{named.port}: {error}"
                ) from error
            raise

    def prepare(self, peer: PeerHandle, spans: Sequence[CopySpan]) -> PreparedSpans[TcpPeer]:
        assert isinstance(peer, TcpPeer)
        return PreparedSpans(peer, SpanTable(spans, self._regions, peer.endpoint.regions))

    def post_read(
        self, prepared: Prepared, local_blocks: Sequence[int], remote_blocks: Sequence[int]
    ) -> OpId:
        assert isinstance(prepared, PreparedSpans)
        peer: TcpPeer = prepared.peer
        return peer.post(prepared.table.expand(local_blocks, remote_blocks))

    def close(self) -> None:
        self.close_peers()
        if self._owner is not None:
            self._owner.close()


def _dial(host: str, port: int) -> socket.socket:
    sock = socket.create_connection((host, port), timeout=HANDSHAKE_TIMEOUT_S)
    keep_alive(sock)
    return sock
