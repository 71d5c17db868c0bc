"""Statistics of saved hidden states: baton:hidden_states_files, _tokens and _lost_files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from baton.connectors.counted import Count, CountedPromMetrics, CountedStats, LabelledCount


@dataclass
class HiddenStatesStats(CountedStats):
    counts: ClassVar[Mapping[str, Count]] = {
        "saved_files": Count("baton:hidden_states_files", "Requests whose hidden states were saved."),
        "saved_tokens": Count("baton:hidden_states_tokens", "Tokens whose hidden states were saved."),
        "lost_files": Count(
            "baton:hidden_states_lost_files", "Requests whose hidden states could not be saved."
        ),
    }
    labelled: ClassVar[Mapping[str, LabelledCount]] = {  # Counted by the host.
        "failures": LabelledCount("baton:hidden_states_failures", "reason", "Errors that were contained."),
    }

    def reduce(self) -> dict[str, int | float | str]:
        return {name.replace("_", " "): self.data[name] for name in self.counts}


class HiddenStatesPromMetrics(CountedPromMetrics):
    kind = HiddenStatesStats
