"""How reports of several ranks become one: declared beside each field, applied by one engine.

A report is a dataclass; the annotation of a field says how the ranks' values combine:

    AllRanks[set[str]]   an id comes out once every expected rank has reported it, however many steps apart
    AnyRank[set[int]]    union, at once
    Annotated[set[str], FailedOf("finished")]
                         ids of the AllRanks field `finished` that went wrong somewhere: one rank's no makes
                         the whole a no. Held back, and emitted together with the completed id
    Sum[int]  Max[float] over the ranks that reported a value
    EveryRank[bool]      true only if no rank said false
    Merge[T]             by the value's own `aggregate`
    Quorum[T]            events that each rank has to confirm (`baton.contract.events`)

None means "nothing reported". Neither the order of ranks nor the interleaving of steps changes what comes
out.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final, Generic, TypeAlias, TypeVar, get_type_hints

T = TypeVar("T")
R = TypeVar("R")


class Rule(enum.Enum):
    ALL_RANKS = "all ranks"
    ANY_RANK = "any rank"
    SUM = "sum"
    MAX = "max"
    EVERY_RANK = "every rank"
    MERGE = "merge"
    QUORUM = "quorum"
    NOT_COMBINED = "not combined"


@dataclass(frozen=True, slots=True)
class FailedOf:
    """The rule of a field that holds the failed ones among the ids of the AllRanks field `of`."""

    of: str


AllRanks: TypeAlias = Annotated[T, Rule.ALL_RANKS]
AnyRank: TypeAlias = Annotated[T, Rule.ANY_RANK]
Sum: TypeAlias = Annotated[T, Rule.SUM]
Max: TypeAlias = Annotated[T, Rule.MAX]
EveryRank: TypeAlias = Annotated[T, Rule.EVERY_RANK]
Merge: TypeAlias = Annotated[T, Rule.MERGE]
Quorum: TypeAlias = Annotated[T, Rule.QUORUM]
NotCombined: TypeAlias = Annotated[T, Rule.NOT_COMBINED]


def rules_of(report_type: type[Any]) -> dict[str, Rule | FailedOf]:
    """Each field's rule. Raises TypeError for a field without one: forgetting is not a rule."""
    hints = get_type_hints(report_type, include_extras=True)
    rules: dict[str, Rule | FailedOf] = {}
    for field in fields(report_type):
        found = [m for m in getattr(hints[field.name], "__metadata__", ()) if isinstance(m, Rule | FailedOf)]
        if len(found) != 1:
            raise TypeError(f"{report_type.__name__}.{field.name} needs exactly one rule, has {len(found)}")
        rules[field.name] = found[0]
    for name, rule in rules.items():
        if isinstance(rule, FailedOf) and rules.get(rule.of) is not Rule.ALL_RANKS:
            raise TypeError(
                f"{report_type.__name__}.{name} is FailedOf {rule.of!r}, which is no AllRanks field"
            )
    return rules


class _Tally:
    """Who has reported which id, and which of the ids have failed."""

    def __init__(self) -> None:
        self._reported: dict[Any, Counter[int]] = {}
        self._failed: set[Any] = set()

    def add(self, rank: int, ids: Iterable[Any]) -> None:
        for id_ in ids:
            self._reported.setdefault(id_, Counter())[rank] += 1

    def fail(self, ids: Iterable[Any]) -> None:
        self._failed.update(ids)

    def forget_all_but(self, live_ids: Container[Any]) -> None:
        gone = [id_ for id_ in self._reported if id_ not in live_ids]
        for id_ in gone:
            del self._reported[id_]
        if self._failed:
            self._failed = {id_ for id_ in self._failed if id_ in live_ids}

    def take_complete(self, expected_count: int, num_ranks: int) -> tuple[set[Any], set[Any]]:
        """(complete, those of them that failed).

        A rank counts once for an id, so a repeated report is harmless; unless more reports are expected than
        there are ranks, then reports are counted.
        """
        by_rank = expected_count <= num_ranks
        complete = {
            id_
            for id_, ranks in self._reported.items()
            if (len(ranks) if by_rank else ranks.total()) >= expected_count
        }
        for id_ in complete:
            del self._reported[id_]
        failed = complete & self._failed
        self._failed -= failed
        return complete, failed


class RankCombiner(Generic[R]):
    """Combines the reports of one step; remembers the ids that wait for further ranks."""

    def __init__(self, report_type: type[R], num_ranks: int) -> None:
        assert num_ranks > 0
        self.expected_count = num_ranks  # Reports that an AllRanks id waits for.
        self._num_ranks = num_ranks
        self._report_type = report_type
        self._rules: Final = rules_of(report_type)
        self._tallies = {name: _Tally() for name, rule in self._rules.items() if rule is Rule.ALL_RANKS}
        self._failures = {rule.of: name for name, rule in self._rules.items() if isinstance(rule, FailedOf)}

    def combine(
        self, reports: Collection[tuple[int, R]], on_error: Callable[[str, Exception], None] | None = None
    ) -> R:
        """`reports`: (rank, its report), at most one per rank; ranks with nothing to say may be left out.

        `on_error`: hears what a value's own `aggregate` raises, with the name of the field, which it costs;
        the other fields combine as ever. Without it, that is raised.
        """
        # Failures first: an id that completes in this very step must come out with its failure.
        for of, name in self._failures.items():
            for _, report in reports:
                self._tallies[of].fail(getattr(report, name) or ())
        values: dict[str, Any] = {}
        for name, rule in self._rules.items():
            if rule is Rule.ALL_RANKS:
                values.update(self._combine_ids(name, reports))
            elif isinstance(rule, Rule) and rule in _COMBINE:
                given = [value for _, report in reports if (value := getattr(report, name)) is not None]
                if given:
                    try:
                        values[name] = _COMBINE[rule](given)
                    except Exception as error:  # Of whoever wrote `aggregate`.
                        if on_error is None:
                            raise
                        on_error(name, error)
        return self._report_type(**{name: value for name, value in values.items() if value is not None})

    def forget_all_but(self, live_ids: Container[Any]) -> None:
        """Ids that nobody knows any more wait for no further rank, and are never taken for a namesake's.

        Whoever finished and is still lent or filled is live.
        """
        for tally in self._tallies.values():
            tally.forget_all_but(live_ids)

    def _combine_ids(self, name: str, reports: Iterable[tuple[int, R]]) -> dict[str, set[Any] | None]:
        tally = self._tallies[name]
        for rank, report in reports:
            tally.add(rank, getattr(report, name) or ())
        complete, failed = tally.take_complete(self.expected_count, self._num_ranks)
        values: dict[str, set[Any] | None] = {name: complete or None}
        if name in self._failures:
            values[self._failures[name]] = failed or None
        return values


def _union(values: list[Any]) -> Any:
    union = set()
    for value in values:
        union |= value
    return type(values[0])(union)


def _merge(values: list[Any]) -> Any:
    merged, *others = values
    for other in others:
        merged = merged.aggregate(other)
    return merged


def _gather_events(values: list[Any]) -> Any:
    gathered, *others = values
    for other in others:
        gathered.add_events(other.get_all_events())
        gathered.increment_workers(other.get_number_of_workers())
    return gathered


_COMBINE: Final[dict[Rule, Callable[[list[Any]], Any]]] = {
    Rule.ANY_RANK: _union,
    Rule.SUM: sum,
    Rule.MAX: max,
    Rule.EVERY_RANK: all,
    Rule.MERGE: _merge,
    Rule.QUORUM: _gather_events,
}
