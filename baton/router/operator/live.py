"""State of the fleet for its page and `baton top`: rates, latencies over time, events.

The state is put together when a process asks for it, at most twice a second; the engines' /metrics are read
only then. The latencies' columns are kept always, from counters that the router has anyway.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import msgspec

import baton
from baton.router.fleet.engine import Engine
from baton.router.operator import engine_metrics
from baton.router.operator.admin import METHODS, Admin
from baton.router.operator.engine_metrics import EngineMetrics, PeerRates
from baton.router.operator.latency_history import COLUMN_S, Cumulative, LatencyHistory
from baton.router.shell.asking import AskFailed
from baton.router.shell.metrics import Family, Samples
from baton.router.shell.parts import Parts
from baton.router.shell.tasks import Tasks

logger = logging.getLogger(__name__)

FRESH_S = 0.5  # Several processes of this router may ask for the same second.
READ_EVERY_S = 2.0
READ_S = 2.0  # Time for an engine to answer.
NUM_READINGS = 4  # Rates are of the time between the first and the last of them.
STALE_S = 30.0  # Age at which an engine's rates are dropped, if it has not answered since.
LATEST_EVENTS = 32
# Names of the page's latencies, and the router's histograms that have them: the first one that exists.
LATENCIES = {
    "ttft": ("baton:router_time_to_first_token_seconds", "baton:router_first_byte_seconds"),
    "itl": ("baton:router_inter_token_latency_seconds",),
}


class _Reading(NamedTuple):
    at_s: float
    metrics: EngineMetrics


class _Totals(NamedTuple):
    at_s: float
    statuses: Mapping[str, float]  # Requests that ended, by status.
    handoffs: Mapping[tuple[str, str], float]


class Live:
    """`start` it, and `close` it."""

    def __init__(
        self,
        parts: Parts,
        admin: Admin,
        samples: Callable[[], Awaitable[Samples]],
    ) -> None:
        self._parts, self._admin, self._samples = parts, admin, samples
        self._loop = asyncio.get_running_loop()
        self._history = LatencyHistory(tuple(LATENCIES))
        self._latest: dict[str, Any] = {}
        self._made_at_s = -inf
        self._making = asyncio.Lock()
        self._totals: list[_Totals] = []  # The last two.
        self._readings: dict[Engine, deque[_Reading]] = {}
        self._reading: set[Engine] = set()
        self._tasks = Tasks()
        self._read_at_s = -inf

    def start(self) -> None:
        self._tasks.start(self._keep_history(), "the latencies over time are not kept any more")

    async def close(self) -> None:
        await self._tasks.close()

    async def _keep_history(self) -> None:
        while True:
            await asyncio.sleep(COLUMN_S)
            self._history.note(_latencies(await self._samples()), time.time())

    # --- Answers

    async def snapshot(self) -> bytes:
        state = {**await self._state(), "latencies": self._history.shown(), "events": self.events()}
        return msgspec.json.encode(state)

    async def latest(self) -> bytes:
        """The same, with the last columns and events only."""
        events = self._parts.fleet.roster.log.last(LATEST_EVENTS)
        state = {**await self._state(), "latencies": self._history.shown(2), "events": events}
        return msgspec.json.encode(state)

    def events(self) -> list[dict[str, Any]]:
        return self._parts.fleet.roster.log.last()

    async def _state(self) -> dict[str, Any]:
        async with self._making:
            if self._loop.time() - self._made_at_s >= FRESH_S:
                self._read_engines()
                samples = await self._samples()
                self._history.note(_latencies(samples), time.time())
                self._latest = self._make(samples)
                self._made_at_s = self._loop.time()
        return self._latest

    def _make(self, samples: Samples) -> dict[str, Any]:
        now_s, fleet = self._loop.time(), self._parts.fleet
        self._totals = [*self._totals[-1:], _totals(samples, now_s)]
        status = self._admin.status()
        flows = self._flows(now_s)
        pairs = self._parts.pairs.snapshot(fleet.engines, now_s)
        known = {(pair["prefill"], pair["decode"]) for pair in pairs}
        usable = {"usable": True, "reason": None, "handed_over": 0, "computed": 0}
        pairs += [{"prefill": p, "decode": d, **usable} for p, d in flows if (p, d) not in known]
        handoffs = self._handoffs_per_s()
        for pair in pairs:
            key = pair["prefill"], pair["decode"]
            flow = flows.get(key)
            pair["bytes_per_s"] = None if flow is None else flow.bytes_per_s
            pair["wire_ms"] = None if flow is None else flow.wire_ms
            pair["handoffs_per_s"] = handoffs.get(key, 0.0)
        return {
            "unix_s": time.time(),
            "version": baton.__version__,
            "mode": status["mode"],
            "policy": status["policy"],
            "models": status["models"],
            "updates": status["updates"],
            "sources": status["sources"],
            "queues": status["queues"],
            "routers": status["routers"],
            "in_flight": self._parts.links.num_requests,
            "waiting": round(sum(value for *_, value in samples.get("baton:router_waiting", ()))),
            **self._request_rates(),
            "engines": [
                {**shown, "metrics": self._shown(engine, now_s)}
                for shown, engine in zip(status["engines"], fleet.engines, strict=True)
            ],
            "pairs": pairs,
            "orders": [path for path in METHODS if path.startswith("/instances/")],
            "may_order": self._admin.is_open,
        }

    def _request_rates(self) -> dict[str, float]:
        if len(self._totals) < 2:
            return {"requests_per_s": 0.0, "refused_per_s": 0.0, "failed_per_s": 0.0}
        before, now = self._totals
        seconds = max(1e-3, now.at_s - before.at_s)
        new = {status: count - before.statuses.get(status, 0.0) for status, count in now.statuses.items()}
        failed = sum(count for status, count in new.items() if status >= "500")
        return {
            "requests_per_s": max(0.0, sum(new.values()) / seconds),
            "refused_per_s": max(0.0, new.get("429", 0.0) / seconds),
            "failed_per_s": max(0.0, failed / seconds),
        }

    def _handoffs_per_s(self) -> dict[tuple[str, str], float]:
        if len(self._totals) < 2:
            return {}
        before, now = self._totals
        seconds = max(1e-3, now.at_s - before.at_s)
        return {
            pair: max(0.0, count - before.handoffs.get(pair, 0.0)) / seconds
            for pair, count in now.handoffs.items()
        }

    # --- The engines' own metrics

    def _read_engines(self) -> None:
        """Start to read the engines' metrics, at most each READ_EVERY_S. Late ones are not asked again."""
        now_s, engines = self._loop.time(), self._parts.fleet.engines
        if now_s - self._read_at_s < READ_EVERY_S:
            return
        self._read_at_s = now_s
        for gone in self._readings.keys() - set(engines):
            del self._readings[gone]
        for engine in engines:
            if engine.is_up and engine not in self._reading:
                self._reading.add(engine)
                self._tasks.start(self._read(engine), f"the metrics of {engine.url} cannot be read")

    async def _read(self, engine: Engine) -> None:
        try:
            answer = await self._parts.asker.ask(f"{engine.admin_address}/metrics", timeout_s=READ_S)
        except (TimeoutError, AskFailed):
            return
        finally:
            self._reading.discard(engine)
        if answer.status == 200 and not engine.is_removed:
            metrics = engine_metrics.read_metrics(answer.body.decode(errors="replace"))
            readings = self._readings.setdefault(engine, deque(maxlen=NUM_READINGS))
            now_s = self._loop.time()
            if readings and now_s - readings[-1].at_s > STALE_S:
                readings.clear()  # No one has watched for long.
            readings.append(_Reading(now_s, metrics))

    def _shown(self, engine: Engine, now_s: float) -> dict[str, Any] | None:
        readings = self._readings.get(engine)
        if not readings or now_s - readings[-1].at_s > STALE_S:
            return None
        before, now = readings[0], readings[-1]
        if before is now:
            return engine_metrics.shown(None, now.metrics, 0.0)
        return engine_metrics.shown(before.metrics, now.metrics, now.at_s - before.at_s)

    def _flows(self, now_s: float) -> dict[tuple[str, str], PeerRates]:
        """Rates by the URLs of the pair. A producer whose engine id is not known stands with the id."""
        names = {
            engine.introduction.engine_id: engine.url
            for engine in self._parts.fleet.engines
            if engine.introduction is not None
        }
        flows = {}
        for engine, readings in self._readings.items():
            before, now = readings[0], readings[-1]
            if now.at_s <= before.at_s or now_s - now.at_s > STALE_S:
                continue
            rates = engine_metrics.rates_between(before.metrics, now.metrics, now.at_s - before.at_s)
            for peer, one in rates.items():
                flows[names.get(peer, peer), engine.url] = one
        return flows


