"""Baton's own connectors as cases of the kit, for `baton check --all`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.testing.contract.case import ConnectorCase
from baton.testing.contract.damage import cut_files

# Short enough for an unfetched loan to end while the kit waits; long enough for a busy machine.
TIMERS = {
    "ttl_s": 0.8,
    "round_trip_max_s": 0.4,
    "deadline_s": 2.0,
    "loan_max_s": 3.0,
    "grant_every_s": 0.2,
    "silence_s": 1.5,
    "hold_s": 1.6,
}


def our_cases(folder: Path, *, transports: tuple[str, ...] = ("memory",)) -> dict[str, ConnectorCase]:
    """Return the cases by connector name. `folder` is private to the caller; `transports` are for pull and
    push.
    """
    handoff: dict[str, Any] = {"transports": list(transports), "timers": TIMERS}
    # About sixty blocks of the toy model, or fifteen of the checkpoint: some are evicted.
    offload = {"cpu_gib": 3e-5}
    stored = folder / "kv"
    multi = {
        "connectors": [
            {"kv_connector": "BatonPullConnector", "kv_connector_extra_config": handoff},
            {"kv_connector": "BatonOffloadConnector", "kv_connector_extra_config": offload},
        ]
    }
    tiered = folder / "tiered"
    tiers: dict[str, Any] = {
        "recompute_if_faster_by_s": None,
        "tiers": [
            {"type": "host", **offload},
            {"type": "files", "path": str(tiered), "fsync": False},
            {"type": "files", "path": str(folder / "second"), "fsync": False},
        ],
        "chunk_tokens": 4,
    }
    cases = {
        "BatonPullConnector": ConnectorCase(path="BatonPullConnector", extra_config=handoff, pairing="pull"),
        "BatonPushConnector": ConnectorCase(path="BatonPushConnector", extra_config=handoff, pairing="push"),
        "BatonOffloadConnector": ConnectorCase(path="BatonOffloadConnector", extra_config=offload),
        "BatonSharedStorageConnector": ConnectorCase(
            path="BatonSharedStorageConnector",
            extra_config={
                "path": str(stored),
                "chunk_tokens": 4,
                "fsync": False,
                "recompute_if_faster_by_s": None,
            },
            break_store=lambda: cut_files(stored, flips_bits=True),
        ),
        "BatonTieredConnector": ConnectorCase(
            path="BatonTieredConnector",
            extra_config=tiers,
            break_store=lambda: cut_files(tiered, flips_bits=True),
        ),
        "BatonMultiConnector": ConnectorCase(path="BatonMultiConnector", extra_config=multi, pairing="pull"),
    }
    return {
        name: replace(case, plays_latents=True, plays_scales=True, plays_sleep=True)
        for name, case in cases.items()
    }


def in_engines(case: ConnectorCase, *, tp: int) -> ConnectorCase:
    """Return the case for real executors."""
    return replace(case, tensor_parallel_sizes=(tp,))
