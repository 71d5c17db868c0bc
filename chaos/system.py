"""The system under test: two prefill engines, two decode engines and a router; each engine has a host."""

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from baton.cli.processes import Child, Fleet
from baton.core.errors import BatonError
from chaos.disk import Disk, Layer, build_layer
from chaos.modes import ENGINES, NUM_BLOCKS, SERVERS, Kind, Mode, Place, Server
from chaos.network import Network
from chaos.questions import MODEL_NAME
from chaos.rules import FRONT, HTTP_PORT

HOSTS = (FRONT, *ENGINES)
ROUTER_PORT = 8000
SINGLE_PORT = 8001
END_S = 30.0  # Within this, nothing of a process that ended is left. It takes 2 s on a quiet machine.
LOOK_EVERY_S = 0.05
PROBE_S = 10.0
RUN_MARK = "CHAOS_RUN"  # In the environment of everything that a run starts.
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
# One token, so that an engine takes a step and counts anew.
NUDGE = {"model": MODEL_NAME, "prompt": [300], "max_tokens": 1}
NUDGE_S = 30.0


class SystemFailed(BatonError):
    """The system could not be brought to where a cell can begin."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What a fault needs of the system from its start."""

    num_blocks: int = NUM_BLOCKS
    options: tuple[str, ...] = ()  # Of all engines, for `baton serve`.
    has_layer: bool = False  # The engines run with the fault layer.


PLAIN = Variant()


def wait_until(is_reached: Callable[[], bool], timeout_s: float) -> bool:
    """Whether it is reached in time."""
    deadline_s = time.monotonic() + timeout_s
    while not is_reached():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(LOOK_EVERY_S)
    return True


def wait_until_empty(look: Callable[[], list[T]], timeout_s: float) -> list[T]:
    """What the last look found: empty if that came in time."""
    found: list[T] = []

    def is_empty() -> bool:
        nonlocal found
        found = look()
        return not found

    wait_until(is_empty, timeout_s)
    return found


class Engine:
    """One `baton serve`. It may be started again after its end, on the same host and port."""

    def __init__(self, name: str, server: Server, url: str, launch: Callable[[], Child]) -> None:
        self.name = name
        self._server = server
        self.url = url
        self._launch = launch
        self.child = launch()
        self._client = httpx.Client(base_url=url, timeout=PROBE_S, trust_env=False)

    def close(self) -> None:
        self._client.close()

    def is_healthy(self) -> bool:
        try:
            return self._client.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def samples(self) -> dict[tuple[str, str], float]:
        """By metric's name and the label `peer`, summed over all others. Raises httpx.HTTPError."""
        text = self._client.get("/metrics").raise_for_status().text
        sums: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = sample.name.partition(":")[2], sample.labels.get("peer", "")
                sums[key] = sums.get(key, 0.0) + sample.value
        return sums

    def num_tokens(self) -> float:
        """Tokens generated since its start; -1 while it does not answer."""
        try:
            return self.samples().get(("generation_tokens_total", ""), 0.0)
        except httpx.HTTPError:
            return -1.0

    def not_at_rest(self) -> list[str]:
        try:
            if self._server.is_silent_at_rest:
                self._client.post("/v1/completions", json=NUDGE, timeout=NUDGE_S)
            samples = self.samples()
        except httpx.HTTPError as error:
            return [f"{self.name} does not answer: {type(error).__name__}"]
        values = {name: samples.get((name, ""), 0.0) for name in AT_REST}
        return [
            f"{self.name} {name}={value:g}"
            for name, value in values.items()
            if value > (self._server.used_at_rest if name == BLOCKS_IN_USE else 0)
        ]

    def processes(self) -> list[psutil.Process]:
        parent = psutil.Process(self.child.pid)
        return [parent, *parent.children(recursive=True)]

    def processes_named(self, prefix: str) -> list[psutil.Process]:
        return [process for process in self.processes() if process.name().startswith(prefix)]

    def send(self, number: signal.Signals) -> None:
        """To all its processes, one by one."""
        for process in self.processes():
            process.send_signal(number)

    def restart(self, ends_within_s: float) -> None:
        """Waits for its end, and starts it again on the same port. Raises SystemFailed."""
        if not wait_until(self.child.has_ended, ends_within_s):
            raise SystemFailed(f"{self.name} has not ended after {ends_within_s:g} s")
        self.child = self._launch()


