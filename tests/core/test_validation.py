"""Readable validation errors: the path, the problem, and the allowed values of an enum."""

import enum
from typing import Any, Literal

import msgspec
import pytest

from baton.core.validation import explain


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Inner(msgspec.Struct):
    side: Literal["left", "right"] | None = None


class Outer(msgspec.Struct):
    colour: Colour = Colour.RED
    inner: Inner | None = None
    many: list[Inner] = []
    named: dict[str, Inner] = {}
    count: int = 0


def explained(body: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(body, Outer)
    return explain(refused.value, Outer)


@pytest.mark.parametrize(
    ("body", "path", "choices"),
    [
        ({"colour": "green"}, ".colour", "one of red, blue"),
        ({"inner": {"side": "up"}}, ".inner.side", "one of left, right"),
        ({"many": [{}, {"side": "up"}]}, ".many[1].side", "one of left, right"),
        ({"named": {"a": {"side": "up"}}}, ".named[...].side", "one of left, right"),
    ],
)
def test_an_enum_error_lists_the_allowed_values(body: dict[str, Any], path: str, choices: str) -> None:
    problem, found = explained(body)
    assert found == path
    assert problem.startswith("Invalid enum value")
    assert problem.endswith(choices)


def test_other_errors_keep_their_message() -> None:
    assert explained({"count": "3"}) == ("Expected `int`, got `str`", ".count")
