"""Entry point of the kit: runs examples on one connector and reports a verdict per rule."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as with_seed
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

from baton.testing.contract import watched_scheduler, watched_worker
from baton.testing.contract.case import ConnectorCase, make_half
from baton.testing.contract.leaks import FILES_SLACK, open_files
from baton.testing.contract.rules import RULES
from baton.testing.contract.site import ToySite
from baton.testing.contract.state_machine import Search, SearchIsOver, make_machine, tour
from baton.testing.contract.story import ContractBroken
from baton.testing.contract.stuck import stuck_calls_interrupted

EXAMPLES = 50
TRIES = 300
STEPS = 25  # Steps of the state machine in one example.


@dataclass(slots=True)
class Verdict:
    """Result of a run. `broken` is None if the connector kept every rule."""

    case: ConnectorCase
    num_examples: int = 0
    checked: Counter[str] = field(default_factory=Counter)  # Per rule: how often it was checked.
    # Per kind of event (loads, aborts, preemptions): how often it happened.
    seen: Counter[str] = field(default_factory=Counter)
    broken: ContractBroken | None = None

    @property
    def broken_rule(self) -> str | None:
        return self.broken.rule if self.broken is not None else None

    def rows(self) -> list[tuple[str, str, int]]:
        """Return (rule, result, number of checks) in the order of `rules`."""
        return [
            (
                name,
                "BROKEN" if name == self.broken_rule else "kept" if self.checked[name] else "-",
                self.checked[name],
            )
            for name in RULES
        ]

    def raise_if_broken(self) -> None:
        if self.broken is not None:
            raise self.broken


def check_connector(
    case: ConnectorCase,
    *,
    examples: int = EXAMPLES,
    seed: int | None = 0,
    make_site: Callable[[ConnectorCase], ToySite] = ToySite,
    tries: int = TRIES,
    steps: int = STEPS,
    on_example: Callable[[int], None] | None = None,
) -> Verdict:
    """Run examples until one breaks a rule; then try at most `tries` more to find a shorter story.

    Where examples are expensive, a fixed tour through all operations runs first, and can be all (`examples`
    0). `steps`: state machine steps in one example. `seed` None: new random examples in each run.
    `on_example` is called after each example with the number of examples so far.
    """
    search = Search(tries, on_example)
    site = make_site(case)
    files, num_before, left = open_files(), 0, Counter[str]()
    chosen = settings(
        max_examples=max(examples, 1),
        stateful_step_count=steps,
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    machine = make_machine(site, search)
    if seed is not None:
        machine = with_seed(seed)(machine)
    try:
        with _quiet_engine():
            if site.is_expensive:
                tour(site, search)
                if site.keeps_files:
                    files, num_before = open_files(), search.num_examples
            if examples and search.best is None:
                with stuck_calls_interrupted(_method_called, case.call_max_s):
                    run_state_machine_as_test(machine, settings=chosen)
    except (ContractBroken, SearchIsOver, Flaky):
        # Hypothesis raises Flaky if a connector does not break twice in the same way, and for an example that
        # the end of the search interrupts.
        if search.best is None:
            raise
    finally:
        left = open_files() - files
        site.close()
    verdict = Verdict(case, search.num_examples, search.checked, search.seen, search.best)
    if verdict.broken is None and examples > 1:
        _check_files(verdict, left, verdict.num_examples - num_before)
    return verdict


def _check_files(verdict: Verdict, left: Counter[str], num_examples: int) -> None:
    """Check for leaked files over all examples: a leak in each example shows up once per example."""
    verdict.checked["files-left"] += 1
    if left.total() > FILES_SLACK + num_examples // 4:
        names = ", ".join(f"{count} x {name}" for name, count in left.most_common(5))
        detail = f"after {num_examples} examples, these files are still open: {names}"
        verdict.broken = ContractBroken("files-left", detail, "(in all examples)")


def _method_called(frame: FrameType) -> str | None:
    """Return the connector method that this frame of the kit calls; None for any other frame."""
    if frame.f_code is make_half.__code__:
        return "the constructor"
    if frame.f_code.co_filename not in (watched_scheduler.__file__, watched_worker.__file__):
        return None
    return str(frame.f_locals.get("method", frame.f_code.co_name))


@contextmanager
def _quiet_engine() -> Iterator[None]:
    """Silence the engine's log: errors that a connector raises are in the story already."""
    logger = logging.getLogger("baton")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
