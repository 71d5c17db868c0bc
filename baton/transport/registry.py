"""Transports by name, and the choice of the best one that two engines share.

An engine makes the transports that work here, sends their endpoints to its peers, and chooses the best one
for each peer:

    available_names()                       names of the transports that can work here, best first
    make_transports(...)                    {name: transport}
    register_all(transports, regions)       {name: endpoint}, sent to the peer
    choose_transport(ours, theirs, peer)    the first, in order of preference, that connects

The choice is logged, with the alternatives and the reasons against them.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from baton.core.config import ClusterSecret
from baton.core.errors import ConfigError, TransferError
from baton.core.ids import Address
from baton.core.layout import Region
from baton.transport.base.interface import PeerHandle, Transport
from baton.transport.cuda_ipc.transport import CudaIpcTransport
from baton.transport.local.transport import LocalTransport
from baton.transport.memory import MemoryTransport
from baton.transport.nixl.agent import is_installed
from baton.transport.nixl.transport import NixlTransport, has_rdma
from baton.transport.tcp.transport import TcpOptions, TcpTransport

logger = logging.getLogger(__name__)

PREFERENCE = ("memory", "cuda_ipc", "local", "nixl", "tcp")
"""Fastest first. `memory` is used in tests only, which request nothing else."""

DEFAULT_NAMES = ("local", "tcp")


def host_names() -> tuple[str, ...]:
    """Transports that two processes of this host can use for host memory."""
    return (*DEFAULT_NAMES, *(("nixl",) if is_installed() else ()))


def available_names(device: str = "cpu") -> tuple[str, ...]:
    """Transports that can work here for a cache on this kind of device, best first.

    For host memory NIXL is included only if a network device can do its reads.
    """
    nixl = ("nixl",) if (device != "cpu" or has_rdma()) and is_installed() else ()
    return ("local", *nixl, "tcp") if device == "cpu" else ("cuda_ipc", *nixl)


class Connected(NamedTuple):
    """The chosen transport, and the peer connected by it."""

    transport: Transport
    peer: PeerHandle


def make_transport(
    name: str,
    *,
    address: Address,
    secret: ClusterSecret | None = None,
    tcp: TcpOptions = TcpOptions(),  # noqa: B008  Frozen.
    on_completion: Callable[[], None] | None = None,
) -> Transport:
    """One rank's transport. Raises ConfigError if it cannot be used here. `tcp` concerns only tcp."""
    match name:
        case "local":
            return LocalTransport(address, on_completion=on_completion)
        case "tcp":
            return TcpTransport(address, tcp, secret=secret, on_completion=on_completion)
        case "cuda_ipc":
            try:
                return CudaIpcTransport(address, on_completion=on_completion)
            except TransferError as error:
                raise ConfigError(f"cuda_ipc cannot be used: {error}", field="transports") from error
        case "nixl":
            return NixlTransport(address, on_completion=on_completion)
        case "memory":
            return MemoryTransport(address, on_completion=on_completion)
        case _:
            raise ConfigError(
                f"{name!r} is not a transport; choose from {', '.join(PREFERENCE)}", field="transports"
            )


def make_transports(
    names: Sequence[str] = DEFAULT_NAMES,
    *,
    address: Address,
    secret: ClusterSecret | None = None,
    tcp: TcpOptions = TcpOptions(),  # noqa: B008  Frozen.
    on_completion: Callable[[], None] | None = None,
) -> dict[str, Transport]:
    """Several transports of one rank. If one raises, all are closed."""
    made: dict[str, Transport] = {}
    try:
        for name in names:
            made[name] = make_transport(
                name, address=address, secret=secret, tcp=tcp, on_completion=on_completion
            )
    except BaseException:
        for transport in made.values():
            transport.close()
        raise
    return made


def register_all(transports: Mapping[str, Transport], regions: Sequence[Region]) -> dict[str, bytes]:
    """Endpoints to send to peers. Transports that do not work here are left out, and the reason is logged.

    Raises TransferError if none works.
    """
    endpoints: dict[str, bytes] = {}
    for name, transport in transports.items():
        try:
            endpoints[name] = transport.register(regions)
        except TransferError as error:
            logger.warning("this engine cannot be read by %s, which is left out: %s", name, error)
    if not endpoints:
        raise TransferError(f"none of {', '.join(transports)} can reach this engine's memory")
    return endpoints


def choose_transport(
    ours: Mapping[str, Transport],
    theirs: Mapping[str, bytes],
    address: Address,
    *,
    order: Sequence[str] = PREFERENCE,
) -> Connected:
    """Connects to a peer by the best common transport. Takes round trips: never call it in an engine step.

    `order` restricts the choice to these transports. Raises PeerError for a peer with a false identity,
    TransferError with the reasons of all transports that failed.
    """
    reasons: list[str] = []
    for number, name in enumerate(order):
        if name not in ours or name not in theirs:
            continue
        try:
            peer = ours[name].connect(address, theirs[name])
        except TransferError as error:
            reasons.append(f"{name}: {error}")
        else:
            _log_choice(name, ours, theirs, address, order[number + 1 :], reasons)
            return Connected(ours[name], peer)
    if reasons:
        raise TransferError(f"no transport reaches {address.engine_id}: {'; '.join(reasons)}")
    raise TransferError(
        f"no transport in common with {address.engine_id}: "
        f"ours {sorted(ours)}, theirs {sorted(theirs)}, allowed {list(order)}"
    )


def _log_choice(
    name: str,
    ours: Mapping[str, Transport],
    theirs: Mapping[str, bytes],
    address: Address,
    further: Sequence[str],
    reasons: Sequence[str],
) -> None:
    notes = [f"not by {reason}" for reason in reasons]
    notes += [f"{other} is offered by one side only" for other in sorted(set(ours) ^ set(theirs))]
    if left := [other for other in further if other in ours and other in theirs]:
        notes.append(f"{', '.join(left)} left in reserve")
    logger.info("%s is reached by %s%s", address.engine_id, name, "".join(f"; {note}" for note in notes))
