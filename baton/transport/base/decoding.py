"""Decoding of a peer's bytes into a typed value. Every failure is a PeerError."""

from typing import TypeVar

import msgspec

from baton.core.errors import PeerError, TransferError
from baton.core.ids import Address

T = TypeVar("T")


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First fields of every endpoint that goes to another process."""

    version: int
    engine_id: str
    epoch: int


E = TypeVar("E", bound=Endpoint)


def decode_from_peer(encoded: bytes | bytearray, kind: type[T], what: str) -> T:
    """Raises PeerError that says why `what` is malformed."""
    try:
        return msgspec.msgpack.decode(encoded, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # msgspec raises UnicodeDecodeError for invalid UTF-8 and RecursionError for deep nesting.
        raise PeerError(f"malformed {what}: {error}") from error


def decode_endpoint(kind: type[E], name: str, version: int, address: Address, encoded: bytes) -> E:
    """Raises PeerError for an endpoint that its owner cannot have made, TransferError for another version."""
    named = decode_from_peer(encoded, kind, f"{name} endpoint of {address.engine_id}")
    if named.version != version:
        raise TransferError(
            f"{address.engine_id} has version {named.version} of the {name} endpoint, and this engine has "
            f"version {version}: run the same version of Baton on both"
        )
    check_incarnation(name, (named.engine_id, named.epoch), address)
    return named


def check_incarnation(name: str, named: tuple[str, int], address: Address) -> None:
    """Raises PeerError unless the endpoint names the engine and epoch of `address`."""
    if named != address:
        raise PeerError(f"the {name} endpoint of {address.engine_id} names another engine or epoch")
