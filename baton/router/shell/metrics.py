"""Metrics of the router, in a registry of its own (so that two routers fit into one process)."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from baton.router.fleet.engine import Engine
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.pairs import Pairs
from baton.router.request.events import Count
from baton.router.request.timeline import LegTimeline, RequestTimeline

Family: TypeAlias = list[tuple[str, dict[str, str], float]]  # Samples of one metric: name, labels, value.
Samples: TypeAlias = dict[str, Family]  # Families of one process, by metric.

GAUGES = ("baton:router_in_flight", "baton:router_waiting")  # Gauges that are summed over processes.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
# Name without the prefix: type, documentation, and labels (of a histogram: buckets).
_FAMILIES: Mapping[str, tuple[type[Any], str, Sequence[Any]]] = {
    "requests": (
        Counter,
        "Requests of clients, by the status that they got (499: the client went away).",
        ["status"],
    ),
    "in_flight": (Gauge, "Requests being served.", ()),
    "waiting": (Gauge, "Of these, requests in the router's queue.", ()),
    "legs": (
        Counter,
        "Legs to engines by outcome: an HTTP status, closed, unreachable, broken, timeout or cancelled.",
        ["role", "engine", "outcome"],
    ),
    "prefills": (Counter, "Where prompts were prefilled: remote, or local and why.", ["where", "reason"]),
    "pushes": (
        Counter,
        "Prompts to be pushed, by when the decode leg left: at_once, late (before P had answered), or "
        "after, as a pull's.",
        ["decode_leg"],
    ),
    "retries": (Counter, "Legs tried again on another engine.", ["role"]),
    "retries_refused": (Counter, "Legs not tried again, nor hedged, because too many had been.", ()),
    "hedges": (Counter, "Prefill legs sent to a second engine because the first one was late.", ()),
    "hedges_won": (Counter, "Of these, the legs whose answer was used.", ()),
    "admissions": (
        Counter,
        "Requests by what the queue did: at_once, after_waiting, refused (early, or the queue was full), "
        "or given_up (after waiting).",
        ["outcome"],
    ),
    "rate_limits": (
        Counter,
        "Requests of tenants with limits by outcome: let_in, refused (429), or unavailable (let in, "
        "because the counts could not be reached).",
        ["outcome"],
    ),
    "queue_seconds": (
        Histogram,
        "In the router's queue, of requests that had to wait and went on.",
        _SECONDS,
    ),
    "member_changes": (
        Counter,
        "Members of the fleet that joined or changed, left, or were held as the last ones of their role.",
        ["change"],
    ),
    "source_members": (Gauge, "Members that a source named last.", ["source"]),
    "source_skipped_entries": (
        Gauge,
        "Entries of a source that cannot be read, and are skipped.",
        ["source"],
    ),
    "source_failures": (
        Counter,
        "Times that a source of members could not be read, or was silent.",
        ["source"],
    ),
    "broken_streams": (
        Counter,
        "Streams that ended with an error event because the decode engine failed.",
        (),
    ),
    "resumed_streams": (
        Counter,
        "Streams that another decode engine has continued: broken (the first one failed), or planned (it "
        "drains).",
        ["why"],
    ),
    "first_tokens": (
        Counter,
        "First tokens of streams that came from the prefill engine, and that the decode engine agreed "
        "with or not.",
        ["agreed"],
    ),
    "handoffs": (
        Counter,
        "Prompts that a prefill engine had lent, by what the decode engine did: handed_over, computed "
        "(by itself), late (computed, because the prefill took longer than it waits), "
        "refused (the ticket or the introduction), or other_weights (computed, because the "
        "weights of one engine have changed).",
        ["prefill", "decode", "outcome"],
    ),
    "stored_loans": (
        Counter,
        "Times that an engine was asked to lend what it has of a prompt, by its answer: lent, nothing or "
        "failed.",
        ["outcome"],
    ),
    "loan_returns": (
        Counter,
        "Loans that no decode engine comes for, by what became of their return: returned, failed or dropped.",
        ["outcome"],
    ),
    "prefill_seconds": (Histogram, "Of the prefill leg.", _SECONDS),
    "first_byte_seconds": (
        Histogram,
        "From the whole request received to the first byte of the answer.",
        _SECONDS,
    ),
    "time_to_first_token_seconds": (
        Histogram,
        "Of streams: from the whole request received to the first piece of the answer.",
        _SECONDS,
    ),
    "inter_token_latency_seconds": (Histogram, "Between two pieces of a stream to the client.", _GAP_S),
    "e2e_request_latency_seconds": (
        Histogram,
        "Of answers with status 200: from the whole request received to the last byte of the answer.",
        _SECONDS,
    ),
    "prompt_tokens": (
        Counter,
        "Tokens of prompts by the engine that answered, and what it did: computed, cached (it had their "
        "KV), or loaded (from another engine or a tier). Of engines that report it.",
        ["role", "engine", "source"],
    ),
    "generation_tokens": (Counter, "Tokens of answers.", ()),
}


class RouterMetrics:
    def __init__(self, fleet: Fleet, pairs: Pairs) -> None:
        self._fleet = fleet
        self._gone: set[str] = set()
        self.registry = CollectorRegistry()
        self._children: dict[tuple[str, ...], Any] = {}  # Children, by metric and labels.
        self._families: dict[str, Any] = {}
        for name, (kind, text, more) in _FAMILIES.items():
            given: dict[str, Any] = {"buckets" if kind is Histogram else "labelnames": more}
            self._families[name] = kind(f"baton:router_{name}", text, registry=self.registry, **given)
        for outcome in ("let_in", "refused", "unavailable"):
            self.charged(outcome, 0)
        self.between_pieces = self.of("inter_token_latency_seconds")
        self.registry.register(_FleetCollector(fleet, pairs))

    def charged(self, outcome: str, num: int = 1) -> None:
        """Count a request's charge to its tenant's limits, by outcome."""
        self.of("rate_limits", outcome).inc(num)

    def count(self, effect: Count) -> None:
        """Carry out what a request's machine asks for."""
        child = self.of(effect.metric, *effect.labels)
        if effect.value is None:
            child.inc()
        else:
            child.observe(effect.value)

    def observe(self, timeline: RequestTimeline) -> None:
        """Count a request that has ended."""
        self.of("requests", str(timeline.status)).inc()
        for leg in timeline.legs:
            self._observe_prompt(leg)
        if timeline.output_tokens:
            self.of("generation_tokens").inc(timeline.output_tokens)
        if timeline.status != 200 or timeline.first_byte_s is None or timeline.last_byte_s is None:
            return
        self.of("e2e_request_latency_seconds").observe(timeline.last_byte_s)
        if timeline.is_stream:
            self.of("time_to_first_token_seconds").observe(timeline.first_byte_s)

    def _observe_prompt(self, leg: LegTimeline) -> None:
        if leg.prompt_tokens is None:
            return
        cached, loaded = leg.cached_tokens or 0, leg.loaded_tokens or 0
        computed = max(0, leg.prompt_tokens - cached - loaded)
        for source, num_tokens in (("computed", computed), ("cached", cached), ("loaded", loaded)):
            if num_tokens:
                self.of("prompt_tokens", leg.role, leg.engine, source).inc(num_tokens)

    def of(self, *key: str) -> Any:
        """The metric with this name, without the prefix, and these labels."""
        child = self._children.get(key)
        if child is None:
            metric, *labels = key
            family = self._families[metric]
            child = self._children[key] = family.labels(*labels) if labels else family
        return child

    def forget(self, engine: Engine) -> None:
        """Drop a removed engine's labels with the next exposition, when its last leg has been counted."""
        self._gone.add(engine.url)

    def _drop_labels(self) -> None:
        gone = self._gone - {engine.url for engine in self._fleet.engines}
        self._gone.clear()
        self._children.clear()
        for name in ("legs", "handoffs", "prompt_tokens"):
            metric, names = self._families[name], _FAMILIES[name][2]
            series = {
                tuple(found.labels[name] for name in names) for found in next(iter(metric.collect())).samples
            }
            for labels in series:
                if gone.intersection(labels):
                    metric.remove(*labels)

    def exposition(self, others: Sequence[Samples] = ()) -> bytes:
        """Return the text for Prometheus, on the router's loop. `others`: samples of other processes."""
        if self._gone:
            self._drop_labels()
        if not others:
            return generate_latest(self.registry)
        merged = CollectorRegistry(auto_describe=False)
        merged.register(_Merged(self.registry, others))
        return generate_latest(merged)

    def samples(self) -> Samples:
        """The samples that another process adds to its own in an exposition."""
        if self._gone:
            self._drop_labels()
        return {
            family.name: [(name, labels, value) for name, labels, value, *_ in family.samples]
            for family in self.registry.collect()
            if _is_summed(family)
        }