class System:
    """Starts everything; raises ChildDied or StartTimeout. Its owner calls `stop`."""

    def __init__(
        self, mode: Mode, variant: Variant, *, model: Path, network: Network, folder: Path, may_mount: bool
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
        self._model = model
        self._variant = variant
        self._server = SERVERS[mode.kind]
        self.start_s = self._server.start_s
        self._fleet = Fleet(folder / "logs")
        self._env = {
            "BATON_SECRET": secrets.token_hex(32),
            "TMPDIR": str(self.files),
            **self._server.environment,
        }
        self._num_starts = 0
        self.router_url = f"http://{network.addresses[FRONT]}:{ROUTER_PORT}"
        self.engines: dict[str, Engine] = {}
        try:
            for name in mode.engines:
                self.engines[name] = self._make_engine(name)
            self.router = self._start_router()
            engines = self.engines.values()
            urls = {engine.child: f"{engine.url}/health" for engine in engines}
            urls[self.router] = f"{self.router_url}/health"
            self._fleet.wait_ready(urls, timeout_s=self._server.start_s)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        for engine in self.engines.values():
            engine.close()
        self._fleet.stop()
        self.disk.close()

    def _make_engine(self, name: str) -> Engine:
        address = self.network.addresses[name]
        place = Place(name, address, self.network.port_offset, self.disk.folder)
        command = [*self.mode.command(self._model, place, self._variant.num_blocks)]
        command += ["--host", address, "--port", str(HTTP_PORT + place.port_offset)]
        command += self._variant.options
        env = {**self._env, **(self.layers[name].env if self.layers else {})}

        def launch() -> Child:
            for child in [child for child in self._fleet.children if child.has_ended()]:
                self._fleet.forget(child)
            self._num_starts += 1
            log_name = f"{self._num_starts:02}-{name}"
            return self._fleet.start(log_name, self.network.command_on(name, command), env=env)

        return Engine(name, self._server, f"http://{address}:{HTTP_PORT}", launch)

    def _start_router(self) -> Child:
        command = [sys.executable, "-m", "baton.cli", "route", "--host", self.network.addresses[FRONT]]
        command += ["--port", str(ROUTER_PORT)]
        command += ["--mode", self.mode.router]
        for option, names in (("--prefill", self.mode.prefill), ("--decode", self.mode.decode)):
            for name in names:
                command += [option, self.engines[name].url]
        return self._fleet.start("router", command, env=self._env)

    def num_handed_over(self) -> dict[str, float]:
        """Bytes that D has read from P, by "p0>d0"; 0 while D does not answer."""
        handed: dict[str, float] = {}
        for decode in self.mode.decode:
            try:
                samples = self.engines[decode].samples()
            except httpx.HTTPError:
                samples = {}
            for prefill in self.mode.prefill:
                handed[f"{prefill}>{decode}"] = samples.get(("kv_peer_bytes_total", prefill), 0.0)
        return handed

    def not_at_rest(self) -> list[str]:
        """What is still held, by engine; empty when all pools are whole."""
        return [held for engine in self.engines.values() for held in engine.not_at_rest()]

    def num_files(self) -> int:
        """Temporary files and shared memory of all that runs here; 0 where engines leave some anyway."""
        if self._server.leaves_files:
            return 0
        folders = (self.files, SHARED_MEMORY)
        return sum(len(files) for folder in folders for _, _, files in os.walk(folder))

    def ended(self) -> list[str]:
        """Processes that have ended and should not have."""
        engines = [name for name, engine in self.engines.items() if engine.child.has_ended()]
        return [*engines, *(["router"] if self.router.has_ended() else [])]


def orphans(run: str) -> list[psutil.Process]:
    """Processes of this run that are nobody's children any more."""
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
    """The engine that answers are compared with: alone, without a connector. Yields its URL."""
    server = SERVERS[kind]
    command = [*server.command(model, NUM_BLOCKS), "--host", host, "--port", str(SINGLE_PORT)]
    url = f"http://{host}:{SINGLE_PORT}"
    with Fleet(folder) as fleet:
        child = fleet.start(f"single-{kind}", command, env=server.environment)
        fleet.wait_ready({child: f"{url}/health"}, timeout_s=server.start_s)
        yield url
