"""Runs the cells of the matrix, in an order that needs few starts of a system, and writes the journal."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from baton.cli.processes import Fleet, Stopped
from baton.core.errors import BatonError
from lab.chaos.answers import Answer
from lab.chaos.cell import Record, run_cell
from lab.chaos.disk import mount
from lab.chaos.faults import FAULTS, Fault
from lab.chaos.load import ask_all
from lab.chaos.modes import MODES, VLLM_PYTHON, Kind, Mode
from lab.chaos.network import Network, Proxied, Switched, refusal_reason
from lab.chaos.questions import MODEL_NAME, Question, make_questions, write_model
from lab.chaos.rules import FRONT
from lab.chaos.switch import unshare
from lab.chaos.system import HOSTS, RUN_MARK, SHARED_MEMORY, System, orphans, single_engine

CLONE_NEWNS = 0x00020000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
NUM_AT_ONCE = 8  # Concurrent questions to the single engine.
SINGLE_HANG_S = 300.0

# Kills, a stop, each kind of network fault, and clients that disconnect, in two modes.
QUICK = (
    ("pull", "disconnects"),
    ("pull", "kill-p"),
    ("pull", "reset"),
    ("pull", "corrupt-requests"),
    ("pull", "stop-p-2"),
    ("push-layer", "kill-d"),
    ("push-layer", "partition"),
    ("push-layer", "corrupt-answers"),
)


class Shard(msgspec.Struct, frozen=True):
    """Part number `index` (from 1) of `count` parts of the cells."""

    index: int = 1
    count: int = 1


WHOLE = Shard()
MACHINE_NEEDS = frozenset({"mount", "packets"})  # Needs that the machine meets and not the mode.


def plan_cells(
    *, modes: Sequence[str] = (), faults: Sequence[str] = (), quick: bool = False, shard: Shard = WHOLE
) -> list[tuple[Mode, Fault]]:
    """Return the cells to run. Cells that share a system follow each other."""
    cells = [
        (mode, fault)
        for mode in MODES
        for fault in FAULTS
        if fault.needs - MACHINE_NEEDS <= mode.has
        and (mode.faults is None or fault.name in mode.faults)
        and (not modes or mode.name in modes)
        and (not faults or fault.name in faults)
        and (not quick or (mode.name, fault.name) in QUICK)
    ]
    cells.sort(key=lambda cell: (MODES.index(cell[0]), str(cell[1].variant)))
    begin, end = ((len(cells) * index) // shard.count for index in (shard.index - 1, shard.index))
    return cells[begin:end]


def source_commit(root: Path) -> str:
    """Return the last commit that changed what the cells run.

    It ends in "+" if there are uncommitted changes.
    """
    sources = ["baton", "lab"]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments, "--", *sources]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    return git("log", "-1", "--format=%h") + ("+" if git("status", "--porcelain") else "")


def read_journal(path: Path) -> list[Record]:
    """Return the journal's records; lines of another version are skipped, so their cells run again."""
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(msgspec.MsgspecError):
            records.append(msgspec.json.decode(line, type=Record))
    return records


