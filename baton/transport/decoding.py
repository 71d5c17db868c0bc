"""Bytes of a peer become a typed value, or a PeerError: there is no third way."""

from typing import TypeVar

import msgspec

from baton.core.errors import PeerError

T = TypeVar("T")


def decode_from_peer(encoded: bytes | bytearray, kind: type[T], what: str) -> T:
    """Raises PeerError saying that `what` is malformed, and how."""
    try:
        return msgspec.msgpack.decode(encoded, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # msgspec lets invalid UTF-8 through as UnicodeDecodeError, deep nesting as RecursionError.
        raise PeerError(f"malformed {what}: {error}") from error
