"""Fields of a `HostView` of one rank that tests have no interest in."""

from typing import Any

from baton.connectors.host_view import BATON_POLICY
from baton.core.identity import CurrentIdentity, KVIdentity

KV_IDENTITY = KVIdentity("model", "weights", "float32", 1, 1, 2, "seed")


def view_fields(**changes: Any) -> dict[str, Any]:
    fields = {
        "engine_id": "e",
        "current": CurrentIdentity(KV_IDENTITY),
        "tp_size": 1,
        "tp_rank": 0,
        "is_producer": True,
        "is_consumer": True,
        "secret": None,
        "policy": BATON_POLICY,
    }
    return fields | changes
