"""Bytes in, typed request out; or a UserError that names the field.

Types are strict ("5" is not an integer, 1 is not true); fields that we do not know are ignored, as every
OpenAI-compatible server does, since clients send what other servers understand.
"""

import re
from typing import Any, TypeVar

import msgspec

from baton.core.errors import UserError

T = TypeVar("T")

# msgspec ends its messages with the place: "Expected `int`, got `str` - at `$.max_tokens`".
_PLACE = re.compile(r"^(?P<problem>.*) - at `(?P<place>(?:key in )?\$.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]+)`")


def parse_body(body: bytes, kind: type[T]) -> T:
    """Raises UserError."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _name_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise UserError("the body is nested too deeply") from None


def _name_field(message: str) -> UserError:
    """Turn msgspec's message into a UserError with the JSON path as its field."""
    problem, place = message, ""
    if found := _PLACE.match(message):
        problem = found["problem"]
        place = found["place"].removeprefix("key in ").removeprefix("$").lstrip(".")
    if missing := _MISSING.match(problem):
        name = missing["name"]
        return UserError("is required", field=f"{place}.{name}" if place else name)
    return UserError(problem[:1].lower() + problem[1:], field=place or None)


def refuse_unsupported(fields: dict[str, Any]) -> None:
    """Fields that would change the answer and that we cannot honour: better a 400 than another answer."""
    for name, (value, mend) in fields.items():
        if value:
            raise UserError(mend, field=name)
