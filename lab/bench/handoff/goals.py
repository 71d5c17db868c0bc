"""Results of the handoff benchmark and the goals that they meet.

    first token      P/D less single: 3% of the single engine's time, plus 5 ms
    second token     the gap after the first: one decode step plus 10 ms up to 2,000 tokens, 20 ms above;
                     pull-tcp: plus the copy
    late token       P/D without P's first token, less single: as the first token's, plus the second's
    new pair         the first request of all to its second token, less later ones of that length, of prompts
                     that P has computed before, median of several starts: 20 ms
    idle             processor time of the producer, without and with a loan: 2% of a core
    decode           time between tokens with the connector loaded, over without: 1.02

Differences and ratios are taken between requests sent one after the other, because the speed of a shared
machine drifts; the result is their median.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

TTFT_SHARE, TTFT_EXTRA_S = 0.03, 0.005
STEP_EXTRA_S, LONG_STEP_EXTRA_S = 0.010, 0.020
LONG_TOKENS = 2_000  # Longer prompts have LONG_STEP_EXTRA_S.
NEW_PAIR_GOAL_S = 0.020
IDLE_GOAL = 0.02
DECODE_GOAL = 1.02


@dataclass(frozen=True, slots=True)
class Goal:
    name: str
    measured: float
    limit: float
    unit: str  # "ms", "%" or "".

    @property
    def is_met(self) -> bool:
        return self.measured <= self.limit

    def show(self, value: float) -> str:
        match self.unit:
            case "ms":
                return f"{value * 1e3:.1f} ms"
            case "%":
                return f"{value:.1%}"
            case _:
                return f"{value:.3f}"


@dataclass(frozen=True, slots=True)
class Trial:
    """One request to the single engine, one to P and D, and one to P and D without P's first token."""

    single_s: float  # Time to the first token.
    step_s: float  # Median gap between later tokens of the single engine.
    handoff_s: float  # Time to the first token.
    second_gap_s: float
    late_s: float  # Time to the first token that D generates.
    others_cores: float  # Cores used by other programs meanwhile.
    phases: dict[str, float] = field(default_factory=dict)  # Parts of the gap before the second token, in s.


@dataclass(frozen=True, slots=True)
class Lengthwise:
    """Results of one mode at one prompt length."""

    mode: str
    num_tokens: int
    turns: tuple[Trial, ...]  # The name is a key of the stored JSON.
    copy_s: float  # Mean time of one handoff on the wire, from D's metrics.
    num_disturbed: int  # Trials that were repeated because of other programs.
    date: str

    @property
    def others_cores(self) -> float:
        return fmean(turn.others_cores for turn in self.turns)

    @property
    def single_s(self) -> float:
        return median(turn.single_s for turn in self.turns)

    @property
    def step_s(self) -> float:
        return median(turn.step_s for turn in self.turns)

    @property
    def first_more_s(self) -> float:
        return median(turn.handoff_s - turn.single_s for turn in self.turns)

    @property
    def second_gap_s(self) -> float:
        return median(turn.second_gap_s for turn in self.turns)

    @property
    def late_more_s(self) -> float:
        return median(turn.late_s - turn.single_s for turn in self.turns)

    @property
    def first_goal(self) -> Goal:
        limit = self.single_s * TTFT_SHARE + TTFT_EXTRA_S
        return Goal(f"{self.mode}, {self.num_tokens} tokens: first token", self.first_more_s, limit, "ms")

    @property
    def second_goal(self) -> Goal:
        extra_s = STEP_EXTRA_S if self.num_tokens <= LONG_TOKENS else LONG_STEP_EXTRA_S
        copy_s = self.copy_s if self.mode == "pull-tcp" else 0.0
        limit = self.step_s + extra_s + copy_s
        return Goal(f"{self.mode}, {self.num_tokens} tokens: gap to second", self.second_gap_s, limit, "ms")

    @property
    def late_goal(self) -> Goal:
        limit = self.first_goal.limit + self.second_goal.limit
        return Goal(f"{self.mode}, {self.num_tokens} tokens: D's first token", self.late_more_s, limit, "ms")

    @property
    def goals(self) -> tuple[Goal, ...]:
        return self.first_goal, self.second_goal, self.late_goal

    @property
    def phases(self) -> dict[str, float]:
        """Medians, in s."""
        names = dict.fromkeys(name for turn in self.turns for name in turn.phases)
        return {name: median(turn.phases.get(name, 0.0) for turn in self.turns) for name in names}


@dataclass(frozen=True, slots=True)
class Overheads:
    """Overheads of one mode's system."""

    mode: str
    new_pair_s: float
    idle_share: float  # Share of one core.
    idle_loan_share: float
    decode_ratio: float
    others_cores: float
    date: str
    # p99 of the time between tokens of a request that D decodes while others are handed over to it, and while
    # a third engine of this machine computes the same prompts.
    beside_handoffs_p99_s: float | None = None  # None: not measured.
    beside_prompts_p99_s: float | None = None

    @property
    def goals(self) -> tuple[Goal, ...]:
        return (
            Goal(f"{self.mode}: new pair", self.new_pair_s, NEW_PAIR_GOAL_S, "ms"),
            Goal(f"{self.mode}: idle", self.idle_share, IDLE_GOAL, "%"),
            Goal(f"{self.mode}: idle with a loan", self.idle_loan_share, IDLE_GOAL, "%"),
            Goal(f"{self.mode}: decode", self.decode_ratio, DECODE_GOAL, ""),
        )


class Results:
    """All results so far. A new result replaces an older one of the same kind."""

    def __init__(self) -> None:
        self._lengths: dict[tuple[str, int], Lengthwise] = {}
        self._overheads: dict[str, Overheads] = {}

    def add(self, result: Lengthwise | Overheads) -> None:
        if isinstance(result, Lengthwise):
            self._lengths[result.mode, result.num_tokens] = result
        else:
            self._overheads[result.mode] = result

    @property
    def lengths(self) -> Sequence[Lengthwise]:
        """Results by mode, in the order of arrival, then by length."""
        modes = list(dict.fromkeys(mode for mode, _ in self._lengths))
        return sorted(self._lengths.values(), key=lambda row: (modes.index(row.mode), row.num_tokens))

    @property
    def overheads(self) -> Sequence[Overheads]:
        return list(self._overheads.values())

    def all(self) -> "Iterator[Lengthwise | Overheads]":
        yield from self.lengths
        yield from self.overheads

    def goals(self) -> Iterator[Goal]:
        for result in self.all():
            yield from result.goals

    def to_json(self) -> dict[str, Any]:
        """Return every measurement, in seconds, and the goals."""
        return {
            "lengths": [asdict(row) for row in self.lengths],
            "overheads": [asdict(row) for row in self.overheads],
            "goals": [asdict(goal) | {"is_met": goal.is_met} for goal in self.goals()],
        }

    @classmethod
    def of_json(cls, stored: dict[str, Any]) -> "Results":
        """Read the output of `to_json`. Raises KeyError or TypeError for anything else."""
        results = cls()
        for row in stored["lengths"]:
            results.add(Lengthwise(**(row | {"turns": tuple(Trial(**trial) for trial in row["turns"])})))
        for row in stored["overheads"]:
            results.add(Overheads(**row))
        return results
