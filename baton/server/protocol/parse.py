"""Decodes JSON bodies to typed requests. Raises a UserError that names the field.

Numbers and booleans are read as in vLLM: see `lax_values`. `fields` handles fields that a type does not have.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar, get_type_hints

import msgspec
from msgspec import inspect

from baton.core.errors import UserError
from baton.http.json_body import decode_as, decode_field
from baton.http.lax_values import as_lax
from baton.server.protocol.fields import Endpoint, check_fields

T = TypeVar("T")
Convert: TypeAlias = Callable[[Any], Any]

_SCALARS: dict[type, type] = {inspect.IntType: int, inspect.FloatType: float, inspect.BoolType: bool}
_UNKNOWN: tuple[Any, Convert] = (Any, lambda value: value)

# Longer values must have the right types: Python code converts them on the event loop.
MAX_LAX_BYTES = 16 << 10  # 7 ms if each element is a text.


def parse_request(body: bytes, kind: type[T], endpoint: Endpoint) -> T:
    """Decode and check a request. Raises UserError, also for a refused field. Logs unknown fields."""
    fields = decode_as(body, dict[str, msgspec.Raw])
    check_fields(fields, endpoint)
    try:
        return decode_as(body, kind)
    except UserError:
        if not (changed := _lax_fields(fields, kind)):
            raise
        return decode_as(msgspec.json.encode(fields | changed), kind)


def _lax_fields(fields: dict[str, msgspec.Raw], kind: type) -> dict[str, msgspec.Raw]:
    """Return the fields that have other values in lax mode."""
    changed = {}
    budget = MAX_LAX_BYTES
    for name, (field_type, convert) in _types_of(kind).items():
        raw = fields.get(name)
        if raw is None or _is_strict(raw, field_type) or (budget := budget - len(memoryview(raw))) < 0:
            continue
        value = decode_field(raw, name)
        with suppress(OverflowError):  # An integer of more than 64 bits: the strict decoder names it.
            lax = msgspec.json.encode(convert(value))
            if lax != msgspec.json.encode(value):
                changed[name] = msgspec.Raw(lax)
    return changed


def _is_strict(raw: msgspec.Raw, field_type: Any) -> bool:
    try:
        msgspec.json.decode(raw, type=field_type)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True


@lru_cache
def _types_of(kind: type) -> dict[str, tuple[Any, Convert]]:
    """Return the annotation of each field, and the conversion of its values."""
    hints, node = get_type_hints(kind), inspect.type_info(kind)
    assert isinstance(node, inspect.StructType)
    return {one.encode_name: (hints[one.name], _conversion(one.type)) for one in node.fields}


def _conversion(node: inspect.Type) -> Convert:
    """Return a function that reads a JSON value as this type, and leaves what it cannot read as it is."""
    if (scalar := _SCALARS.get(type(node))) is not None:
        return lambda value: value if type(value) is scalar else as_lax(value, scalar)
    match node:
        case inspect.UnionType(types=members):
            strict = {_SCALARS.get(type(one)) for one in members}
            if any(isinstance(one, inspect.StrType) for one in members):
                strict.add(str)  # Digits in a text stay a text.
            choices = [_conversion(one) for one in members]
            return lambda value: value if type(value) in strict else _first_change(value, choices)
        case inspect.ListType(item_type=item):
            of_item = _conversion(item)
            return lambda value: [of_item(one) for one in value] if isinstance(value, list) else value
        case inspect.DictType(value_type=item):
            of_item = _conversion(item)
            return lambda value: (
                {key: of_item(one) for key, one in value.items()} if isinstance(value, dict) else value
            )
        case inspect.StructType(cls=kind):
            return lambda value: (
                {key: _types_of(kind).get(key, _UNKNOWN)[1](one) for key, one in value.items()}
                if isinstance(value, dict)
                else value
            )
    return lambda value: value


def _first_change(value: Any, choices: list[Convert]) -> Any:
    return next((new for convert in choices if (new := convert(value)) is not value), value)
