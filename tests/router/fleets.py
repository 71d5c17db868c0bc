"""Fleets without servers."""

from typing import Any

from baton.router.fleet.engine import Engine
from baton.router.fleet.fleet import Fleet
from baton.router.values.settings import RouterSettings

UNIX_S = 1_000.0  # Time of all events.


def fleet_of(num_prefill: int = 1, num_decode: int = 2, **settings: Any) -> Fleet:
    urls = {
        f"{role}_urls": tuple(f"http://{role[0]}{number}:1" for number in range(count))
        for role, count in (("prefill", num_prefill), ("decode", num_decode))
    }
    return Fleet(RouterSettings(**{**urls, **settings}), unix_clock=lambda: UNIX_S)


def roles_of(fleet: Fleet) -> tuple[list[Engine], list[Engine]]:
    prefill, decode = ([one for one in fleet.engines if one.role == role] for role in ("prefill", "decode"))
    return prefill, decode


def decoders(fleet: Fleet) -> list[Engine]:
    return roles_of(fleet)[1]
