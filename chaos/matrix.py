"""Runs cells: brings up what they need, in an order that needs few starts, and writes the journal."""

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
from chaos.answers import Answer
from chaos.cell import Record, run_cell
from chaos.disk import mount
from chaos.faults import FAULTS, Fault
from chaos.load import ask_all
from chaos.modes import MODES, VLLM_PYTHON, Kind, Mode
from chaos.network import Network, Proxied, Switched, why_refused
from chaos.questions import MODEL_NAME, Question, make_questions, write_model
from chaos.rules import FRONT
from chaos.switch import unshare
from chaos.system import HOSTS, RUN_MARK, SHARED_MEMORY, System, orphans, single_engine

CLONE_NEWNS = 0x00020000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
NUM_AT_ONCE = 8  # Questions to the single engine.
SINGLE_HANG_S = 300.0

# Kills, a stop, network faults of each kind, and clients that leave, in two modes.
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
    """The `index`-th of `count` parts of the cells; the first is 1."""

    index: int = 1
    count: int = 1


WHOLE = Shard()
MACHINE = frozenset({"mount", "packets"})  # Needs that the machine meets, not the mode.


def plan_cells(
    *, modes: Sequence[str] = (), faults: Sequence[str] = (), quick: bool = False, shard: Shard = WHOLE
) -> list[tuple[Mode, Fault]]:
    """Cells that share a system follow each other."""
    cells = [
        (mode, fault)
        for mode in MODES
        for fault in FAULTS
        if fault.needs - MACHINE <= mode.has
        and (mode.faults is None or fault.name in mode.faults)
        and (not modes or mode.name in modes)
        and (not faults or fault.name in faults)
        and (not quick or (mode.name, fault.name) in QUICK)
    ]
    cells.sort(key=lambda cell: (MODES.index(cell[0]), str(cell[1].variant)))
    begin, end = ((len(cells) * index) // shard.count for index in (shard.index - 1, shard.index))
    return cells[begin:end]


def source_commit(root: Path) -> str:
    """The last commit that changed what the cells run. Ends in "+" with changes that are not committed."""
    sources = ["baton", "chaos"]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments, "--", *sources]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    return git("log", "-1", "--format=%h") + ("+" if git("status", "--porcelain") else "")


def read_journal(path: Path) -> list[Record]:
    """Lines of another version of the journal are left out: their cells run again."""
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(msgspec.MsgspecError):
            records.append(msgspec.json.decode(line, type=Record))
    return records


def append_record(path: Path, record: Record) -> None:
    """One write, so that shards may share a journal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as journal:
        journal.write(msgspec.json.encode(record) + b"\n")


@dataclass(frozen=True)
class Site:
    """What all cells of a run share."""

    network: Network
    model: Path
    folder: Path
    run: str
    questions: Sequence[Question]
    refused: str | None  # Why there is no switch.
    may_mount: bool
    say: Callable[[str], None]
    _expected: dict[Kind, Mapping[int, Answer]] = field(default_factory=dict, init=False)

    def expected(self, kind: Kind) -> Mapping[int, Answer]:
        """The answers of a single engine of this kind, which is asked once. Raises BatonError."""
        if kind not in self._expected:
            host, folder = self.network.addresses[FRONT], self.folder / "single"
            with single_engine(kind, self.model, host=host, folder=folder) as url:
                answers = ask_all(url, self.questions, num_at_once=NUM_AT_ONCE, hang_s=SINGLE_HANG_S)
            bad = [answer for answer in answers.values() if not answer.is_complete]
            if bad:
                raise BatonError(f"the single engine ({kind}) itself fails: {bad[0]}")
            self._expected[kind] = answers
            self.say(f"a single engine ({kind}) has answered {len(answers)} questions")
        return self._expected[kind]


@contextmanager
def make_site(folder: Path, say: Callable[[str], None], *, proxies: bool = False) -> Iterator[Site]:
    """Namespaces, the switch and the model.

    `proxies`: do without namespaces. Moves our process into the clients' namespace and, where that is
    allowed, gives it a /dev/shm of its own.
    """
    run = f"{os.getpid()}-{time.time_ns()}"
    os.environ[RUN_MARK] = run
    folder.mkdir(parents=True, exist_ok=True)
    may_mount = _isolate_mounts(say)
    model = write_model(folder / MODEL_NAME)
    with ExitStack() as stack:
        stack.callback(end_orphans, run)
        fleet = stack.enter_context(Fleet(folder / "switch"))
        refused = "proxies were asked for" if proxies else why_refused()
        if refused is not None:
            say(f"{refused}; byte-stream proxies stand in for the switch")
        make_network = Switched if refused is None else Proxied
        network = stack.enter_context(make_network(fleet, folder, HOSTS))
        network.enter(FRONT)
        yield Site(network, model, folder, run, make_questions(), refused, may_mount, say)


def _isolate_mounts(say: Callable[[str], None]) -> bool:
    """Mounts of ours are seen by nobody else and end with us; files in /dev/shm are this run's."""
    try:
        unshare(CLONE_NEWNS)
        mount(b"none", Path("/"), None, MS_REC | MS_PRIVATE)
        mount(b"chaos", SHARED_MEMORY, b"tmpfs", 0)
    except OSError as error:
        say(f"{error}: full and read-only disks are left out; files of others in {SHARED_MEMORY} count")
        return False
    return True


