"""Combination of several ranks' reports into one, by rules declared at each field.

A report is a dataclass. The annotation of a field defines how the ranks' values combine:

    AllRanks[set[str]]   an id comes out once every expected rank has reported it, however many steps apart
    AnyRank[set[int]]    union, at once
    Annotated[set[str], FailedOf("finished")]
                         ids of the AllRanks field `finished` that failed. If any rank reports a failure, the
                         combined result is a failure. It is emitted together with the completed id
    Sum[int]  Max[float] over the ranks that reported a value
    EveryRank[bool]      true only if no rank reported false
    Merge[T]             by the value's own `aggregate`
    Quorum[T]            events that every rank must confirm (`baton.core.kv_events`)

None means "nothing reported". The result depends neither on the order of ranks nor on the interleaving of
steps.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final, Generic, TypeAlias, TypeVar, get_type_hints

T = TypeVar("T")
R = TypeVar("R")


class Rule(enum.StrEnum):
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
    """Rule of a field that holds the failed ids of the AllRanks field `of`."""

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
    """Rule of each field. Raises TypeError for a field without exactly one rule."""
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
                f"{report_type.__name__}.{name} is FailedOf {rule.of!r}, which is not an AllRanks field"
            )
    return rules


_RULES: dict[type[Any], dict[str, Rule | FailedOf]] = {}  # Reading type hints takes half a millisecond.


class _Tally:
    """Ranks that have reported each id, and the ids that have failed."""

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
        """Removes and returns (complete ids, the failed ones of them).

        A rank counts once for an id, so a repeated report is harmless. If more reports are expected than
        there are ranks, reports are counted instead.
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
    """Combines the ranks' reports of one step; remembers the ids that wait for more ranks."""

    def __init__(self, report_type: type[R], num_ranks: int) -> None:
        assert num_ranks > 0
        self.expected_count = num_ranks  # Number of reports that an AllRanks id waits for.
        self._num_ranks = num_ranks
        self._report_type = report_type
        if report_type not in _RULES:
            _RULES[report_type] = rules_of(report_type)
        rules = _RULES[report_type]
        self._tallies = {name: _Tally() for name, rule in rules.items() if rule is Rule.ALL_RANKS}
        self._failures = {rule.of: name for name, rule in rules.items() if isinstance(rule, FailedOf)}
        self._combine_by_name: Final = {
            name: combine for name, rule in rules.items() if (combine := _COMBINE.get(rule)) is not None
        }

    def combine(
        self, reports: Collection[tuple[int, R]], on_error: Callable[[str, Exception], None] | None = None
    ) -> R:
        """`reports`: (rank, report), at most one per rank. Ranks without a report may be left out.

        `on_error` is called with the field's name and the error if a value's `aggregate` raises. That field
        is dropped and the others are combined. Without `on_error` the error is raised.
        """
        # Failures first: an id that completes in this step must be emitted with its failure.
        for of, name in self._failures.items():
            for _, report in reports:
                self._tallies[of].fail(getattr(report, name) or ())
        values: dict[str, Any] = {}
        for name in self._tallies:
            values.update(self._combine_ids(name, reports))
        for name, combine in self._combine_by_name.items():
            given = [value for _, report in reports if (value := getattr(report, name)) is not None]
            if given:
                try:
                    values[name] = combine(given)
                except Exception as error:  # `aggregate` may be third-party code.
                    if on_error is None:
                        raise
                    on_error(name, error)
        return self._report_type(**{name: value for name, value in values.items() if value is not None})

    def forget_all_but(self, live_ids: Container[Any]) -> None:
        """Drops the counts of all other ids, so that a later request with the same id does not inherit them.

        Finished requests whose blocks are still lent or filled count as live.
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


_COMBINE: Final[dict[Rule | FailedOf, Callable[[list[Any]], Any]]] = {
    Rule.ANY_RANK: _union,
    Rule.SUM: sum,
    Rule.MAX: max,
    Rule.EVERY_RANK: all,
    Rule.MERGE: _merge,
    Rule.QUORUM: _gather_events,
}
