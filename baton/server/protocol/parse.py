"""Decodes JSON bodies to typed requests. Raises a UserError that names the field.

Types are strict: "5" is not an integer, 1 is not true. `fields` handles fields that a type does not have.
"""

from typing import TypeVar

import msgspec

from baton.http.json_body import decode_as
from baton.server.protocol.fields import Endpoint, check_fields

T = TypeVar("T")


def parse_request(body: bytes, kind: type[T], endpoint: Endpoint) -> T:
    """Decode and check a request. Raises UserError, also for a refused field. Logs unknown fields."""
    check_fields(decode_as(body, dict[str, msgspec.Raw]), endpoint)
    return decode_as(body, kind)
