"""Ways to move bytes between processes, behind one interface. They know addresses, not meaning."""

from baton.transport.registry import (
    PREFERENCE,
    Connected,
    available_names,
    choose_transport,
    make_transport,
    make_transports,
    register_all,
)

__all__ = [
    "PREFERENCE",
    "Connected",
    "available_names",
    "choose_transport",
    "make_transport",
    "make_transports",
    "register_all",
]
