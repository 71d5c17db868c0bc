"""Watches over a core and its processes, without a core: which messages and which time count."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import psutil

from baton.engine.process.liveness import (
    ALLOWANCE,
    PINGS_PER_STEP,
    SLICES,
    STALLED_S,
    STOP_LOOK_S,
    HangWatch,
    StopWatch,
    process_tree,
)

STEP_S = 8.0
EPSILON_S = 1e-3


class Clockwork(asyncio.SelectorEventLoop):
    """An event loop whose time advances when it sleeps, or when a test sets it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        select = self._selector.select  # type: ignore[attr-defined]

        def sleep(timeout_s: float | None) -> object:
            self.now_s += timeout_s or 0.0
            return select(0)

        self._selector.select = sleep  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now_s


class Core:
    """Answers pings until it hangs."""

    def __init__(self) -> None:
        self.pings: list[float] = []
        self.hung_at: list[float] = []
        self.hangs = False
        self.watch = HangWatch(self._ping, self._on_hang, STEP_S)

    def _ping(self) -> None:
        self.pings.append(asyncio.get_running_loop().time())
        if not self.hangs:
            asyncio.get_running_loop().call_later(0.1, self.watch.note_message)

    def _on_hang(self) -> None:
        self.hung_at.append(asyncio.get_running_loop().time())


def drive(test: Callable[[Clockwork], Coroutine[Any, Any, None]]) -> None:
    loop = Clockwork()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(test(loop))


def with_core(test: Callable[[Core, Clockwork], Awaitable[None]]) -> Callable[[], None]:
    async def run(loop: Clockwork) -> None:
        core = Core()
        core.watch.start()
        try:
            await test(core, loop)
        finally:
            core.watch.stop()

    return lambda: drive(run)


@with_core
async def test_a_core_that_answers_is_pinged_at_intervals(core: Core, loop: Clockwork) -> None:
    await asyncio.sleep(10 * STEP_S)
    assert core.hung_at == []
    gaps = [later - earlier for earlier, later in zip(core.pings, core.pings[1:], strict=False)]
    assert all(abs(gap - (0.1 + STEP_S / PINGS_PER_STEP)) < EPSILON_S for gap in gaps)


@with_core
async def test_a_hang_is_reported_once_after_the_time_of_a_long_step(core: Core, loop: Clockwork) -> None:
    core.hangs = True
    await asyncio.sleep(0)
    began_s = loop.time()
    await asyncio.sleep(10 * STEP_S)
    [hung_at] = core.hung_at
    assert abs(hung_at - began_s - ALLOWANCE * STEP_S) < EPSILON_S
    assert len(core.pings) == 1


@with_core
async def test_every_message_of_the_core_shows_that_it_runs(core: Core, loop: Clockwork) -> None:
    core.hangs = True
    for _ in range(20):
        await asyncio.sleep(STEP_S)
        core.watch.note_message()  # Any message counts, for example an output of a step.
    assert core.hung_at == []


@with_core
async def test_time_in_which_the_watcher_was_stopped_does_not_count(core: Core, loop: Clockwork) -> None:
    core.hangs = True
    await asyncio.sleep(STEP_S / 2)
    loop.now_s += 1000 * STEP_S  # Both are stopped, and continue.
    await asyncio.sleep(STEP_S / SLICES)
    assert core.hung_at == []
    core.watch.note_message()
    await asyncio.sleep(STEP_S / SLICES)
    assert core.hung_at == []


@with_core
async def test_a_stopped_watch_sends_no_ping(core: Core, loop: Clockwork) -> None:
    core.watch.stop()
    core.watch.stop()
    await asyncio.sleep(10 * STEP_S)
    assert core.pings == []


class Process:
    """What `psutil` reports of a process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.state: str | None = psutil.STATUS_SLEEPING  # None: it has ended.

    def name(self) -> str:
        return "baton-rank-0"

    def status(self) -> str:
        if self.state is None:
            raise psutil.NoSuchProcess(self.pid)
        return self.state


def with_watch(test: Callable[[StopWatch, list[Process], list[str]], Awaitable[None]]) -> Callable[[], None]:
    async def run(loop: Clockwork) -> None:
        processes, stalls = [Process(1), Process(2)], list[str]()
        watch = StopWatch(stalls.append)
        watch.start(processes)  # type: ignore[arg-type]
        try:
            await test(watch, processes, stalls)
        finally:
            watch.stop()

    return lambda: drive(run)


@with_watch
async def test_a_stopped_process_is_named_at_once_and_is_a_stall_later(
    watch: StopWatch, processes: list[Process], stalls: list[str]
) -> None:
    processes[0].state, processes[1].state = None, psutil.STATUS_STOPPED
    await asyncio.sleep(1.5 * STOP_LOOK_S)
    assert "process 2 (baton-rank-0) of the engine is stopped" in (watch.stopped or "")
    assert stalls == []
    await asyncio.sleep(2 * STALLED_S)
    assert stalls == [watch.stopped]
    processes[1].state = psutil.STATUS_RUNNING
    await asyncio.sleep(STOP_LOOK_S)
    assert watch.stopped is None
    processes[1].state = psutil.STATUS_TRACING_STOP
    await asyncio.sleep(STALLED_S + STOP_LOOK_S)
    assert len(stalls) == 2


@with_watch
async def test_short_stops_and_stops_of_the_watcher_are_no_stall(
    watch: StopWatch, processes: list[Process], stalls: list[str]
) -> None:
    for _ in range(3):
        processes[0].state = psutil.STATUS_STOPPED
        asyncio.get_running_loop().now_s += 100 * STALLED_S  # type: ignore[attr-defined]
        await asyncio.sleep(STALLED_S / 2)
        processes[0].state = psutil.STATUS_SLEEPING
        await asyncio.sleep(2 * STOP_LOOK_S)
    assert stalls == []


def test_a_process_that_has_ended_has_no_tree() -> None:
    assert process_tree(2**22 + 1) == []
