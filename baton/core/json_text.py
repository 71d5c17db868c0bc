"""Decoding of untrusted JSON. Every defect of the text raises the same error, NotJson."""

import re
from itertools import accumulate
from typing import Any, TypeVar, overload

import msgspec

Decoded = TypeVar("Decoded")

# Tool schemas have about 20 levels. Deeper values would exhaust the interpreter's stack later. The decoder's
# own limit is the interpreter's: about 1,000 levels in Python 3.11, and several thousand in 3.13.
MAX_DEPTH = 100

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = [0] * 256
for _byte in b"[{":
    _STEP[_byte] = 1
for _byte in b"]}":
    _STEP[_byte] = -1
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class NotJson(ValueError):
    """The text is not JSON, is nested too deep, or is not of the wanted type."""


def structure_of(text: bytes | bytearray) -> bytes:
    """Return the text with a quotation mark in place of each string."""
    return _STRING.sub(b'"', text)


def depth_of(structure: bytes) -> int:
    return max(accumulate(map(_STEP.__getitem__, structure.translate(None, _NOT_BRACKETS))), default=0)


@overload
def decode_json(text: bytes | bytearray | msgspec.Raw) -> Any: ...
@overload
def decode_json(text: bytes | bytearray | msgspec.Raw, kind: type[Decoded]) -> Decoded: ...
def decode_json(text: bytes | bytearray | msgspec.Raw, kind: Any = Any) -> Any:
    """Raises NotJson."""
    # A part that the decoder has left raw is of a text that was checked.
    if (
        not isinstance(text, msgspec.Raw)
        and text.count(b"{") + text.count(b"[") > MAX_DEPTH
        and depth_of(structure_of(text)) > MAX_DEPTH
    ):
        raise NotJson(f"nested too deep: at most {MAX_DEPTH} levels are allowed")
    try:
        return msgspec.json.decode(text, type=kind)
    except _MALFORMED as error:
        raise NotJson(str(error)) from error
