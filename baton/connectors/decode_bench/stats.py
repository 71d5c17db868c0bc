"""Statistics of synthetic KV: baton:synthetic_tokens, baton:synthetic_requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from baton.connectors.counted import Count, CountedPromMetrics, CountedStats, LabelledCount


@dataclass
class DecodeBenchStats(CountedStats):
    counts: ClassVar[Mapping[str, Count]] = {
        "synthetic_tokens": Count("baton:synthetic_tokens", "Prompt tokens with synthetic KV."),
        "synthetic_requests": Count("baton:synthetic_requests", "Requests with synthetic KV."),
    }
    labelled: ClassVar[Mapping[str, LabelledCount]] = {  # Counted by the host.
        "failures": LabelledCount("baton:synthetic_failures", "reason", "Errors that were contained."),
    }

    def reduce(self) -> dict[str, int | float | str]:
        return {
            "SYNTHETIC tokens": self.data["synthetic_tokens"],
            "requests": self.data["synthetic_requests"],
        }


class DecodeBenchPromMetrics(CountedPromMetrics):
    kind = DecodeBenchStats