def append_record(path: Path, record: Record) -> None:
    """Append the record in a single write, so that shards can share a journal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as journal:
        journal.write(msgspec.json.encode(record) + b"\n")


@dataclass(frozen=True)
class RunEnvironment:
    """Resources that all cells of a run share."""

    network: Network
    model: Path
    other_model: Path  # A model with the same shape and other weights.
    folder: Path
    run: str
    questions: Sequence[Question]
    refused: str | None  # Reason why there is no switch.
    may_mount: bool
    say: Callable[[str], None]
    _expected: dict[tuple[Kind, Path], Mapping[int, Answer]] = field(default_factory=dict, init=False)

    def expected(self, kind: Kind, model: Path) -> Mapping[int, Answer]:
        """Return the answers of a single engine of this kind, which is asked only once. Raises BatonError."""
        if (kind, model) not in self._expected:
            host, folder = self.network.addresses[FRONT], self.folder / "single"
            with single_engine(kind, model, host=host, folder=folder) as url:
                answers = ask_all(url, self.questions, num_at_once=NUM_AT_ONCE, hang_s=SINGLE_HANG_S)
            bad = [answer for answer in answers.values() if not answer.is_complete]
            if bad:
                raise BatonError(f"the single engine ({kind}) for comparison failed: {bad[0]}")
            self._expected[kind, model] = answers
            self.say(f"a single engine ({kind}) answered {len(answers)} questions")
        return self._expected[kind, model]


@contextmanager
def make_environment(
    folder: Path, say: Callable[[str], None], *, proxies: bool = False
) -> Iterator[RunEnvironment]:
    """Set up the model and the network: namespaces with the switch, or proxies.

    Moves this process into the clients' namespace and, where mounts are allowed, gives it a private /dev/shm.
    No network namespaces are used with `proxies`.
    """
    run = f"{os.getpid()}-{time.time_ns()}"
    os.environ[RUN_MARK] = run
    folder.mkdir(parents=True, exist_ok=True)
    may_mount = _isolate_mounts(say)
    model = write_model(folder / MODEL_NAME)
    other_model = write_model(folder / "other" / MODEL_NAME, seed=1)
    with ExitStack() as stack:
        stack.callback(end_orphans, run)
        fleet = stack.enter_context(Fleet(folder / "switch"))
        refused = "--proxies was given" if proxies else refusal_reason()
        if refused is not None:
            say(f"{refused}; byte-stream proxies replace the switch")
        make_network = Switched if refused is None else Proxied
        network = stack.enter_context(make_network(fleet, folder, HOSTS))
        network.enter(FRONT)
        yield RunEnvironment(
            network, model, other_model, folder, run, make_questions(), refused, may_mount, say
        )


def _isolate_mounts(say: Callable[[str], None]) -> bool:
    """Give this process a private mount namespace and a /dev/shm of its own. Returns whether that is
    allowed.

    Mounts are then invisible to other processes and end with this one.
    """
    try:
        unshare(CLONE_NEWNS)
        mount(b"none", Path("/"), None, MS_REC | MS_PRIVATE)
        mount(b"chaos", SHARED_MEMORY, b"tmpfs", 0)
    except OSError as error:
        say(
            f"{error}: the faults disk-full and disk-read-only are skipped, "
            f"and files of other programs in {SHARED_MEMORY} are counted"
        )
        return False
    return True


def end_orphans(run: str) -> None:
    for process in orphans(run):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def run_cells(
    environment: RunEnvironment,
    cells: Sequence[tuple[Mode, Fault]],
    *,
    commit: str,
    hang_s: float,
    num_updates: int,
    on_record: Callable[[Record], None],
) -> None:
    """Run the cells. A system is reused until a cell has a defect."""
    system: System | None = None
    key = None
    num_systems = 0
    try:
        for mode, fault in cells:
            record = Record(mode=mode.name, fault=fault.name, commit=commit)
            if reason := skip_reason(environment, mode, fault):
                record.skipped = reason
                on_record(record)
                continue
            began_s = time.monotonic()
            try:
                expected = environment.expected(mode.kind, environment.model)
                others: Mapping[int, Answer] = {}
                if not fault.keeps_weights:
                    others = environment.expected(mode.kind, environment.other_model)
                if system is None or key != (mode.name, fault.variant):
                    _close(system, environment.run)
                    system = None
                    num_systems += 1
                    folder = environment.folder / f"{num_systems:03}-{mode.name}"
                    environment.say(f"{mode.name}: starting ({folder.name})")
                    key = mode.name, fault.variant
                    system = System(
                        mode,
                        fault.variant,
                        model=environment.model,
                        other_model=environment.other_model,
                        network=environment.network,
                        folder=folder,
                        may_mount=environment.may_mount,
                    )
                run_cell(
                    system,
                    fault,
                    record,
                    questions=environment.questions,
                    expected=expected,
                    other_expected=others,
                    run=environment.run,
                    hang_s=hang_s,
                    num_updates=num_updates,
                )
            except Stopped:
                raise
            except Exception as error:  # The other cells run whatever the error is.
                record.broken = f"{type(error).__name__}: {error}"
            record.took_s = time.monotonic() - began_s
            on_record(record)
            if record.defects:
                _close(system, environment.run)
                system = None
    finally:
        _close(system, environment.run)


def skip_reason(environment: RunEnvironment, mode: Mode, fault: Fault) -> str | None:
    """Return the reason why this machine cannot run the cell; None if it can."""
    if mode.kind == "vllm" and not VLLM_PYTHON.exists():
        return "vLLM is not installed; install it with scripts/setup-vllm"
    if "packets" in fault.needs and environment.refused is not None:
        return environment.refused
    if "mount" in fault.needs and not environment.may_mount:
        return "mounts are not allowed on this machine"
    if fault.variant.has_layer and shutil.which("cc") is None:
        return "there is no C compiler (cc) to build the fault layer"
    return None


def _close(system: System | None, run: str) -> None:
    if system is not None:
        system.stop()
        end_orphans(run)


def without_done(
    cells: Iterable[tuple[Mode, Fault]], records: Iterable[Record], commit: str
) -> list[tuple[Mode, Fault]]:
    """Return the cells that have no record of this commit."""
    done = {(r.mode, r.fault) for r in records if r.commit == commit and r.skipped is None}
    return [(mode, fault) for mode, fault in cells if (mode.name, fault.name) not in done]
