"""Many full worlds, one after the other, and one of them line by line."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from baton.core.errors import UserError
from baton.sim.checkers.violation import Violation
from baton.sim.full.mutants import MUTANTS
from baton.sim.full.parts import PRODUCTION, Parts
from baton.sim.full.scenario import Scenario
from baton.sim.runs import Broken, Report

MODES = ("pull", "push")


def run_worlds(
    mode: str,
    first_seed: int,
    count: int,
    *,
    mutant: str | None = None,
    goes_on: Callable[[], bool] | None = None,
) -> Report:
    """Seeds first_seed, first_seed + 1, ...; ends early when `goes_on` says no."""
    return run_seeds(mode, range(first_seed, first_seed + count), mutant=mutant, goes_on=goes_on)


def run_seeds(
    mode: str,
    seeds: range | tuple[int, ...],
    *,
    mutant: str | None = None,
    goes_on: Callable[[], bool] | None = None,
) -> Report:
    parts = _parts(mode, mutant)
    report = Report(_name(mode))
    with _quiet():
        for seed in seeds:
            if goes_on is not None and not goes_on():
                break
            scenario = Scenario(seed, parts, mode=mode)
            try:
                scenario.run()
            except Violation as violation:
                report.broken.append(Broken(_name(mode), seed, violation.kind))
            report.num_worlds += 1
            report.num_events += scenario.clockwork.num_events
            report.counts += scenario.clockwork.counts
    return report


def find_broken(mode: str, mutant: str, first_seed: int, count: int) -> Broken | None:
    """The first of these worlds that notices the missing guard."""
    for seed in range(first_seed, first_seed + count):
        report = run_worlds(mode, seed, 1, mutant=mutant)
        if report.broken:
            return report.broken[0]
    return None


def replay(mode: str, seed: int, *, mutant: str | None = None) -> list[str]:
    """Everything that was said and done in one world, a line each; the verdict is the last."""
    scenario = Scenario(seed, _parts(mode, mutant), mode=mode, traced=True)
    verdict = "every invariant held"
    with _quiet():
        try:
            scenario.run()
        except Violation as violation:
            verdict = f"VIOLATION {violation}"
    assert scenario.clockwork.trace is not None
    return [*scenario.clockwork.trace, f"{scenario.clockwork.now:9.4f}  {verdict}"]


def _name(mode: str) -> str:
    return "full" if mode == "pull" else f"full --mode {mode}"


def _parts(mode: str, mutant: str | None) -> Parts:
    if mode not in MODES:
        raise UserError(f"there is no such mode; choose one of {', '.join(MODES)}", field="mode")
    if mutant is None:
        return PRODUCTION
    if mutant not in MUTANTS[mode]:
        raise UserError(f"there is no such guard; choose one of {', '.join(MUTANTS[mode])}", field="mutant")
    return MUTANTS[mode][mutant]


@contextmanager
def _quiet() -> Iterator[None]:
    """Production code logs each refused ticket and failed read; here there are thousands."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
