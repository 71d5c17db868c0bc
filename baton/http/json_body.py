"""Checks the cost of a JSON body before it is decoded.

msgspec holds the interpreter's lock while it decodes, so the cost of one body must be bounded. Measured on
this decoder: 4 MiB of `{}` take 57 ms, 4 MiB of object keys 86 ms, 2^20 token ids 33 ms, 4 MiB of text 2
ms. Numbers and text are cheap; objects, arrays and strings are counted.
"""

import re
from itertools import accumulate

import msgspec

from baton.core.errors import UserError
from baton.core.json_text import NotJson, decode_json

MAX_DEPTH = 100  # Tool schemas have about 20 levels. Deeper ones would exhaust the interpreter's stack later.
MAX_ITEMS = 1 << 16  # Strings, keys, arrays and objects of one body: about 10 ms.
MAX_NUMBERS = 1 << 20

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = [0] * 256
for _byte in b"[{":
    _STEP[_byte] = 1
for _byte in b"]}":
    _STEP[_byte] = -1


def is_cheap(raw: bytes) -> bool:
    """Return whether counts alone show that `check_cost` would accept it. 4 MiB take milliseconds."""
    return (
        raw.count(b"{") + raw.count(b"[") <= MAX_DEPTH
        and raw.count(b'"') <= MAX_ITEMS
        and raw.count(b",") <= MAX_NUMBERS
    )


def check_cost(raw: bytes) -> None:
    """Raise UserError for JSON that is nested too deeply or has too many values."""
    if is_cheap(raw):
        return
    structure = _STRING.sub(b'"', raw)
    brackets = structure.translate(None, _NOT_BRACKETS)
    if max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > MAX_DEPTH:
        raise UserError(f"is nested too deeply: at most {MAX_DEPTH} levels are allowed", field="body")
    num_items = structure.count(b'"') + len(brackets) // 2
    if num_items > MAX_ITEMS:
        raise UserError(
            f"has {num_items} strings, arrays and objects; at most {MAX_ITEMS} are allowed",
            field="body",
        )
    if structure.count(b",") > MAX_NUMBERS:
        raise UserError(f"has more than {MAX_NUMBERS} numbers", field="body")


def compact(raw: bytes) -> bytes:
    """Return the same JSON without white space and escapes. Raises UserError.

    Runs in a worker process: its cost has no useful bound.
    """
    check_cost(raw)
    try:
        return msgspec.json.encode(decode_json(raw))
    except (NotJson, OverflowError, UnicodeEncodeError) as error:
        raise UserError(f"is not valid JSON: {error}", field="body") from error
