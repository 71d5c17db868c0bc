"""Checks the cost of a JSON body before it is decoded, and decodes it: errors name the field.

msgspec holds the interpreter's lock while it decodes, so the cost of one body must be bounded. Measured on
this decoder: 4 MiB of `{}` take 57 ms, 4 MiB of object keys 86 ms, 2^20 token ids 33 ms, 4 MiB of text 2
ms. Numbers and text are cheap; objects, arrays and strings are counted.
"""

import re
import secrets
from typing import Any, TypeVar

import msgspec

from baton.core.errors import UserError
from baton.core.json_text import MAX_DEPTH, NotJson, decode_json, depth_of, structure_of
from baton.core.validation import explain

T = TypeVar("T")

MAX_ITEMS = 1 << 16  # Strings, keys, arrays and objects of one body: about 10 ms.
MAX_NUMBERS = 1 << 20

_FIELD = re.compile(r"^Object (?P<what>missing required|contains unknown) field `(?P<name>[^`]+)`")
# An escape: a whole surrogate pair, half of one (`half`), or another.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|(?P<half>u[dD][89a-fA-F][\da-fA-F]{2})|.)",
    re.DOTALL,
)


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
    structure = structure_of(raw)
    if depth_of(structure) > MAX_DEPTH:
        raise UserError(f"is nested too deeply: at most {MAX_DEPTH} levels are allowed", field="body")
    num_items = structure.count(b'"') + structure.count(b"[") + structure.count(b"{")
    if num_items > MAX_ITEMS:
        raise UserError(
            f"has {num_items} strings, arrays and objects; at most {MAX_ITEMS} are allowed",
            field="body",
        )
    if structure.count(b",") > MAX_NUMBERS:
        raise UserError(f"has more than {MAX_NUMBERS} numbers", field="body")


def decode_as(raw: bytes, kind: type[T]) -> T:
    """Decode a body, or a part of it. Raises UserError. Unknown fields are ignored."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _name_field(*explain(error, kind)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if (name := _field_with_half_character(raw)) is not None:
            raise UserError("has half of a UTF-16 surrogate pair: no character", field=name) from None
        raise UserError(f"is not valid JSON: {error}", field="body") from None
    except RecursionError:
        raise UserError("is nested too deeply", field="body") from None


def decode_field(raw: msgspec.Raw, name: str) -> Any:
    """Decode the value of one field of a body. Raises UserError."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.ValidationError as error:
        problem, path = explain(error, Any)
        raise _name_field(problem, name + path) from None
    except RecursionError:
        raise UserError("is nested too deeply", field=name) from None


def _name_field(problem: str, path: str) -> UserError:
    """Convert msgspec's problem to a UserError with the JSON path as its field."""
    place = path.lstrip(".")
    if found := _FIELD.match(problem):
        why = "is required" if found["what"] == "missing required" else "is not a field here"
        return UserError(why, field=f"{place}.{found['name']}" if place else found["name"])
    return UserError(problem[:1].lower() + problem[1:], field=place or "body")


def _field_with_half_character(raw: bytes) -> str | None:
    """Return the first field with half of a surrogate pair, which Python's json module writes and reads.

    The decoder reports such a text as malformed at some byte. So the halves are replaced by a mark.
    """
    mark = secrets.token_hex(16).encode()
    text = _ESCAPE.sub(lambda found: mark if found["half"] else found[0], raw)
    try:
        fields = decode_json(text, dict[str, msgspec.Raw])
    except NotJson:
        return None
    return next((name for name, value in fields.items() if mark in bytes(value)), None)


def compact(raw: bytes) -> bytes:
    """Return the same JSON without white space and escapes. Raises UserError.

    Runs in a worker process: its cost has no useful bound.
    """
    check_cost(raw)
    try:
        return msgspec.json.encode(decode_as(raw, Any))
    except (OverflowError, UnicodeEncodeError) as error:
        raise UserError(f"is not valid JSON: {error}", field="body") from error
