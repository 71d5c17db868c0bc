"""The system under test: two prefill engines, two decode engines and a router; each engine has a host."""

import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from baton.cli.processes import Child, Fleet
from baton.core.errors import BatonError
from lab.chaos.disk import Disk, Layer, build_layer
from lab.chaos.modes import ENGINE_PROGRAMS, ENGINES, NUM_BLOCKS, EngineProgram, Kind, Mode, Placement
from lab.chaos.network import Network
from lab.chaos.questions import MODEL_NAME
from lab.chaos.rules import FRONT, HTTP_PORT

HOSTS = (FRONT, *ENGINES)
ROUTER_PORT = 8000
SINGLE_PORT = 8001
FAILING_PORT = 8002
END_S = 30.0  # Time limit for an ended process to leave nothing. It takes 2 s on a quiet machine.
LOOK_EVERY_S = 0.05
PROBE_S = 10.0
RUN_MARK = "CHAOS_RUN"  # Environment variable of every process that a run starts.
SHARED_MEMORY = Path("/dev/shm")

BLOCKS_IN_USE = "kv_cache_usage_perc"
T = TypeVar("T")
AT_REST = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_for_remote_kvs",
    "num_requests_delayed_free",
    BLOCKS_IN_USE,
)
# One token, so that an idle engine takes a step and updates its metrics.
PROBE_REQUEST = {"model": MODEL_NAME, "prompt": [300], "max_tokens": 1}
PROBE_REQUEST_S = 30.0
UPDATE_S = 120.0  # An engine waits up to 60 s for its requests.


class SystemFailed(BatonError):
    """The system could not be brought to a state where a cell can begin."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What a fault needs from the system's start."""

    num_blocks: int = NUM_BLOCKS
    options: tuple[str, ...] = ()  # Options of `baton serve` for all engines.
    has_layer: bool = False  # The engines run with the fault layer.
    has_failing: bool = False  # The router has a decode engine more, whose answers are errors.
    takes_weights: bool = False  # The engines take other weights below the model's parent folder.


PLAIN = Variant()


def wait_until(is_reached: Callable[[], bool], timeout_s: float) -> bool:
    """Return whether the condition is reached in time."""
    deadline_s = time.monotonic() + timeout_s
    while not is_reached():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(LOOK_EVERY_S)
    return True


def wait_until_empty(look: Callable[[], list[T]], timeout_s: float) -> list[T]:
    """Call `look` until it returns an empty list or time is up. Returns its last result."""
    found: list[T] = []

    def is_empty() -> bool:
        nonlocal found
        found = look()
        return not found

    wait_until(is_empty, timeout_s)
    return found