def _totals(samples: Samples, now_s: float) -> _Totals:
    statuses: dict[str, float] = {}
    handoffs: dict[tuple[str, str], float] = {}
    for name, labels, value in samples.get("baton:router_requests", ()):
        if name.endswith("_total"):
            status = labels.get("status", "")
            statuses[status] = statuses.get(status, 0.0) + value
    for name, labels, value in samples.get("baton:router_handoffs", ()):
        if name.endswith("_total") and labels["outcome"] == "handed_over":
            handoffs[labels["prefill"], labels["decode"]] = value
    return _Totals(now_s, statuses, handoffs)


def _latencies(samples: Samples) -> dict[str, Cumulative]:
    found = {}
    for latency, names in LATENCIES.items():
        family = next((samples[name] for name in names if name in samples), ())
        if family:
            found[latency] = _cumulative(family)
    return found


def _cumulative(family: Family) -> Cumulative:
    """The histogram, over all its labels."""
    below: dict[float, float] = {}
    for name, labels, value in family:
        if name.endswith("_bucket"):
            bound = float(labels["le"])
            below[bound] = below.get(bound, 0.0) + value
    bounds: Sequence[float] = sorted(below)
    totals = [0.0, *(below[bound] for bound in bounds)]
    counts = [after - before for before, after in pairwise(totals)]
    return Cumulative([bound for bound in bounds if bound != inf], counts)