def end_orphans(run: str) -> None:
    for process in orphans(run):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def run_cells(
    site: Site,
    cells: Sequence[tuple[Mode, Fault]],
    *,
    commit: str,
    hang_s: float,
    on_record: Callable[[Record], None],
) -> None:
    """A system serves cells until one of them leaves it in a bad state."""
    system: System | None = None
    key = None
    num_systems = 0
    try:
        for mode, fault in cells:
            record = Record(mode=mode.name, fault=fault.name, commit=commit)
            if reason := why_not(site, mode, fault):
                record.skipped = reason
                on_record(record)
                continue
            began_s = time.monotonic()
            try:
                expected = site.expected(mode.kind)
                if system is None or key != (mode.name, fault.variant):
                    _close(system, site.run)
                    system = None
                    num_systems += 1
                    folder = site.folder / f"{num_systems:03}-{mode.name}"
                    site.say(f"{mode.name}: starting ({folder.name})")
                    key = mode.name, fault.variant
                    system = System(
                        mode,
                        fault.variant,
                        model=site.model,
                        network=site.network,
                        folder=folder,
                        may_mount=site.may_mount,
                    )
                run_cell(
                    system,
                    fault,
                    record,
                    questions=site.questions,
                    expected=expected,
                    run=site.run,
                    hang_s=hang_s,
                )
            except Stopped:
                raise
            except Exception as error:  # Of whatever kind, the other cells are to run.
                record.broken = f"{type(error).__name__}: {error}"
            record.took_s = time.monotonic() - began_s
            on_record(record)
            if record.defects:
                _close(system, site.run)
                system = None
    finally:
        _close(system, site.run)


def why_not(site: Site, mode: Mode, fault: Fault) -> str | None:
    """Why this machine cannot run the cell; None if it can."""
    if mode.kind == "vllm" and not VLLM_PYTHON.exists():
        return "vLLM is not installed; scripts/setup-vllm installs it"
    if "packets" in fault.needs and site.refused is not None:
        return site.refused
    if "mount" in fault.needs and not site.may_mount:
        return "mounts are refused"
    if fault.variant.has_layer and shutil.which("cc") is None:
        return "there is no C compiler for the fault layer"
    return None


def _close(system: System | None, run: str) -> None:
    if system is not None:
        system.stop()
        end_orphans(run)


def without_done(
    cells: Iterable[tuple[Mode, Fault]], records: Iterable[Record], commit: str
) -> list[tuple[Mode, Fault]]:
    """Cells that have no record of this commit."""
    done = {(r.mode, r.fault) for r in records if r.commit == commit and r.skipped is None}
    return [(mode, fault) for mode, fault in cells if (mode.name, fault.name) not in done]
