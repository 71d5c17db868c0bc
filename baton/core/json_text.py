"""Decoding of untrusted JSON. Every defect of the text raises the same error, NotJson."""

from typing import Any, TypeVar, overload

import msgspec

Decoded = TypeVar("Decoded")

# The decoder raises RecursionError where arrays or objects are nested deeper than the interpreter allows.
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class NotJson(ValueError):
    """The text is not JSON, is nested too deep, or is not of the wanted type."""


@overload
def decode_json(text: bytes | bytearray | msgspec.Raw) -> Any: ...
@overload
def decode_json(text: bytes | bytearray | msgspec.Raw, kind: type[Decoded]) -> Decoded: ...
def decode_json(text: bytes | bytearray | msgspec.Raw, kind: Any = Any) -> Any:
    """Raises NotJson."""
    try:
        return msgspec.json.decode(text, type=kind)
    except _MALFORMED as error:
        raise NotJson(str(error)) from error
