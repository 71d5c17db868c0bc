"""A client's request, read whole."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Incoming:
    method: str
    path: str
    headers: Mapping[str, str]  # End to end, `x-request-id` included.
    request_id: str
    body: bytes = b""
    received_at_s: float = field(default_factory=time.monotonic)
