"""A soak test: a steady load for hours with repeated faults. Samples of each process show leaks.

Faults hit p0, d0 and the links; p1, d1 and the router run all the time, so their growth is checked.
"""

import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median

import httpx
import msgspec
import psutil

from baton.cli.processes import Stopped
from lab.chaos.answers import Answer
from lab.chaos.cell import AT_REST_MAX_S
from lab.chaos.faults import FaultContext, fault_named
from lab.chaos.load import Load
from lab.chaos.matrix import RunEnvironment, skip_reason
from lab.chaos.modes import mode_named
from lab.chaos.system import END_S, PLAIN, System, orphans, wait_until, wait_until_empty
from lab.chaos.verdicts import verdict_on

SAMPLE_EVERY_S = 5.0
FAULT_EVERY_S = 30.0
FAULT_CYCLE = (
    "disconnects",
    "reset",
    "kill-p",
    "delay",
    "stop-d-2",
    "partition",
    "corrupt-requests",
    "core-d",
    "loss",
    "corrupt-answers",
    "stop-p-15",
    "kill-d",
)
# Allowed growth from the median of the second quarter to that of the last quarter. Caches fill in the first
# quarter.
GROWTH_MAX = {"rss_mib": 48.0, "descriptors": 12.0, "threads": 6.0}
QUARTERS = 4

_PREFACE = (
    "Written by `make soak`; do not edit. A steady load with a fault every half minute; answers are",
    "checked as in [the chaos matrix](chaos.md). Faults may kill p0 and d0; p1, d1 and the router run all",
    "the time, and the medians of their second and last quarters are compared.",
)


class Sample(msgspec.Struct, frozen=True):
    """A sample of one engine or the router, over all its processes. `pid` is that of its first process."""

    at_s: float  # Time since the run began.
    name: str
    pid: int
    rss_mib: float
    descriptors: int
    threads: int
    loans: float
    pool_use: float  # Share of the blocks.
    expired: float = 0.0  # Loans that have ended by time, since the process began.


class Outcome(msgspec.Struct, kw_only=True):
    """Results of the whole run."""

    hours: float
    commit: str
    num_clients: int
    pause_s: float  # Pause of a client between two requests.
    verdicts: dict[str, int] = {}
    faults: dict[str, int] = {}
    expired_loans: int = 0
    held: list[str] = []
    processes_left: list[str] = []
    growth: list[str] = []
    broken: str | None = None

    @property
    def defects(self) -> list[str]:
        """Descriptions of all defects; empty for a good run."""
        found = [f"broken: {self.broken}"] if self.broken else []
        for name in ("wrong", "unclear", "hung"):
            found += [f"{number} {name}"] if (number := self.verdicts.get(name, 0)) else []
        if all(fault_named(name).keeps_loans for name in self.faults) and self.expired_loans:
            found.append(f"{self.expired_loans} loans expired")
        found += [f"held: {', '.join(self.held)}"] if self.held else []
        found += [f"processes left: {', '.join(self.processes_left)}"] if self.processes_left else []
        return found + self.growth


def growth_defects(samples: Sequence[Sample]) -> list[str]:
    """Describe what grew too much in processes that lived from the second quarter to the end."""
    if not samples:
        return []
    end_s = max(sample.at_s for sample in samples)
    second, last = (end_s / QUARTERS, 2 * end_s / QUARTERS), (end_s * 3 / QUARTERS, end_s)
    by_process: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        by_process[sample.name, sample.pid].append(sample)
    found = []
    for (name, _), own in by_process.items():
        early = [sample for sample in own if second[0] <= sample.at_s <= second[1]]
        late = [sample for sample in own if last[0] <= sample.at_s <= last[1]]
        if not early or not late or own[-1].at_s < end_s - 2 * SAMPLE_EVERY_S:
            continue
        for what, most in GROWTH_MAX.items():
            before, after = (median(getattr(s, what) for s in part) for part in (early, late))
            if after - before > most:
                found.append(f"{name}: {what} grew from {before:.0f} to {after:.0f}")
    return found


def num_expired_loans(samples: Sequence[Sample]) -> int:
    """Count the loans that ended by time, over all processes: each one's last sample has its own."""
    return int(sum({(sample.name, sample.pid): sample.expired for sample in samples}.values()))


