"""Metrics of Prometheus and vLLM's statistics: names, kinds, labels, buckets, and values of labels.

vLLM's MultiConnector finds the statistics of a connector by the name of its class, which `connectors` has.
"""

import asyncio
import re
from collections import Counter as Counted
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.connectors.counted import FewLabels
from baton.connectors.multi import MultiStats
from baton.connectors.pull.consumer.fetch import record_of
from baton.connectors.registry import BUILT_IN, connector_class
from baton.connectors.storage.stores.stats import LoadFault, NotSaved
from baton.core.config import KVTransferConfig
from baton.core.reasons import FailureCode, Fault
from baton.engine.api import FinishReason
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.notes import Outcome
from baton.router.fleet.pairs import Pairs
from baton.router.request.answers import Prefilled
from baton.router.shell.metrics import RouterMetrics
from baton.router.values.errors import FailureKind
from baton.router.values.legs import LocalReason
from baton.router.values.settings import Role, RouterSettings
from baton.server.metrics import ServerMetrics
from tests.golden.golden import ROOT, check, check_values, literals
from tests.golden.samples import ENGINE_CONFIG, P

CHILDREN = {"connectors": [{"kv_connector": "BatonPullConnector"}]}
TIERS = {"tiers": [{"type": "host", "cpu_gib": 1}, {"type": "files", "path": "/kv"}]}
BASES = (Counter, Gauge, Histogram)


def lines(registry: CollectorRegistry) -> Iterator[str]:
    """A line for each metric that counts by itself; metrics that are collected on request are left out."""
    for metric in registry._collector_to_names:
        if isinstance(metric, BASES):
            yield _line(metric._name, metric._type, metric._labelnames, getattr(metric, "_upper_bounds", ()))


def _line(name: str, kind: str, labels: Iterable[str], bounds: Sequence[float] = ()) -> str:
    buckets = f" up to {' '.join(f'{bound:g}' for bound in bounds)}" if bounds else ""
    return f"{name} {kind} {{{', '.join(labels)}}}{buckets}"


def config_of(connector: str) -> Any:
    extra = {"BatonMultiConnector": CHILDREN, "BatonTieredConnector": TIERS}.get(connector, {})
    transfer = KVTransferConfig(kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra)
    return msgspec.structs.replace(ENGINE_CONFIG, kv_transfer_config=transfer)


def of_connector(connector: str) -> list[str]:
    registry, config = CollectorRegistry(), config_of(connector)
    types = {kind: partial(kind, registry=registry) for kind in BASES}
    connector_class(config.kv_transfer_config).build_prom_metrics(config, types, ["of_host"], {0: ["value"]})  # type: ignore[arg-type]
    return sorted(lines(registry))


async def of_router() -> list[str]:
    fleet = Fleet(RouterSettings(prefill_urls=("http://p",), decode_urls=("http://d",)))
    registry = RouterMetrics(fleet, Pairs()).registry
    asked = [family for family in registry.collect() if re.search("_(engine|pair)_", family.name)]
    collected = [_line(family.name, family.type, family._labelnames) for family in asked]  # type: ignore[attr-defined]
    return sorted([*lines(registry), *collected])


def test_names() -> None:
    found = {
        "baton serve": sorted(lines(ServerMetrics("model")._registry)),
        "baton route": asyncio.run(of_router()),
        **{connector: of_connector(connector) for connector in sorted(BUILT_IN)},
    }
    of_pull = found["BatonPullConnector"]
    assert found.pop("BatonPushConnector") == of_pull
    found["BatonMultiConnector"] = [line for line in found["BatonMultiConnector"] if line not in of_pull]
    of_tiers = found.pop("BatonTieredConnector")
    parts = ("BatonMultiConnector", "BatonOffloadConnector", "BatonSharedStorageConnector")
    assert set(of_tiers) == {line for name in parts for line in found[name]}
    check("metrics", [line for name, each in found.items() for line in (f"# {name}", *each)])


def test_the_guide_names_every_metric_of_our_connectors() -> None:
    told = (ROOT / "docs" / "operations.md").read_text()
    names = [line.split()[0] for connector in BUILT_IN for line in of_connector(connector)]
    missing = [name for name in names if f"`{name}" not in told]
    assert not missing


def test_data_of_statistics() -> None:
    """What crosses the processes of an engine, ours or vLLM's, and is built again there."""
    found = {}
    for name in sorted(BUILT_IN):
        stats = connector_class(config_of(name).kv_transfer_config).build_kv_connector_stats()
        assert stats is not None
        found[name] = " ".join(sorted(stats.data))
    multi = MultiStats(errors=Counted({"Child": 1}), retired={"Child"})
    found["BatonMultiConnector"] = str(multi.to_dict())
    check_values(
        "statistics", {**found, "a transfer of BatonPullConnector": " ".join(record_of(TRANSFER, 2, 1.0))}
    )


TRANSFER: Any = SimpleNamespace(
    request_id="r",
    offer=SimpleNamespace(transfer_id="t", producer=P),
    num_moved_tokens=16,
    early=(),
    unread=(),
    claimed_at=0.25,
    ready_at=0.25,
    fetched_at=0.5,
    started_at=0.5,
    read_at=0.75,
    read_ends=[SimpleNamespace(nbytes=1, duration_s=0.1, num_descriptors=1, transport="tcp")],
)

# --- Values of labels -------------------------------------------------------------------------------


def members(union: Any) -> list[str]:
    """The values of a union of literals."""
    return [value for part in get_args(union) for value in (get_args(part) or [part])]


def test_labels_that_types_declare() -> None:
    declared = {
        "baton:request_success, finished_reason": members(FinishReason),
        "baton:kv_transfer_failures, reason": [code.value for code in FailureCode],
        "baton:kv_tickets_refused, reason": [fault.value for fault in Fault],
        "baton:kv_peer_failures, peer beyond the first ones": [FewLabels.OTHERS],
        "baton:storage_unusable_files, reason": members(LoadFault),
        "baton:storage_not_saved_chunks, reason": members(NotSaved),
        "baton:router_legs, role": members(Role),
        "baton:router_legs, outcome besides a status": [*members(FailureKind), "cancelled"],
        "baton:router_handoffs, outcome": members(Outcome),
        "baton:router_prefills, where": members(get_type_hints(Prefilled)["where"]),
        "baton:router_prefills, reason": members(LocalReason),
        "baton:kv_offload_bytes, direction": ["load", "store"],
    }
    assert "cancelled" in literals("baton/router")
    assert {"load", "store"} <= literals("baton/connectors/storage/memory")
    check_values("labels", {name: ", ".join(sorted(values)) for name, values in declared.items()})
