"""Types as text: what their values look like as msgpack, JSON or TOML, without the names of classes.

map, no other keys            a struct whose fields have names on the wire
  port: int = 0               a field, its type, its default
  address: array              a struct or named tuple whose fields have places
    engine_id: str
    epoch: int
"""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect
from msgspec.inspect import Type

_PLAIN = {
    inspect.AnyType: "any",
    inspect.BoolType: "bool",
    inspect.BytesType: "bytes",
    inspect.FloatType: "float",
    inspect.IntType: "int",
    inspect.NoneType: "null",
    inspect.RawType: "raw",
    inspect.StrType: "str",
}
_LIMITS = ("ge", "gt", "le", "lt", "min_length", "max_length", "pattern")


def shape(kind: Any) -> list[str]:
    """Lines for a struct, or any type that msgspec knows."""
    return _indented(*_shape(inspect.type_info(kind)))


def fields(kind: type[msgspec.Struct]) -> list[str]:
    """Lines for the fields of a struct alone."""
    return list(_field_lines(_struct(inspect.type_info(kind)).fields))


def _struct(kind: Type) -> inspect.StructType:
    assert isinstance(kind, inspect.StructType)
    return kind


def _shape(kind: Type) -> tuple[str, list[str]]:
    """What it is, and the lines that belong below."""
    match kind:
        case inspect.Metadata(type=inner):
            return _shape(inner)
        case inspect.StructType():
            words = ["array" if kind.array_like else "map"]
            if kind.tag is not None:
                words.append(f"tag {'' if kind.array_like else f'{kind.tag_field}='}{kind.tag!r}")
            if kind.forbid_unknown_fields:
                words.append("no other keys" if not kind.array_like else "no further fields")
            return ", ".join(words), list(_field_lines(kind.fields))
        case inspect.NamedTupleType():
            return "array", list(_field_lines(kind.fields))
        case inspect.LiteralType(values=values):
            return " | ".join(map(repr, values)), []
        case inspect.EnumType(cls=cls):
            return " | ".join(repr(member.value) for member in cls), []
        case inspect.UnionType(types=types) if sum(isinstance(one, inspect.StructType) for one in types) > 1:
            return "one of these", [text for one in types for text in _indented(*_shape(one))]
        case inspect.UnionType(types=types):
            return _joined(" | ", types)
        case inspect.TupleType(item_types=types):
            head, lines = _joined(", ", types)
            return f"[{head}]", lines
        case (
            inspect.ListType(item_type=item)
            | inspect.VarTupleType(item_type=item)
            | inspect.CollectionType(item_type=item)
        ):
            head, lines = _shape(item)
            return f"list of ({head}){_limits(kind)}", lines
        case inspect.DictType(key_type=key, value_type=value):
            head, lines = _joined(" to ", (key, value))
            return f"object from {head}", lines
        case _:
            return _PLAIN[type(kind)] + _limits(kind), []


def _joined(joint: str, kinds: tuple[Type, ...]) -> tuple[str, list[str]]:
    shapes = [_shape(kind) for kind in kinds]
    return joint.join(head for head, _ in shapes), [line for _, lines in shapes for line in lines]


def _indented(head: str, lines: list[str]) -> list[str]:
    return [head, *(f"  {line}" for line in lines)]


def _limits(kind: Type) -> str:
    limits = [f" {name} {limit}" for name in _LIMITS if (limit := getattr(kind, name, None)) is not None]
    return "".join(limits)


def _field_lines(fields: tuple[inspect.Field, ...]) -> Iterator[str]:
    for field in fields:
        head, lines = _shape(field.type)
        yield from _indented(f"{field.encode_name}: {head}{_default(field)}", lines)


def _default(field: inspect.Field) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        made = field.default_factory()
        return f" = {made!r}" if made == field.default_factory() else " = a new one"
    match field.default:
        case msgspec.NODEFAULT:
            return ""
        case msgspec.Struct() as value:
            assert value == type(value)(), "no default has other values than its fields"
            return " = the defaults below"
        case value:
            return f" = {value!r}"
