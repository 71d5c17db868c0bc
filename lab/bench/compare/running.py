"""Running systems: started, paused while another is measured, killed on purpose, stopped.

    starting --> running <--> paused        one system runs at a time, the others are stopped (SIGSTOP)
                    |
                  killed --> starting        for the faults

A paused system uses no CPU. This matters because an idle engine with NIXL's connector keeps a core busy,
which would affect the figures of the others.
"""

import os
import secrets
import select
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from baton.cli.processes import Child, Fleet, free_ports
from baton.core.errors import BatonError
from lab.bench.compare.systems import (
    BLOCK_TOKENS,
    HEALTH_PATHS,
    KV_CACHE_GIB,
    Ports,
    Role,
    System,
    engine_command,
    engine_environment,
    front_command,
)

START_TIMEOUT_S = 600.0  # A vLLM takes half a minute on an idle machine.
FRONT_TIMEOUT_S = 60.0
KILL_TIMEOUT_S = 10.0
SPARE_GIB = 1.0  # Left for other programs.


class CannotRun(BatonError):
    """A system needs something that this machine lacks. The message names it, and how to get it."""


@dataclass(frozen=True, slots=True)
class SessionSetup:
    """Facts common to all systems of a session."""

    model: Path
    kv_bytes_per_token: int
    vllm_python: Path | None
    proxies: Path | None
    peers: Path
    has_nixl: bool

    def check(self, system: System) -> None:
        """Raise CannotRun if the system cannot run here."""
        if system.kind == "vllm" and self.vllm_python is None:
            raise CannotRun("vLLM is not installed; run scripts/setup-vllm, or give --vllm-python")
        if system.needs_nixl and not self.has_nixl:
            raise CannotRun("NIXL is not installed in vLLM's environment")
        if system.front in ("toy proxy", "push demo") and self.proxies is None:
            raise CannotRun("vLLM's example proxies are missing; fetch them with scripts/setup-peers")

    @property
    def num_blocks(self) -> int:
        """Blocks of the embedded engine, for as much cache as vLLM has."""
        return (KV_CACHE_GIB << 30) // (BLOCK_TOKENS * self.kv_bytes_per_token)


