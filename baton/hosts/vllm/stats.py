"""Baton's statistics in the classes that vLLM logs and publishes. Names and meanings are those of `kind`."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from baton.connectors.counted import CountedStats


class BatonStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where types are checked.
    """`data` has the format of `kind`; it is sent to the logging process as msgpack."""

    def __init__(self, kind: type[CountedStats], data: dict[str, Any] | None = None) -> None:
        super().__init__(data or kind().data)
        self.kind = kind

    def reset(self) -> None:
        self.data = self.kind().data

    def aggregate(self, other: BatonStats) -> BatonStats:
        self.data = self.kind(self.data).aggregate(self.kind(other.data)).data
        return self

    def reduce(self) -> dict[str, int | float | str]:
        return self.kind(self.data).reduce()

    def is_empty(self) -> bool:
        return self.kind(self.data).is_empty()


class BatonPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # As above.
    def __init__(self, kind: type[CountedStats], *of_engine: Any) -> None:
        """`of_engine`: vLLM's arguments, which Baton's classes take too."""
        super().__init__(*of_engine)
        self._published = kind.prom_metrics(*of_engine)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._published.observe(transfer_stats_data, engine_idx)
