"""Many worlds, one after the other, one of them line by line, and the seeds that failed once."""

from __future__ import annotations

import gc
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from baton.core.errors import UserError
from lab.sim.checkers import contained
from lab.sim.checkers.violation import Violation
from lab.sim.host.scenario import Scenario
from lab.sim.kernel.parts import PRODUCTION, Parts
from lab.sim.mutants.guards import MUTANTS

MODES = ("pull", "push")
FAILED: dict[str, dict[int, str]] = {
    "pull": {
        0: "a loan kept the blocks that the last chunk of its prompt saw in a window, for no reader",
        169: "an engine that continued another one's answer did not name its weights, which were others",
    },
    "push": {
        245: "an engine that continued another one's answer did not name its weights, which were others",
        1153: "P announced a cached block that another prompt of the same step had still to compute",
    },
}
"""Every seed whose world failed, with its reason. A change of the world gives a seed another world."""


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


def run_worlds(mode: str, first_seed: int, count: int, *, mutant: str | None = None) -> Report:
    """Run the worlds of the seeds first_seed, first_seed + 1, ..."""
    return run_seeds(mode, range(first_seed, first_seed + count), mutant=mutant)


def run_seeds(mode: str, seeds: Iterable[int], *, mutant: str | None = None) -> Report:
    parts = _parts(mode, mutant)
    report, began = Report(mode), time.process_time()
    with _quiet(), _collecting_rarely():
        for seed in seeds:
            scenario = Scenario(mode, seed, parts, traced=False)
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


def find_broken(mode: str, mutant: str, first_seed: int, count: int) -> Broken | None:
    """The first of these worlds that finds the missing guard."""
    for seed in range(first_seed, first_seed + count):
        report = run_worlds(mode, seed, 1, mutant=mutant)
        if report.broken:
            return report.broken[0]
    return None


def replay(mode: str, seed: int, *, mutant: str | None = None) -> list[str]:
    """All events of one world, a line each. The verdict is the last line."""
    scenario = Scenario(mode, seed, _parts(mode, mutant), traced=True)
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


def digest(mode: str, seeds: Iterable[int], *, mutant: str | None = None) -> str:
    """Hex digest of the traces of these worlds. A change that only makes them faster keeps it."""
    digest = hashlib.sha256()
    for seed in seeds:
        digest.update("\n".join(replay(mode, seed, mutant=mutant)).encode())
    return digest.hexdigest()


def _parts(mode: str, mutant: str | None) -> Parts:
    if mode not in MUTANTS:
        raise UserError(f"there is no world of that name; choose one of {', '.join(MUTANTS)}", field="mode")
    if mutant is None:
        return PRODUCTION
    guards = MUTANTS[mode]
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
