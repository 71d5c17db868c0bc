"""Ways to move bytes between processes, behind one interface. They know addresses, not meaning."""

from baton.transport.registry import (
    Connected,
    available_names,
    choose_transport,
    make_transport,
    make_transports,
    register_all,
)

__all__ = [
    "Connected",
    "available_names",
    "choose_transport",
    "make_transport",
    "make_transports",
    "register_all",
]
