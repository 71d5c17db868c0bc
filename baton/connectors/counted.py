"""Statistics made of counts: a connector declares the counts and their names; the rest is implemented here.

    class MyStats(CountedStats):
        counts = {"hits": Count("baton:my_hits", "Prompts that were found.")}
        labelled = {"failures": LabelledCount("baton:my_failures", "reason", "Prompts that were lost.")}

The keys are those of `KVConnectorStats.data`. Prometheus appends `_total` to the names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from baton.contract import KVConnectorPromMetrics, KVConnectorStats


class Count(NamedTuple):
    name: str  # The name in Prometheus.
    text: str


class LabelledCount(NamedTuple):
    """One count for each value of a label."""

    name: str
    label: str
    text: str


class FewLabels:
    """Values of a label. The first MOST keep their names and further ones share one, because each is a series
    that stays for ever.

    The names of peers grow with every engine that was ever started.
    """

    MOST: ClassVar[int] = 200
    OTHERS: ClassVar[str] = "(others)"

    def __init__(self) -> None:
        self._known: set[str] = set()

    def name_of(self, value: str) -> str:
        if value not in self._known:
            if len(self._known) >= self.MOST:
                return self.OTHERS
            self._known.add(value)
        return value


@dataclass
class CountedStats(KVConnectorStats):
    """Counts of one step, until `take` is called."""

    counts: ClassVar[Mapping[str, Count]]
    labelled: ClassVar[Mapping[str, LabelledCount]] = {}
    gauges: ClassVar[Mapping[str, Count]] = {}  # Latest values, not added up; absent until set.

    @classmethod
    def prom_metrics(cls, *of_engine: Any) -> CountedPromMetrics:
        """`of_engine`: the arguments of KVConnectorPromMetrics."""
        return CountedPromMetrics(cls, *of_engine)

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = {**dict.fromkeys(self.counts, 0), **{name: {} for name in self.labelled}}

    def add(self, **counts: float) -> None:
        for name, count in counts.items():
            assert name in self.counts, name
            self.data[name] += count

    def add_for(self, name: str, label: str, count: float = 1) -> None:
        assert name in self.labelled, name
        of_name = self.data[name]
        of_name[label] = of_name.get(label, 0) + count

    def aggregate(self, other: Self) -> Self:
        self.data.update({name: other.data[name] for name in self.gauges if name in other.data})
        for name in self.counts:
            self.data[name] += other.data[name]
        for name in self.labelled:
            self.data[name] = dict(Counter(self.data[name]) + Counter(other.data[name]))
        return self

    def is_empty(self) -> bool:
        return not any(self.data.values()) and self.gauges.keys().isdisjoint(self.data)

    def take(self) -> Self | None:
        """Returns these counts and resets them. None if all are zero."""
        if self.is_empty():
            return None
        taken = type(self)(self.data)
        self.reset()
        return taken


class CountedPromMetrics(KVConnectorPromMetrics):
    """Publishes the counts of `kind`; a subclass adds other metrics."""

    def __init__(
        self,
        kind: type[CountedStats],
        vllm_config: Any,
        metric_types: Mapping[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        from prometheus_client import Counter as PromCounter
        from prometheus_client import Gauge

        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._kind = kind
        counter = metric_types[PromCounter]
        self._counts, self._gauges = (
            {
                key: self.make_per_engine(
                    metric_types[of_counts](name=count.name, documentation=count.text, labelnames=labelnames)
                )
                for key, count in counts.items()
            }
            for of_counts, counts in ((PromCounter, kind.counts), (Gauge, kind.gauges))
        )
        self._labelled = {
            key: counter(name=count.name, documentation=count.text, labelnames=[*labelnames, count.label])
            for key, count in kind.labelled.items()
        }
        self._labels = {count.label: FewLabels() for count in kind.labelled.values()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, children in self._counts.items():
            children[engine_idx].inc(transfer_stats_data[key])
        for key, children in self._gauges.items():
            if key in transfer_stats_data:
                children[engine_idx].set(transfer_stats_data[key])
        for key, metric in self._labelled.items():
            labels = self._labels[self._kind.labelled[key].label]
            for value, count in transfer_stats_data[key].items():
                of_engine = self._per_engine_labelvalues[engine_idx]
                metric.labels(*of_engine, labels.name_of(value)).inc(count)
