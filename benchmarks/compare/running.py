"""Systems while they run: started, paused while another is measured, killed on purpose, stopped.

    starting --> running <--> paused        one system runs at a time, the others are stopped (SIGSTOP)
                    |
                  killed --> starting        for the faults

A paused system costs nothing. That matters: with NIXL's connector an idle engine keeps a core busy, and
nobody else's figures should pay for it.
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
from benchmarks.compare.systems import (
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

START_TIMEOUT_S = 600.0  # Against hanging; a vLLM takes half a minute where it is alone.
FRONT_TIMEOUT_S = 60.0
KILL_TIMEOUT_S = 10.0
SPARE_GIB = 1.0  # Left for everything else on the machine.


class CannotRun(BatonError):
    """A system needs what this machine, or its set-up, does not have. Says what, and how to get it."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What all systems of a session have in common."""

    model: Path
    kv_bytes_per_token: int
    vllm_python: Path | None
    proxies: Path | None
    peers: Path
    has_nixl: bool

    def check(self, system: System) -> None:
        """Raises CannotRun."""
        if system.kind == "vllm" and self.vllm_python is None:
            raise CannotRun("no vLLM: make it with scripts/setup-vllm, or give --vllm-python")
        if system.needs_nixl and not self.has_nixl:
            raise CannotRun("NIXL is not installed in vLLM's environment")
        if system.front in ("toy proxy", "push demo") and self.proxies is None:
            raise CannotRun("vLLM's example proxies are not here: scripts/setup-peers fetches them")

    @property
    def num_blocks(self) -> int:
        """Of the embedded engine: as much cache as vLLM gets."""
        return (KV_CACHE_GIB << 30) // (BLOCK_TOKENS * self.kv_bytes_per_token)


class RunningSystem:
    """`url` is where clients go; `engine_url` goes around the front."""

    def __init__(self, system: System, ground: Ground, fleet: Fleet) -> None:
        ground.check(system)
        self.system = system
        self._ground = ground
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

    # --- Life --------------------------------------------------------------------------------------------

    def start_engine(self, role: Role) -> Child:
        """Returns at once; `wait_engine` waits for it."""
        system, ground = self.system, self._ground
        assert ground.vllm_python is not None or system.kind == "baton"
        self._num_starts += 1
        child = self._fleet.start(
            f"{system.name} {role} {self._num_starts}".replace(" ", "-"),
            engine_command(
                system,
                role,
                self._ports[role],
                model=ground.model,
                vllm_python=ground.vllm_python or Path(),
                num_blocks=ground.num_blocks,
            ),
            env={**self._env, **engine_environment(system, role, self._ports[role])},
        )
        self._engines[role] = child
        return child

    def wait_engine(self, role: Role, *, since_s: float, timeout_s: float = START_TIMEOUT_S) -> float:
        """Seconds from `since_s` (monotonic) until it is ready. Raises ChildDied or StartTimeout."""
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
            model=self._ground.model,
            proxies=self._ground.proxies,
        )
        paths = [str(self._ground.proxies / "site")] if self._ground.proxies else []
        self._front = self._fleet.start(
            f"{self.system.name} front {self._num_starts}".replace(" ", "-"),
            command,
            env={"PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])},
        )
        self._fleet.wait_ready({self._front: f"{self.url}/{HEALTH_PATHS[front]}"}, timeout_s=FRONT_TIMEOUT_S)

    def kill(self, role: Role) -> None:
        """SIGKILL to all of an engine's processes at once; returns when they are gone."""
        child = self._engines.pop(role)
        os.killpg(child.pid, signal.SIGKILL)
        if not _wait_ended(child, time.monotonic() + KILL_TIMEOUT_S):
            raise CannotRun(f"{child.name} is not gone {KILL_TIMEOUT_S:.0f} s after SIGKILL")
        self._fleet.forget(child)

    def stop(self) -> None:
        """All of it; ended on purpose, so the fleet forgets it."""
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

    # --- Taking turns ------------------------------------------------------------------------------------

    def pause(self) -> None:
        if not self._is_paused:
            self._signal(signal.SIGSTOP)
            self._is_paused = True

    def resume(self) -> None:
        if self._is_paused:
            self._signal(signal.SIGCONT)
            self._is_paused = False

    def cpu_s(self) -> float:
        """Processor seconds of all its processes so far."""
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
    """Whether there is memory for all of them at the same time."""
    return _needed_gib(systems) <= _free_gib()


def _needed_gib(systems: Iterable[System]) -> float:
    return sum(system.needs_gib for system in systems) + SPARE_GIB


def _free_gib() -> float:
    return float(psutil.virtual_memory().available / (1 << 30))


@contextmanager
def running(systems: Iterable[System], ground: Ground, fleet: Fleet) -> Iterator[list[RunningSystem]]:
    """All of them, ready and paused. Raises CannotRun, ChildDied or StartTimeout."""
    systems = list(systems)
    if not fits(systems):
        raise CannotRun(
            f"needs about {_needed_gib(systems):.0f} GiB of memory, {_free_gib():.0f} GiB are free"
        )
    started: list[RunningSystem] = []
    try:
        for system in systems:
            one = RunningSystem(system, ground, fleet)
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
def turn_of(system: RunningSystem) -> Iterator[RunningSystem]:
    system.resume()
    try:
        yield system
    finally:
        system.pause()


def _wait_ended(child: Child, deadline_s: float) -> bool:
    """A child is readable once it has ended."""
    return child.has_ended() or bool(
        select.select([child], [], [], max(0.0, deadline_s - time.monotonic()))[0]
    )


def _cpu_s(pid: int) -> float:
    """Of the process and its descendants; those that have ended count with their parent."""
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = member.cpu_times()
                total += times.user + times.system
    return total


def _memory_bytes(pid: int) -> int:
    """Proportional set size: pages that processes share are counted once."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += member.memory_full_info().pss
    return total
