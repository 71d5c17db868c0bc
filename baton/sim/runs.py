"""Many worlds, one after the other: what `baton sim` and CI call."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.core.errors import UserError
from baton.sim.checkers.violation import Violation
from baton.sim.mutants import MUTANTS, PUSH_MUTANTS
from baton.sim.parts import PRODUCTION, Parts
from baton.sim.scenario import Scenario

MODES = ("pull", "push")
GUARDS = {"pull": MUTANTS, "push": PUSH_MUTANTS}


@dataclass(frozen=True, slots=True)
class Broken:
    """One world in which an invariant did not hold."""

    mode: str
    seed: int
    kind: str  # "I2 freed while a consumer believes in the lease"

    @property
    def command(self) -> str:
        return f"baton sim {self.mode} --seed {self.seed}"


@dataclass(slots=True)
class Report:
    mode: str
    num_worlds: int = 0
    num_events: int = 0
    broken: list[Broken] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # What happened in these worlds.

    def add(self, other: "Report") -> None:
        self.num_worlds += other.num_worlds
        self.num_events += other.num_events
        self.broken += other.broken
        self.counts += other.counts

    @property
    def kinds(self) -> Counter[str]:
        return Counter(broken.kind for broken in self.broken)


def run_worlds(
    mode: str,
    first_seed: int,
    count: int,
    *,
    mutant: str | None = None,
    goes_on: Callable[[], bool] | None = None,
) -> Report:
    """Seeds first_seed, first_seed + 1, ...; ends early when `goes_on` says no."""
    parts = _parts(mode, mutant)
    report = Report(mode)
    for seed in range(first_seed, first_seed + count):
        if goes_on is not None and not goes_on():
            break
        scenario = Scenario(mode, seed, parts)
        try:
            scenario.run()
        except Violation as violation:
            report.broken.append(Broken(mode, seed, violation.kind))
        report.num_worlds += 1
        report.num_events += scenario.world.num_events
        report.counts += scenario.world.counts
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
    scenario = Scenario(mode, seed, _parts(mode, mutant), traced=True)
    verdict = "every invariant held"
    try:
        scenario.run()
    except Violation as violation:
        verdict = f"VIOLATION {violation}"
    assert scenario.world.trace is not None
    return [*scenario.world.trace, f"{scenario.world.now:9.3f}  {verdict}"]


def _parts(mode: str, mutant: str | None) -> Parts:
    if mode not in MODES:
        raise UserError(f"there is no world of that name; choose one of {', '.join(MODES)}", field="mode")
    if mutant is None:
        return PRODUCTION
    guards = GUARDS[mode]
    if mutant not in guards:
        raise UserError(f"there is no such guard; choose one of {', '.join(guards)}", field="mutant")
    return guards[mutant]
