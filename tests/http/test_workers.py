"""Worker processes: results, deadlines, memory, and their end."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from baton.core.errors import UserError
from baton.http.workers import Job, WorkerFailed, WorkerOutOfMemory, WorkerPool, WorkerTimeout

WAIT_S = 60.0  # Far more than anything here takes.

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


def answer(pool: WorkerPool, job: Job, *arguments: object) -> object:
    async def ask() -> object:
        return await pool.run(job, *arguments)

    return asyncio.run(ask())


def test_a_worker_answers_and_stays(pool: WorkerPool) -> None:
    pids = {answer(pool, Job("os:getpid", 5.0)) for _ in range(3)}
    assert len(pids) == 1
    assert os.getpid() not in pids


def test_a_users_fault_keeps_its_field(pool: WorkerPool) -> None:
    with pytest.raises(UserError, match="not valid JSON"):
        answer(pool, Job("baton.http.json_body:compact", 5.0), b"{" * 3)


def test_a_job_inside_c_code_ends_at_its_deadline_and_is_replaced(pool: WorkerPool) -> None:
    before = answer(pool, Job("os:getpid", 5.0))
    with pytest.raises(WorkerTimeout, match=r"0\.2 s"):
        answer(pool, Job("builtins:eval", 0.2), "9**(9**9)")
    assert answer(pool, Job("os:getpid", 5.0)) != before


def test_memory_is_bounded(pool: WorkerPool) -> None:
    with pytest.raises(WorkerOutOfMemory):
        answer(pool, Job("builtins:eval", 5.0), "len('a' * 10**10)")


def test_a_failed_job_reports_its_error(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailed, match="ZeroDivisionError"):
        answer(pool, Job("builtins:eval", 5.0), "1/0")


def test_a_worker_that_ends_is_noticed_and_replaced(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailed, match="status 3"):
        answer(pool, Job("os:_exit", 5.0), 3)
    assert answer(pool, Job("builtins:eval", 5.0), "1+1") == 2


def test_a_caller_that_is_cancelled_frees_its_place() -> None:
    pool = WorkerPool(1)

    async def story() -> object:
        await pool.run(Job("os:getpid", 5.0))
        busy = asyncio.create_task(pool.run(Job("builtins:eval", 60.0), "9**(9**9)"))
        await asyncio.sleep(0)
        busy.cancel()
        return await pool.run(Job("builtins:eval", 5.0), "1+1")

    try:
        assert asyncio.run(story()) == 2
    finally:
        pool.close()
    assert not pool._busy
    assert not pool._idle


PARENT = """
import asyncio, sys
from baton.http.workers import Job, WorkerPool
async def main():
    pool = WorkerPool(1)
    print(await pool.run(Job("os:getpid", 5.0)), flush=True)
    asyncio.ensure_future(pool.run(Job("builtins:eval", 60.0), "9**(9**9)"))
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_a_busy_worker_ends_with_its_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env={"PYTHONPATH": os.pathsep.join(sys.path)}
    ) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
        worker.wait(WAIT_S)


def test_close_ends_busy_workers() -> None:
    pool = WorkerPool(1)

    async def story() -> None:
        busy = asyncio.create_task(pool.run(Job("builtins:eval", 60.0), "9**(9**9)"))
        while not pool._busy:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        (worker,) = pool._busy
        pool.close()
        with pytest.raises(WorkerFailed):
            await busy
        assert worker.process.poll() is not None

    asyncio.run(story())
