"""Transports by name, and the best one that two engines share.

An engine makes what works here, sends the endpoints to its peers, and takes the best way to each:

    make_transports(...)                    {name: transport}
    register_all(transports, regions)       {name: endpoint}, sent to the peer
    choose_transport(ours, theirs, peer)    the first, in order of preference, that connects
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from baton.core.config import ClusterSecret
from baton.core.errors import ConfigError, TransferError
from baton.core.ids import Address
from baton.core.layout import Region
from baton.transport.base import PeerHandle, Transport
from baton.transport.local import LocalTransport
from baton.transport.memory import MemoryTransport
from baton.transport.tcp import TcpTransport

logger = logging.getLogger(__name__)

PREFERENCE = ("memory", "local", "tcp")
"""Fastest first. `memory` is spoken in tests only, where nothing else is asked for."""

DEFAULT_NAMES = ("local", "tcp")


class Connected(NamedTuple):
    """The way that was chosen, and the peer on it."""

    transport: Transport
    peer: PeerHandle


def make_transport(
    name: str,
    *,
    address: Address,
    secret: ClusterSecret | None = None,
    host: str = "127.0.0.1",
    advertise_host: str | None = None,
    on_completion: Callable[[], None] | None = None,
) -> Transport:
    """One rank's transport. `host`: where it listens, if it does; `advertise_host`: what peers dial."""
    match name:
        case "local":
            return LocalTransport(address, on_completion=on_completion)
        case "tcp":
            return TcpTransport(
                address,
                host=host,
                advertise_host=advertise_host,
                secret=secret,
                on_completion=on_completion,
            )
        case "memory":
            return MemoryTransport(address, on_completion=on_completion)
        case _:
            raise ConfigError(
                f"{name!r} is no transport; known are {', '.join(PREFERENCE)}", field="transports"
            )


def make_transports(
    names: Sequence[str] = DEFAULT_NAMES,
    *,
    address: Address,
    secret: ClusterSecret | None = None,
    host: str = "127.0.0.1",
    advertise_host: str | None = None,
    on_completion: Callable[[], None] | None = None,
) -> dict[str, Transport]:
    """Several of them for one rank. Raises with none left open."""
    made: dict[str, Transport] = {}
    try:
        for name in names:
            made[name] = make_transport(
                name,
                address=address,
                secret=secret,
                host=host,
                advertise_host=advertise_host,
                on_completion=on_completion,
            )
    except BaseException:
        for transport in made.values():
            transport.close()
        raise
    return made


def register_all(transports: Mapping[str, Transport], regions: Sequence[Region]) -> dict[str, bytes]:
    """Endpoints to send to peers. What does not work on this machine is left out, with the reason logged.

    Raises TransferError when none works.
    """
    endpoints: dict[str, bytes] = {}
    for name, transport in transports.items():
        try:
            endpoints[name] = transport.register(regions)
        except TransferError as error:
            logger.warning("this engine cannot be read by %s: %s", name, error)
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
    """Connect to a peer the best way that both speak. Takes round trips: never on an engine step.

    `order` forces a way, or several, by leaving out the others. Raises PeerError for a peer that lies about
    itself, TransferError with the reason of every way that failed.
    """
    reasons: list[str] = []
    for name in order:
        if name not in ours or name not in theirs:
            continue
        try:
            peer = ours[name].connect(address, theirs[name])
        except TransferError as error:
            logger.info("%s cannot be reached by %s: %s", address.engine_id, name, error)
            reasons.append(f"{name}: {error}")
        else:
            logger.info("%s is reached by %s", address.engine_id, name)
            return Connected(ours[name], peer)
    if reasons:
        raise TransferError(f"no way to {address.engine_id}: {'; '.join(reasons)}")
    raise TransferError(
        f"no transport in common with {address.engine_id}: "
        f"ours {sorted(ours)}, theirs {sorted(theirs)}, allowed {list(order)}"
    )
