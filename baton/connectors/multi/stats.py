"""Statistics of the children of a Multi connector, each separate, and Multi's own about them.

{"BatonPullConnector": {...}, "Mine": {...},              each child's own `to_dict()`
 "(own)": {"errors": {"Mine": 2},                         baton:kv_child_connector_errors_total
           "retired": {"Mine": true}}}                    baton:kv_child_connector_retired

A child that is a Multi connector itself has such a dict, too. The metrics name its children by their path:
"BatonTieredConnector/BatonOffloadConnector".
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeAlias

from baton.connectors.multi.children import ChildConfig
from baton.contract import KVConnectorPromMetrics, KVConnectorStats

logger = logging.getLogger(__name__)

OWN: Final = "(own)"  # No connector can have this name.

BuildStats: TypeAlias = Callable[[dict[str, Any]], KVConnectorStats | None]
"""A connector's `build_kv_connector_stats`."""


@dataclass
class MultiStats(KVConnectorStats):
    """Statistics of one step. The children's are objects until `to_dict` makes `data`."""

    children: dict[str, KVConnectorStats] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)  # Contained errors of scheduler halves.
    retired: set[str] = field(default_factory=set)

    def add(self, name: str, stats: KVConnectorStats | None) -> None:
        if stats is not None:
            self.children[name] = stats

    def count(self, name: str, *, num_errors: int, is_retired: bool) -> None:
        if num_errors:
            self.errors[name] += num_errors
        if is_retired:
            self.retired.add(name)

    def of_child(self, name: str) -> KVConnectorStats | None:
        return self.children.get(name)

    def reset(self) -> None:
        self.children.clear()
        self.errors.clear()
        self.retired.clear()

    def aggregate(self, other: Self) -> Self:
        for name, theirs in other.children.items():
            own = self.children.get(name)
            if own is None:
                self.children[name] = theirs
                continue
            try:
                self.children[name] = own.aggregate(theirs)
            except Exception:  # Only one rank's numbers of this child are lost.
                logger.exception("the statistics of %s cannot be aggregated", name)
                self.errors[name] += 1
        self.errors += other.errors
        self.retired |= other.retired
        return self

    def reduce(self) -> dict[str, int | float | str]:
        figures: dict[str, int | float | str] = {}
        for name, stats in self.children.items():
            figures |= {f"{name} {key}": value for key, value in stats.reduce().items()}
        figures |= {f"{name} errors": count for name, count in self.errors.items()}
        return figures | {f"{name} retired": "yes" for name in sorted(self.retired)}

    def is_empty(self) -> bool:
        return not (self.errors or self.retired) and all(s.is_empty() for s in self.children.values())

    def to_dict(self) -> dict[str, Any]:
        own: dict[str, Any] = {}
        if self.errors:
            own["errors"] = dict(self.errors)
        if self.retired:
            own["retired"] = dict.fromkeys(sorted(self.retired), True)
        parts = {name: stats.to_dict() for name, stats in self.children.items()}
        return {**parts, OWN: own} if own else parts


def rebuilt(data: Mapping[str, Any], builders: Mapping[str, BuildStats]) -> MultiStats:
    """Rebuilds statistics from a `to_dict`. Leaves out children whose builder is missing or raises."""
    stats = MultiStats()
    own = data.get(OWN, {})
    stats.errors.update(own.get("errors", {}))
    stats.retired.update(own.get("retired", ()))
    for name, build in builders.items():
        if name not in data:
            continue
        try:
            stats.add(name, build(data[name]))
        except Exception as error:  # Only this child's numbers are lost.
            logger.warning("the statistics of %s cannot be read: %r", name, error)
    return stats


class MultiPromMetrics(KVConnectorPromMetrics):
    """Each child's own metrics, under their own names, and two about the children."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
        children: Sequence[ChildConfig],
    ) -> None:
        from prometheus_client import Counter as PromCounter
        from prometheus_client import Gauge

        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        labels = [*labelnames, "connector"]
        self._errors = metric_types[PromCounter](
            name="baton:kv_child_connector_errors",
            documentation="Contained errors of this child connector.",
            labelnames=labels,
        )
        self._retired = metric_types[Gauge](
            name="baton:kv_child_connector_retired",
            documentation="1: this child connector has failed permanently; restart the engine.",
            labelnames=labels,
        )
        self._children: dict[str, KVConnectorPromMetrics] = {}  # Metrics of the children, by path.
        self._nested: set[str] = set()  # Paths of children that have children.
        self._made: dict[type[Any], KVConnectorPromMetrics | None] = {}
        self._add(children, "")

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._observe(transfer_stats_data, engine_idx, "")

    def _add(self, children: Sequence[ChildConfig], parent: str) -> None:
        for child in children:
            path = parent + child.name
            for values in self._per_engine_labelvalues.values():
                self._retired.labels(*values, path).set(0)
            children_of = getattr(child.connector, "children_of", None)
            if children_of is not None:
                self._nested.add(path)
                self._add(children_of(child.config), f"{path}/")
                continue
            if child.connector not in self._made:  # Children of one class share their series.
                self._made[child.connector] = self._make(child)
            if (metrics := self._made[child.connector]) is not None:
                self._children[path] = metrics

    def _observe(self, stats: Mapping[str, Any], engine_idx: int, parent: str) -> None:
        values = self._per_engine_labelvalues[engine_idx]
        own = stats.get(OWN, {})
        for name, count in own.get("errors", {}).items():
            self._errors.labels(*values, parent + name).inc(count)
        for name in own.get("retired", ()):
            self._retired.labels(*values, parent + name).set(1)
        for name, data in stats.items():
            path = parent + name
            try:
                if path in self._nested:
                    self._observe(data, engine_idx, f"{path}/")
                elif (metrics := self._children.get(path)) is not None:
                    metrics.observe(data, engine_idx)
            except Exception as error:  # Only this child's numbers are lost.
                self._errors.labels(*values, path).inc()
                logger.warning("the statistics of %s are not counted: %r", path, error)

    def _make(self, child: ChildConfig) -> KVConnectorPromMetrics | None:
        try:
            return child.connector.build_prom_metrics(
                child.config,
                dict(self._metric_types),
                list(self._labelnames),
                dict(self._per_engine_labelvalues),
            )
        except Exception:  # A metric name may be taken, for example.
            logger.exception("%s cannot publish its metrics", child.name)
            return None