class EngineProcess:
    """One engine process. It can be started again after its end, on the same host and port."""

    def __init__(
        self, name: str, program: EngineProgram, url: str, launch: Callable[[], Child], admin_key: str
    ) -> None:
        self.name = name
        self._program = program
        self.url = url
        self._launch = launch
        self.child = launch()
        headers = {"Authorization": f"Bearer {admin_key}"}
        self._client = httpx.Client(base_url=url, timeout=PROBE_S, trust_env=False, headers=headers)

    def close(self) -> None:
        self._client.close()

    def is_healthy(self) -> bool:
        try:
            return self._client.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def samples(self) -> dict[tuple[str, str], float]:
        """Return metric values by name and `peer` label, summed over other labels.

        Raises httpx.HTTPError.
        """
        text = self._client.get("/metrics").raise_for_status().text
        sums: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = sample.name.partition(":")[2], sample.labels.get("peer", "")
                sums[key] = sums.get(key, 0.0) + sample.value
        return sums

    def num_tokens(self) -> float:
        """Return the tokens generated since its start; -1 if it does not answer."""
        try:
            return self.samples().get(("generation_tokens_total", ""), 0.0)
        except httpx.HTTPError:
            return -1.0

    def not_at_rest(self) -> list[str]:
        try:
            if self._program.is_silent_at_rest:
                self._client.post("/v1/completions", json=PROBE_REQUEST, timeout=PROBE_REQUEST_S)
            samples = self.samples()
        except httpx.HTTPError as error:
            return [f"{self.name} does not answer: {type(error).__name__}"]
        values = {name: samples.get((name, ""), 0.0) for name in AT_REST}
        return [
            f"{self.name} {name}={value:g}"
            for name, value in values.items()
            if value > (self._program.used_at_rest if name == BLOCKS_IN_USE else 0)
        ]

    def processes(self) -> list[psutil.Process]:
        parent = psutil.Process(self.child.pid)
        return [parent, *parent.children(recursive=True)]

    def processes_named(self, prefix: str) -> list[psutil.Process]:
        return [process for process in self.processes() if process.name().startswith(prefix)]

    def update_weights(self, folder: Path, version: str | None) -> None:
        """Raises SystemFailed."""
        body = {"folder": str(folder), "version": version}
        answer = self._client.post("/update_weights", json=body, timeout=UPDATE_S)
        if answer.status_code != 200:
            raise SystemFailed(f"{self.name} does not take other weights: {answer.text}")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all its processes, one by one."""
        for process in self.processes():
            # A front end kills workers that are late after SIGCONT, while others still get the signal.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def restart(self, ends_within_s: float) -> None:
        """Wait for its end and start it again on the same port. Raises SystemFailed."""
        if not wait_until(self.child.has_ended, ends_within_s):
            raise SystemFailed(f"{self.name} has not ended after {ends_within_s:g} s")
        self.child = self._launch()


class System:
    """A running system. Its owner calls `stop`.

    Raises ChildDied or StartTimeout if a process does not start.
    """

    def __init__(
        self,
        mode: Mode,
        variant: Variant,
        *,
        model: Path,
        other_model: Path,
        network: Network,
        folder: Path,
        may_mount: bool,
    ) -> None:
        self.mode = mode
        self.network = network
        self.files = folder / "tmp"
        self.files.mkdir(parents=True, exist_ok=True)
        self.disk = Disk(folder / "kv", may_mount=may_mount)
        self.layers: dict[str, Layer] = {}
        if variant.has_layer:
            library = build_layer(folder)
            for name in mode.engines:
                path = folder / f"layer-{name}"
                self.layers[name] = Layer(path, library=library, folder=self.disk.folder)
        self.failing = (
            folder / "failing"
        )  # Status of the answers of the engine that fails; empty: it is down.
        self.failing.write_text("")
        self.model, self.other_model = model, other_model
        self._variant = variant
        self._program = ENGINE_PROGRAMS[mode.kind]
        self.start_s = self._program.start_s
        self._fleet = Fleet(folder / "logs")
        self._env = {
            "BATON_SECRET": secrets.token_hex(32),
            "TMPDIR": str(self.files),
            **self._program.environment,
        }
        self._admin_key = secrets.token_hex(16)
        self._num_starts = 0
        self.router_url = f"http://{network.addresses[FRONT]}:{ROUTER_PORT}"
        self.engines: dict[str, EngineProcess] = {}
        try:
            for name in mode.engines:
                self.engines[name] = self._make_engine(name)
            self.router = self._start_router()
            engines = self.engines.values()
            urls = {engine.child: f"{engine.url}/health" for engine in engines}
            urls[self.router] = f"{self.router_url}/health"
            self._fleet.wait_ready(urls, timeout_s=self._program.start_s)
        except BaseException:
            self.stop()
            raise

    def is_in_use(self, name: str) -> bool:
        """Whether the router sends requests to this engine."""
        return self.router_says(name, "state") in ("up", "slow")

    def router_says(self, name: str, field: str) -> object:
        """Return a field of this engine in the router's /fleet; None if it does not answer."""
        url = self.engines[name].url
        try:
            fleet = httpx.get(f"{self.router_url}/fleet", timeout=PROBE_S).raise_for_status().json()
        except httpx.HTTPError:
            return None
        (value,) = (
            one[field] for engines in fleet["engines"].values() for one in engines if one["url"] == url
        )
        return value

    def stop(self) -> None:
        for engine in self.engines.values():
            engine.close()
        self._fleet.stop()
        self.disk.close()

    def _make_engine(self, name: str) -> EngineProcess:
        address = self.network.addresses[name]
        placement = Placement(name, address, self.network.port_offset, self.disk.folder)
        command = [*self.mode.command(self.model, placement, self._variant.num_blocks)]
        command += ["--host", address, "--port", str(HTTP_PORT + placement.port_offset)]
        command += self._variant.options
        env = {**self._env, **(self.layers[name].env if self.layers else {})}
        if self._variant.takes_weights:
            command += ["--weights-root", str(self.model.parent)]
            env["BATON_ADMIN_API_KEY"] = self._admin_key

        def launch() -> Child:
            for child in [child for child in self._fleet.children if child.has_ended()]:
                self._fleet.forget(child)
            self._num_starts += 1
            log_name = f"{self._num_starts:02}-{name}"
            return self._fleet.start(log_name, self.network.command_on(name, command), env=env)

        return EngineProcess(name, self._program, f"http://{address}:{HTTP_PORT}", launch, self._admin_key)

    def _start_router(self) -> Child:
        command = [sys.executable, "-m", "baton.cli", "route", "--host", self.network.addresses[FRONT]]
        command += ["--port", str(ROUTER_PORT)]
        command += ["--mode", self.mode.router]
        for option, names in (("--prefill", self.mode.prefill), ("--decode", self.mode.decode)):
            for name in names:
                command += [option, self.engines[name].url]
        if self._variant.has_failing:
            host = self.network.addresses[FRONT]
            program = [sys.executable, "-m", "lab.chaos.failing", host, str(FAILING_PORT), str(self.failing)]
            self._fleet.start("failing", program, env=self._env)
            command += ["--decode", f"http://{host}:{FAILING_PORT}"]
        env = {"BATON_ENGINE_API_KEY": self._admin_key} if self._variant.takes_weights else {}
        return self._fleet.start("router", command, env=self._env | env)

    def num_handed_over(self) -> dict[str, float]:
        """Return the bytes that D has read from P, by "p0>d0"; 0 if D does not answer."""
        handed: dict[str, float] = {}
        for decode in self.mode.decode:
            try:
                samples = self.engines[decode].samples()
            except httpx.HTTPError:
                samples = {}
            for prefill in self.mode.prefill:
                handed[f"{prefill}>{decode}"] = samples.get(("kv_peer_bytes_total", prefill), 0.0)
        return handed

    def num_expired_loans(self) -> float:
        """Count loans that ended by time; those of an engine that does not answer are left out."""
        expired = 0.0
        for engine in self.engines.values():
            with suppress(httpx.HTTPError):
                expired += engine.samples().get(("kv_loans_expired_total", ""), 0.0)
        return expired

    def not_at_rest(self) -> list[str]:
        """Describe what each engine still holds; empty when all blocks are free."""
        return [held for engine in self.engines.values() for held in engine.not_at_rest()]

    def num_files(self) -> int:
        """Count temporary files and shared memory of all processes; 0 if engines leave some by themselves."""
        if self._program.leaves_files:
            return 0
        folders = (self.files, SHARED_MEMORY)
        return sum(len(files) for folder in folders for _, _, files in os.walk(folder))

    def ended(self) -> list[str]:
        """Return the names of processes that ended unexpectedly."""
        engines = [name for name, engine in self.engines.items() if engine.child.has_ended()]
        return [*engines, *(["router"] if self.router.has_ended() else [])]


def orphans(run: str) -> list[psutil.Process]:
    """Return processes of this run that are not descendants of this process any more."""
    ours = {process.pid for process in psutil.Process().children(recursive=True)}
    found = []
    for process in psutil.process_iter():
        try:
            is_ours = process.pid in ours or process.pid == os.getpid()
            if not is_ours and process.environ().get(RUN_MARK) == run:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


@contextmanager
def single_engine(kind: Kind, model: Path, *, host: str, folder: Path) -> Iterator[str]:
    """Start the engine that answers are compared with: alone, without a connector. Yields its URL."""
    program = ENGINE_PROGRAMS[kind]
    command = [*program.command(model, NUM_BLOCKS), "--host", host, "--port", str(SINGLE_PORT)]
    url = f"http://{host}:{SINGLE_PORT}"
    with Fleet(folder) as fleet:
        child = fleet.start(f"single-{kind}", command, env=program.environment)
        fleet.wait_ready({child: f"{url}/health"}, timeout_s=program.start_s)
        yield url
