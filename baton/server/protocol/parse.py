"""Decodes JSON bodies to typed requests. Raises a UserError that names the field.

Numbers and booleans are read as in vLLM: see `lax_values`. `fields` handles fields that a type does not have.
"""

from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from baton.core.errors import UserError
from baton.http.json_body import decode_as, decode_field
from baton.http.lax_values import as_lax
from baton.server.protocol.fields import Endpoint, check_fields

T = TypeVar("T")

# Longer values must have the right types: they are converted by Python code, on the event loop.
MAX_LAX_BYTES = 64 << 10


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
    for field in _fields_of(kind):
        raw = fields.get(field.encode_name)
        if raw is None or (budget := budget - len(memoryview(raw))) < 0:
            continue
        value = decode_field(raw, field.encode_name)
        with suppress(OverflowError):  # An integer of more than 64 bits: the strict decoder names it.
            lax = msgspec.json.encode(_as_type(value, field.type))
            if lax != msgspec.json.encode(value):
                changed[field.encode_name] = msgspec.Raw(lax)
    return changed


@lru_cache
def _fields_of(kind: type) -> tuple[inspect.Field, ...]:
    node = inspect.type_info(kind)
    assert isinstance(node, inspect.StructType)
    return node.fields


def _as_type(value: Any, node: inspect.Type) -> Any:
    match node:
        case inspect.UnionType(types=members):
            if isinstance(value, str) and any(isinstance(one, inspect.StrType) for one in members):
                return value
            for one in members:
                if (new := _as_type(value, one)) is not value:
                    return new
        case inspect.ListType(item_type=item) if isinstance(value, list):
            return [_as_type(one, item) for one in value]
        case inspect.DictType(value_type=item) if isinstance(value, dict):
            return {key: _as_type(one, item) for key, one in value.items()}
        case inspect.StructType(fields=fields) if isinstance(value, dict):
            types = {field.encode_name: field.type for field in fields}
            return {name: _as_type(one, types[name]) if name in types else one for name, one in value.items()}
        case inspect.IntType():
            return as_lax(value, int)
        case inspect.FloatType():
            return as_lax(value, float)
        case inspect.BoolType():
            return as_lax(value, bool)
    return value
