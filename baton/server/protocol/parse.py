"""Decodes JSON bodies to typed requests. Raises a UserError that names the field.

Types are strict: "5" is not an integer, 1 is not true. `fields` handles fields that a type does not have.
"""

import re
from typing import TypeVar

import msgspec

from baton.core.errors import UserError
from baton.core.validation import explain
from baton.server.protocol.fields import Endpoint, check_fields

T = TypeVar("T")

_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]+)`")


def parse_request(body: bytes, kind: type[T], endpoint: Endpoint) -> T:
    """Decode and check a request. Raises UserError, also for a refused field. Logs unknown fields."""
    check_fields(parse_body(body, dict[str, msgspec.Raw]), endpoint)
    return parse_body(body, kind)


def parse_body(body: bytes, kind: type[T]) -> T:
    """Decode a body. Raises UserError. Unknown fields are ignored."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _name_field(*explain(error, kind)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise UserError("the body is nested too deeply") from None


def _name_field(problem: str, path: str) -> UserError:
    """Convert msgspec's problem to a UserError with the JSON path as its field."""
    place = path.lstrip(".")
    if missing := _MISSING.match(problem):
        name = missing["name"]
        return UserError("is required", field=f"{place}.{name}" if place else name)
    return UserError(problem[:1].lower() + problem[1:], field=place or None)
