"""Many worlds of one kind, one after the other, and one of them line by line."""

from __future__ import annotations

import gc
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from baton.core.errors import UserError
from lab.sim.checkers import contained
from lab.sim.checkers.violation import Violation
from lab.sim.host.scenario import Scenario
from lab.sim.kernel.parts import PRODUCTION, Parts

MODES = ("pull", "push")


@dataclass(frozen=True, slots=True)
class Broken:
    """One world in which an invariant did not hold."""

    mode: str
    seed: int
    kind: str  # "I2 freed while a consumer believes in the lease"

    @property
    def command(self) -> str:
        return f"python -m lab.sim {self.mode} --seed {self.seed}"


@dataclass(slots=True)
class Report:
    mode: str
    num_worlds: int = 0
    num_events: int = 0
    cpu_s: float = field(default=0.0, compare=False)
    broken: list[Broken] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # Events in these worlds, by name.

    def add(self, other: Report) -> None:
        self.num_worlds += other.num_worlds
        self.num_events += other.num_events
        self.cpu_s += other.cpu_s
        self.broken += other.broken
        self.counts += other.counts

    @property
    def kinds(self) -> Counter[str]:
        return Counter(broken.kind for broken in self.broken)


@dataclass(frozen=True)
class Campaign:
    """Worlds: how one is built from a seed, and the mutants of its parts by mode and guard."""

    scenario: Callable[..., Scenario]  # (mode, seed, parts, traced=...)
    mutants: Mapping[str, Mapping[str, Parts]]

    def run_worlds(
        self,
        mode: str,
        first_seed: int,
        count: int,
        *,
        mutant: str | None = None,
        goes_on: Callable[[], bool] | None = None,
    ) -> Report:
        """Seeds first_seed, first_seed + 1, ...; ends early when `goes_on` returns False."""
        return self.run_seeds(mode, range(first_seed, first_seed + count), mutant=mutant, goes_on=goes_on)

    def run_seeds(
        self,
        mode: str,
        seeds: Iterable[int],
        *,
        mutant: str | None = None,
        goes_on: Callable[[], bool] | None = None,
    ) -> Report:
        parts = self._parts(mode, mutant)
        report, began = Report(mode), time.process_time()
        with _quiet(), _collecting_rarely():
            for seed in seeds:
                if goes_on is not None and not goes_on():
                    break
                scenario = self.scenario(mode, seed, parts, traced=False)
                try:
                    with contained.guarded():
                        scenario.run()
                except Violation as violation:
                    report.broken.append(Broken(report.mode, seed, violation.kind))
                report.num_worlds += 1
                report.num_events += scenario.world.num_events
                report.counts += scenario.world.counts
        report.cpu_s = time.process_time() - began
        return report

    def find_broken(self, mode: str, mutant: str, first_seed: int, count: int) -> Broken | None:
        """The first of these worlds that finds the missing guard."""
        for seed in range(first_seed, first_seed + count):
            report = self.run_worlds(mode, seed, 1, mutant=mutant)
            if report.broken:
                return report.broken[0]
        return None

    def replay(self, mode: str, seed: int, *, mutant: str | None = None) -> list[str]:
        """All events of one world, a line each. The verdict is the last line."""
        scenario = self.scenario(mode, seed, self._parts(mode, mutant), traced=True)
        verdict = "every invariant held"
        with _quiet():
            try:
                with contained.guarded():
                    scenario.run()
            except Violation as violation:
                verdict = f"VIOLATION {violation}"
        world = scenario.world
        assert world.trace is not None
        return [*world.trace, f"{world.now:9.4f}  {verdict}"]

    def digest(self, mode: str, seeds: Iterable[int], *, mutant: str | None = None) -> str:
        """Hex digest of the traces of these worlds. A change that only makes them faster keeps it."""
        digest = hashlib.sha256()
        for seed in seeds:
            digest.update("\n".join(self.replay(mode, seed, mutant=mutant)).encode())
        return digest.hexdigest()

    def _parts(self, mode: str, mutant: str | None) -> Parts:
        if mode not in self.mutants:
            raise UserError(
                f"there is no world of that name; choose one of {', '.join(self.mutants)}", field="mode"
            )
        if mutant is None:
            return PRODUCTION
        guards = self.mutants[mode]
        if mutant not in guards:
            raise UserError(f"there is no such guard; choose one of {', '.join(guards)}", field="mutant")
        return guards[mutant]


@contextmanager
def _quiet() -> Iterator[None]:
    """Production code logs each refused ticket and failed read. Here there are thousands."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _collecting_rarely() -> Iterator[None]:
    """A world is one large cycle of objects. Looking for garbage within a world finds little; to keep the
    garbage of many worlds costs more, because each one then takes memory that no cache holds."""
    before = gc.get_threshold()
    gc.set_threshold(5_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
