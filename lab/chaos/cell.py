"""One cell of the matrix: runs load and fault, waits until the system is at rest, and fills the record."""

import random
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from lab.chaos.answers import Answer
from lab.chaos.faults import Fault, FaultContext
from lab.chaos.load import Load
from lab.chaos.questions import Question
from lab.chaos.system import END_S, System, orphans, wait_until, wait_until_empty
from lab.chaos.verdicts import Counts, count

NUM_CLIENTS = 6
WARM_S = 2.0
WARM_ANSWERS = 12
AFTER_S = 3.0
# Each limit below ends a wait, and reaching it is a defect. They allow for a machine that is also busy with
# other work.
WARM_MAX_S = 120.0
SERVES_MAX_S = 180.0
AT_REST_MAX_S = 90.0  # Loans that no consumer releases expire after ttl_s (30 s).


class Record(msgspec.Struct, kw_only=True):
    """One line of the journal. Durations are seconds; None: not measured, or not reached."""

    mode: str
    fault: str
    commit: str
    took_s: float = 0.0
    skipped: str | None = None  # Reason why the cell was not run.
    broken: str | None = None  # Reason why the cell could not be completed.
    counts: Counts | None = None
    may_fail: bool = True  # Requests may end with a clear error.
    serves_again_s: float | None = None  # Time from the target's first healthy answer to its first token.
    # Time from that healthy answer, or from the fault's end, until all pairs of engines move KV again.
    hands_over_again_s: float | None = None
    rest_s: float | None = None  # Time from the last answer until all blocks of all pools were free.
    strikes: int | None = None  # Packets that the fault changed, delayed or dropped.
    held: list[str] = []  # What was still in use in pools at the time limit.
    expired_loans: int = 0  # Loans that ended by time, unless the fault is a reason for them.
    silent_pairs: list[str] = []
    processes_left: list[str] = []
    files_left: int = 0
    ended: list[str] = []  # Engines that ended unexpectedly.

    @property
    def defects(self) -> list[str]:
        """Descriptions of all defects; empty for a good cell."""
        if self.broken is not None:
            return [f"broken: {self.broken}"]
        found = []
        if self.counts is not None:
            numbers = {"wrong": self.counts.wrong, "hung": self.counts.hung, "unclear": self.counts.unclear}
            numbers["streams not continued"] = self.counts.broken_streams
            numbers["failed"] = 0 if self.may_fail else self.counts.clear_errors
            found += [f"{number} {name}" for name, number in numbers.items() if number]
        found += [f"held: {', '.join(self.held)}"] if self.held else []
        found += [f"{self.expired_loans} loans expired"] if self.expired_loans else []
        found += [f"no handoff any more: {', '.join(self.silent_pairs)}"] if self.silent_pairs else []
        found += [f"ended: {', '.join(self.ended)}"] if self.ended else []
        found += [f"processes left: {', '.join(self.processes_left)}"] if self.processes_left else []
        found += [f"{self.files_left} files left"] if self.files_left > 0 else []
        return found


def run_cell(
    system: System,
    fault: Fault,
    record: Record,
    *,
    questions: Sequence[Question],
    expected: Mapping[int, Answer],
    other_expected: Mapping[int, Answer],
    run: str,
    hang_s: float,
    num_updates: int,
) -> None:
    """Run the cell and fill the record.

    `other_expected`: the answers with the system's other weights, if the fault loads them.
    Raises SystemFailed, NetworkFailed or ChildDied when the cell cannot continue.
    """
    rng = random.Random(f"{record.mode} {record.fault}")
    load = Load(
        system.router_url, questions, num_clients=NUM_CLIENTS, hang_s=hang_s, seed=rng.randrange(1 << 30)
    )
    context = FaultContext(system, load, rng, num_updates)
    load.start()
    try:
        warm_s = time.monotonic()
        wait_until(lambda: load.num_ended_since(warm_s) >= WARM_ANSWERS, WARM_MAX_S)
        time.sleep(WARM_S)
        files_before, expired_before = system.num_files(), system.num_expired_loans()
        began_s = time.monotonic()
        fault.begin(context)
        time.sleep(fault.lasts_s)
        record.strikes = system.network.strikes() if fault.strikes else None
        fault.end(context)
        ended_s = time.monotonic()
        _watch_return(system, fault, record, lambda: load.num_ended_since(ended_s) > 0, ended_s)
        time.sleep(AFTER_S)
    except BaseException:
        load.abandon()
        raise
    finally:
        system.network.replace_rules(())
    answers = load.stop()
    stopped_s = time.monotonic()
    record.may_fail = not fault.is_planned
    kind = system.mode.kind
    whole = {one.index for one in questions if fault.keeps_streams and one.can_be_continued(kind)}
    record.counts = count(answers, expected, other_expected, began_s=began_s, ended_s=ended_s, whole=whole)
    record.held = wait_until_empty(system.not_at_rest, AT_REST_MAX_S)
    if not record.held:
        record.rest_s = time.monotonic() - stopped_s
    if fault.keeps_loans:
        record.expired_loans = int(system.num_expired_loans() - expired_before)
    left = wait_until_empty(lambda: orphans(run), END_S)
    record.processes_left = [f"{process.name()} {process.pid}" for process in left]
    record.files_left = max(0, system.num_files() - files_before)
    record.ended = system.ended()


def _watch_return(
    system: System, fault: Fault, record: Record, is_answering: Callable[[], bool], ended_s: float
) -> None:
    """Wait until the target serves, every pair moves KV and a client has a right answer.

    Each wait has a time limit.
    """
    back_s = ended_s
    if fault.target is not None:
        engine = system.engines[fault.target]
        wait_until(lambda: engine.is_healthy() or engine.child.has_ended(), system.start_s)
        back_s = time.monotonic()
        tokens = engine.num_tokens()
        if wait_until(lambda: engine.num_tokens() > max(0.0, tokens), SERVES_MAX_S):
            record.serves_again_s = time.monotonic() - back_s
    if system.mode.hands_over:
        before = system.num_handed_over()

        def silent() -> list[str]:
            return [
                pair for pair, nbytes in system.num_handed_over().items() if nbytes <= before.get(pair, 0)
            ]

        record.silent_pairs = wait_until_empty(silent, SERVES_MAX_S)
        if not record.silent_pairs:
            record.hands_over_again_s = time.monotonic() - back_s
    wait_until(is_answering, SERVES_MAX_S)