class RunningSystem:
    """A system's processes. `url` is for clients; `engine_url` bypasses the proxy."""

    def __init__(self, system: System, setup: SessionSetup, fleet: Fleet) -> None:
        setup.check(system)
        self.system = system
        self._setup = setup
        self._fleet = fleet
        ports = iter(free_ports(2 * len(system.roles) + 1))
        self._ports = {role: Ports(next(ports), next(ports)) for role in system.roles}
        self._front_port = next(ports)
        self._engines: dict[Role, Child] = {}
        self._front: Child | None = None
        self._env = {"BATON_SECRET": secrets.token_hex(32)}
        self._is_paused = False
        self._num_starts = 0
        self.ready_after_s: dict[Role, float] = {}

    @property
    def url(self) -> str:
        if self.system.front is None:
            return self._ports["single"].url
        return f"http://127.0.0.1:{self._front_port}"

    def engine_url(self, role: Role) -> str:
        return self._ports[role].url

    # --- Start and stop ----------------------------------------------------------------------------------

    def start_engine(self, role: Role) -> Child:
        """Start an engine without waiting; `wait_engine` waits for it."""
        system, setup = self.system, self._setup
        assert setup.vllm_python is not None or system.kind == "baton"
        self._num_starts += 1
        child = self._fleet.start(
            f"{system.name} {role} {self._num_starts}".replace(" ", "-"),
            engine_command(
                system,
                role,
                self._ports[role],
                model=setup.model,
                vllm_python=setup.vllm_python or Path(),
                num_blocks=setup.num_blocks,
            ),
            env={**self._env, **engine_environment(system, role, self._ports[role])},
        )
        self._engines[role] = child
        return child

    def wait_engine(self, role: Role, *, since_s: float, timeout_s: float = START_TIMEOUT_S) -> float:
        """Return seconds from `since_s` (monotonic) to readiness. Raises ChildDied or StartTimeout."""
        self._fleet.wait_ready({self._engines[role]: f"{self.engine_url(role)}/health"}, timeout_s=timeout_s)
        return time.monotonic() - since_s

    def start_front(self) -> None:
        front = self.system.front
        if front is None:
            return
        prefill, decode = self._ports["prefill"], self._ports["decode"]
        command = front_command(
            self.system,
            self._front_port,
            prefill,
            decode,
            model=self._setup.model,
            proxies=self._setup.proxies,
        )
        paths = [str(self._setup.proxies / "site")] if self._setup.proxies else []
        self._front = self._fleet.start(
            f"{self.system.name} front {self._num_starts}".replace(" ", "-"),
            command,
            env={"PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])},
        )
        self._fleet.wait_ready({self._front: f"{self.url}/{HEALTH_PATHS[front]}"}, timeout_s=FRONT_TIMEOUT_S)

    def kill(self, role: Role) -> None:
        """Send SIGKILL to all of an engine's processes at once, and wait for their end."""
        child = self._engines.pop(role)
        os.killpg(child.pid, signal.SIGKILL)
        if not _wait_ended(child, time.monotonic() + KILL_TIMEOUT_S):
            raise CannotRun(f"{child.name} still runs {KILL_TIMEOUT_S:.0f} s after SIGKILL")
        self._fleet.forget(child)

    def stop(self) -> None:
        """Stop all processes, which the fleet then forgets."""
        self.resume()
        for child in self._children():
            child.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + KILL_TIMEOUT_S
        for child in self._children():
            _wait_ended(child, deadline_s)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            _wait_ended(child, deadline_s + KILL_TIMEOUT_S)
            if child in self._fleet.children:
                self._fleet.forget(child)
        self._engines.clear()
        self._front = None

    # --- Pause and resume --------------------------------------------------------------------------------

    def pause(self) -> None:
        if not self._is_paused:
            self._signal(signal.SIGSTOP)
            self._is_paused = True

    def resume(self) -> None:
        if self._is_paused:
            self._signal(signal.SIGCONT)
            self._is_paused = False

    def cpu_s(self) -> float:
        """Return the processor seconds of all processes so far."""
        return sum(_cpu_s(child.pid) for child in self._children())

    def memory_gib(self) -> float:
        return sum(_memory_bytes(child.pid) for child in self._children()) / (1 << 30)

    def _signal(self, number: signal.Signals) -> None:
        for child in self._children():
            with suppress(ProcessLookupError):
                os.killpg(child.pid, number)

    def _children(self) -> list[Child]:
        return [*self._engines.values(), *([self._front] if self._front is not None else [])]


def fits(systems: Iterable[System]) -> bool:
    """Return whether there is memory for all of them at the same time."""
    return _needed_gib(systems) <= _free_gib()


def _needed_gib(systems: Iterable[System]) -> float:
    return sum(system.needs_gib for system in systems) + SPARE_GIB


def _free_gib() -> float:
    return float(psutil.virtual_memory().available / (1 << 30))


@contextmanager
def running(systems: Iterable[System], setup: SessionSetup, fleet: Fleet) -> Iterator[list[RunningSystem]]:
    """Start all systems; yield them ready and paused. Raises CannotRun, ChildDied or StartTimeout."""
    systems = list(systems)
    if not fits(systems):
        raise CannotRun(
            f"needs about {_needed_gib(systems):.0f} GiB of memory, {_free_gib():.0f} GiB are free"
        )
    started: list[RunningSystem] = []
    try:
        for system in systems:
            one = RunningSystem(system, setup, fleet)
            started.append(one)
            since_s = time.monotonic()
            for role in system.roles:
                one.start_engine(role)
            for role in system.roles:
                one.ready_after_s[role] = one.wait_engine(role, since_s=since_s)
            one.start_front()
            one.pause()
        yield started
    finally:
        for one in started:
            one.stop()


@contextmanager
def resumed(system: RunningSystem) -> Iterator[RunningSystem]:
    system.resume()
    try:
        yield system
    finally:
        system.pause()


def _wait_ended(child: Child, deadline_s: float) -> bool:
    """Wait for the child's end, when its descriptor becomes readable."""
    return child.has_ended() or bool(
        select.select([child], [], [], max(0.0, deadline_s - time.monotonic()))[0]
    )


def _cpu_s(pid: int) -> float:
    """Return CPU seconds of the process and its descendants; ended ones count with their parent."""
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = member.cpu_times()
                total += times.user + times.system
    return total


def _memory_bytes(pid: int) -> int:
    """Return the proportional set size, in which shared pages count once."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += member.memory_full_info().pss
    return total
