"""Readable forms of msgspec's validation errors: the path apart from the problem, with the allowed values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import inspect

# msgspec ends its messages with the path: "Expected `int`, got `str` - at `$.max_tokens`".
_PATH = re.compile(r"^(?P<problem>.*) - at `(?:key in )?\$(?P<path>.*)`$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[[^\]]*\]")
_ENUM_PROBLEM = "Invalid enum value"


def explain(error: msgspec.ValidationError, kind: Any) -> tuple[str, str]:
    """(problem, path) of an error about a value of type `kind`, the path as ".stream_options[...]".

    A problem with a `Literal` or an enum ends with the allowed values.
    """
    problem, path = str(error), ""
    if found := _PATH.match(problem):
        problem, path = found["problem"], found["path"]
    if problem.startswith(_ENUM_PROBLEM):
        choices = _choices(inspect.type_info(kind), [step[1] or "" for step in _STEP.finditer(path)])
        if choices:
            problem += f"; one of {', '.join(map(str, choices))}"
    return problem, path


def _choices(node: inspect.Type, steps: Sequence[str]) -> list[Any]:
    """Allowed values at the end of `steps`; an empty step is an element of a list or of a mapping."""
    match node:
        case inspect.UnionType(types=types):
            return [choice for member in types for choice in _choices(member, steps)]
        case inspect.LiteralType(values=values) if not steps:
            return list(values)
        case inspect.EnumType(cls=cls) if not steps:
            return [member.value for member in cls]
        case inspect.StructType(fields=fields) if steps:
            return [
                choice
                for field in fields
                if field.encode_name == steps[0]
                for choice in _choices(field.type, steps[1:])
            ]
        case inspect.ListType(item_type=item) | inspect.DictType(value_type=item) if steps:
            return _choices(item, steps[1:])
        case _:
            return []
