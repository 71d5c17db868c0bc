"""Event loop of one coroutine test, with a deadline and a clock that the test can advance."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

TEST_DEADLINE_S = 180.0  # Reached only if something hangs.


class _Clockwork(asyncio.SelectorEventLoop):
    """Loop whose time is real time plus what `pass_time` skipped."""

    skipped_s = 0.0
    deadline: asyncio.Timeout | None = None  # The end of the test; `pass_time` does not bring it nearer.

    def time(self) -> float:
        return super().time() + self.skipped_s


def pass_time(seconds: float) -> None:
    """Make all waits that are under way `seconds` older; later waits are not affected."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _Clockwork)
    assert loop.deadline is not None
    loop.skipped_s += seconds
    ends_at = loop.deadline.when()
    assert ends_at is not None
    loop.deadline.reschedule(ends_at + seconds)


async def until(is_so: Callable[[], bool]) -> None:
    """Let others run until the condition holds, where no event tells it."""
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def run(test: Coroutine[Any, Any, None]) -> None:
    loop = _Clockwork()

    async def bounded() -> None:
        async with asyncio.timeout(TEST_DEADLINE_S) as loop.deadline:
            await test

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(bounded())