def run_soak(
    environment: RunEnvironment,
    *,
    mode: str,
    hours: float,
    num_clients: int,
    pause_s: float,
    commit: str,
    hang_s: float,
    folder: Path,
    faults: Sequence[str] = FAULT_CYCLE,
) -> tuple[Outcome, list[Sample]]:
    """Run the load with faults.

    Samples are also written to `folder`/samples.jsonl during the run, one per line.
    """
    expected = environment.expected(mode_named(mode).kind, environment.model)
    outcome = Outcome(hours=hours, commit=commit, num_clients=num_clients, pause_s=pause_s)
    samples: list[Sample] = []
    system = System(
        mode_named(mode),
        PLAIN,
        model=environment.model,
        other_model=environment.other_model,
        network=environment.network,
        folder=folder,
        may_mount=environment.may_mount,
    )
    load = Load(
        system.router_url, environment.questions, num_clients=num_clients, hang_s=hang_s, pause_s=pause_s
    )
    began_s = time.monotonic()
    ends_s = began_s + hours * 3600
    try:
        load.start()
        context = FaultContext(system, load, random.Random(0))
        cycled = cycle(
            name for name in faults if skip_reason(environment, system.mode, fault_named(name)) is None
        )
        with (folder / "samples.jsonl").open("ab", buffering=0) as journal:
            while time.monotonic() < ends_s:
                next_fault_s = time.monotonic() + FAULT_EVERY_S
                while time.monotonic() < min(next_fault_s, ends_s):
                    for sample in take_samples(system, time.monotonic() - began_s):
                        samples.append(sample)
                        journal.write(msgspec.json.encode(sample) + b"\n")
                    _count_verdicts(load, expected, outcome)
                    time.sleep(SAMPLE_EVERY_S)
                name = next(cycled)
                outcome.faults[name] = outcome.faults.get(name, 0) + 1
                _apply_fault(context, name)
                if outcome.faults[name] == 1 or name == faults[-1]:
                    environment.say(
                        f"{(time.monotonic() - began_s) / 3600:.2f} h, {name}: {outcome.verdicts}"
                    )
        load.stop()
        _count_verdicts(load, expected, outcome)
        outcome.held = wait_until_empty(system.not_at_rest, AT_REST_MAX_S)
        left = wait_until_empty(lambda: orphans(environment.run), END_S)
        outcome.processes_left = [f"{process.name()} {process.pid}" for process in left]
        samples += take_samples(system, time.monotonic() - began_s)
    except Stopped:
        load.abandon()
        raise
    except Exception as error:  # The samples so far still go into a report.
        load.abandon()
        outcome.broken = f"{type(error).__name__}: {error}"
    finally:
        system.network.replace_rules(())
        system.stop()
    outcome.growth = growth_defects(samples)
    outcome.expired_loans = num_expired_loans(samples)
    return outcome, samples


def _apply_fault(context: FaultContext, name: str) -> None:
    fault = fault_named(name)
    fault.begin(context)
    time.sleep(fault.lasts_s)
    fault.end(context)
    if fault.target is not None:
        engine = context.engine(fault.target)
        wait_until(lambda: engine.is_healthy() or engine.child.has_ended(), context.system.start_s)


def _count_verdicts(load: Load, expected: Mapping[int, Answer], outcome: Outcome) -> None:
    for answer in load.take():
        verdict = verdict_on(answer, expected[answer.question])
        outcome.verdicts[verdict] = outcome.verdicts.get(verdict, 0) + 1


def take_samples(system: System, at_s: float) -> list[Sample]:
    """Take a sample of the router and of each engine that answers."""
    found = []
    for name, engine in system.engines.items():
        try:
            metrics = engine.samples()
            found.append(_sample(name, engine.child.pid, at_s, metrics))
        except (psutil.Error, httpx.HTTPError):
            continue
    found.append(_sample("router", system.router.pid, at_s, {}))
    return found


def _sample(name: str, pid: int, at_s: float, metrics: Mapping[tuple[str, str], float]) -> Sample:
    parent = psutil.Process(pid)
    processes = [parent, *parent.children(recursive=True)]
    return Sample(
        at_s,
        name,
        pid,
        sum(process.memory_info().rss for process in processes) / (1 << 20),
        sum(process.num_fds() for process in processes),
        sum(process.num_threads() for process in processes),
        metrics.get(("num_requests_delayed_free", ""), 0.0),
        metrics.get(("kv_cache_usage_perc", ""), 0.0),
        metrics.get(("kv_loans_expired_total", ""), 0.0),
    )


def plot(samples: Sequence[Sample], path: Path) -> None:
    """Plot each sampled value over time, in one chart per value with one curve per process."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {
        "rss_mib": "RSS, MiB",
        "descriptors": "descriptors",
        "threads": "threads",
        "loans": "loans",
        "pool_use": "share of blocks in use",
    }
    figure, rows = pyplot.subplots(len(titles), sharex=True, figsize=(9, 11))
    for axes, (what, title) in zip(rows, titles.items(), strict=True):
        for name in sorted({sample.name for sample in samples}):
            own = [sample for sample in samples if sample.name == name]
            axes.plot([s.at_s / 60 for s in own], [getattr(s, what) for s in own], label=name, linewidth=0.8)
        axes.set_ylabel(title)
        axes.grid(visible=True, alpha=0.3)
    rows[0].legend(fontsize="small", ncols=5)
    rows[-1].set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def write_soak_report(outcome: Outcome, samples: Sequence[Sample], *, machine: str, date: str) -> str:
    """Return the report in Markdown. `samples` give the table of first and last values."""
    verdict = "good" if not outcome.defects else "bad: " + "; ".join(outcome.defects)
    counts = ", ".join(f"{number} {name}" for name, number in sorted(outcome.verdicts.items()))
    faults = ", ".join(f"{number} {name}" for name, number in outcome.faults.items())
    lines = [
        "# Soak test",
        "",
        *_PREFACE,
        "",
        f"{date}, commit {outcome.commit}, {machine}, {outcome.hours:g} hours. Verdict: **{verdict}**.",
        "",
        f"{outcome.num_clients} clients, {outcome.pause_s:g} s between two requests of one.",
        f"Answers: {counts}. Faults: {faults}. {outcome.expired_loans} loans expired.",
        "",
        "![RSS, descriptors, threads, loans and pools over time](soak.png)",
        "",
        "| process | RSS, MiB: first | last | descriptors: first | last | threads: first | last |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in sorted({sample.name for sample in samples}):
        own = [sample for sample in samples if sample.name == name]
        first, last = own[0], own[-1]
        values = (
            first.rss_mib,
            last.rss_mib,
            first.descriptors,
            last.descriptors,
            first.threads,
            last.threads,
        )
        lines.append(f"| {name} | " + " | ".join(f"{value:.0f}" for value in values) + " |")
    return "\n".join(lines) + "\n"
