"""Transports of bytes between processes, with one interface. They do not know the bytes' meaning."""

from baton.transport.registry import (
    PREFERENCE,
    Connected,
    available_names,
    choose_transport,
    host_names,
    make_transport,
    make_transports,
    register_all,
)

__all__ = [
    "PREFERENCE",
    "Connected",
    "available_names",
    "choose_transport",
    "host_names",
    "make_transport",
    "make_transports",
    "register_all",
]