class _Merged(Collector):
    """One registry, to whose samples those of other processes are added."""

    def __init__(self, registry: CollectorRegistry, others: Sequence[Samples]) -> None:
        self._registry = registry
        self._others = others

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            if _is_summed(family):
                own = [(name, labels, value) for name, labels, value, *_ in family.samples]
                total = _sum([own, *(other.get(family.name, []) for other in self._others)])
                family.samples = [Sample(*one) for one in total]
            yield family


def _is_summed(family: Metric) -> bool:
    return family.type in ("counter", "histogram") or family.name in GAUGES


def sum_families(parts: Sequence[Samples]) -> Samples:
    """The samples of several processes as those of one."""
    names = dict.fromkeys(chain.from_iterable(parts))
    return {name: _sum([part.get(name, []) for part in parts]) for name in names}


def _sum(parts: Iterable[Family]) -> Family:
    """Sum the values by name and labels. The earliest time of creation is kept."""
    total: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for name, labels, value in chain.from_iterable(parts):
        key = name, tuple(labels.items())
        if key not in total:
            total[key] = value
        else:
            total[key] = min(total[key], value) if name.endswith("_created") else total[key] + value
    return [(name, dict(labels), value) for (name, labels), value in total.items()]


class _FleetCollector(Collector):
    """Read from the fleet when asked: nothing to keep in step."""

    def __init__(self, fleet: Fleet, pairs: Pairs) -> None:
        self._fleet = fleet
        self._pairs = pairs

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return []  # Else the registry would collect before the loop runs.

    def collect(self) -> Iterable[GaugeMetricFamily]:
        up = GaugeMetricFamily("baton:router_engine_up", "1: gets requests.", labels=["role", "engine"])
        in_flight = GaugeMetricFamily(
            "baton:router_engine_in_flight", "Legs being served.", labels=["role", "engine"]
        )
        refused = GaugeMetricFamily(
            "baton:router_engine_refused",
            "1: gets no requests because of the model that it serves.",
            labels=["role", "engine"],
        )
        usable = GaugeMetricFamily(
            "baton:router_pair_usable",
            "0: nothing is handed over between these engines; the decode engine computes alone.",
            labels=["prefill", "decode"],
        )
        for pair in self._pairs.snapshot(self._fleet.engines, asyncio.get_running_loop().time()):
            usable.add_metric([pair["prefill"], pair["decode"]], float(pair["usable"]))
        for engine in self._fleet.engines:
            up.add_metric([engine.role, engine.url], float(engine.is_up))
            in_flight.add_metric([engine.role, engine.url], engine.load)
            refused.add_metric([engine.role, engine.url], float(engine.refused is not None))
        return [up, in_flight, refused, usable]
