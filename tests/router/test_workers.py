"""A router of several processes on one port: real processes, as `baton route --workers` starts them."""

import asyncio
import json
import os
import select
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from baton.router.fleet.notes import Joined
from baton.router.processes.messages import Drain, Listening, Welcome, decode_from_worker
from baton.router.processes.run import EXIT_NOT_STARTED, num_workers_for
from baton.router.processes.worker import Worker
from baton.router.shell.frames import FrameStream
from baton.router.shell.metrics import sum_families
from baton.router.values.members import Member
from baton.router.values.settings import RouterSettings
from tests.router.fakes import FakeEngine, Servers, answers, dead_url, lends
from tests.router.test_drain import ASKED, EVENT, streams

pytestmark = [pytest.mark.processes, pytest.mark.slow]
FORKS = pytest.mark.usefixtures("forked_programs")  # The fixture stays until the end of the module.

WAIT_S = 60.0  # The longest that anything here may take on a busy machine.


class Workers:
    def __init__(self, url: str, process: asyncio.subprocess.Process) -> None:
        self.url = url
        self.process = process

    @property
    def pids(self) -> set[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return {int(pid) for pid in children.read_text().split()}

    def client(self) -> httpx.AsyncClient:
        """Each request on a connection of its own: any worker may get it."""
        limits = httpx.Limits(max_keepalive_connections=0)
        return httpx.AsyncClient(
            base_url=self.url, timeout=WAIT_S, verify=False, trust_env=False, limits=limits
        )

    async def status_of(self, path: str) -> int:
        """Status of the answer. 0: the connection failed."""
        async with self.client() as client:
            try:
                return (await client.get(path)).status_code
            except httpx.TransportError:
                return 0

    async def count(self) -> float:
        """Completions that all workers together have answered with 200."""
        async with self.client() as client:
            lines = (await client.get("/metrics")).text.splitlines()
        found = [line for line in lines if line.startswith('baton:router_requests_total{status="200"}')]
        return sum(float(line.rpartition(" ")[2]) for line in found)


def command_for(url: str, prefill: str, decode: str) -> list[str]:
    command = [sys.executable, "-m", "baton.cli", "route", "--port", url.rpartition(":")[2], "--workers", "2"]
    return [*command, "--prefill", prefill, "--decode", decode]


@asynccontextmanager
async def two_workers(
    servers: Servers, prefill: FakeEngine, decode: FakeEngine, *options: str
) -> AsyncIterator[Workers]:
    """Run a router with two workers. `{prefill}` in an option stands for the prefill engine's URL."""
    url = dead_url()
    prefill.url, decode.url = await servers.start(prefill), await servers.start(decode)
    command = command_for(url, prefill.url, decode.url)
    command += [option.format(prefill=prefill.url) for option in options]
    async with running(url, command) as workers:
        try:
            yield workers
        finally:
            await servers.stop()


@asynccontextmanager
async def running(url: str, command: list[str]) -> AsyncIterator[Workers]:
    process = await asyncio.create_subprocess_exec(*command)
    workers = Workers(url, process)
    try:
        async with asyncio.timeout(WAIT_S):
            while await workers.status_of("/health") != 200:
                assert process.returncode is None
        yield workers
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def until_gone(pids: set[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                ended, _, _ = await asyncio.to_thread(select.select, [descriptor], [], [], WAIT_S)
            finally:
                os.close(descriptor)
            assert ended


async def test_workers_share_a_port_a_fleet_and_the_metrics_and_are_replaced() -> None:
    servers, decode, new = Servers(), FakeEngine(answers), FakeEngine(answers)
    async with two_workers(servers, FakeEngine(lends), decode) as router, router.client() as client:
        first = router.pids
        assert len(first) == 2
        for _ in range(20):
            assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        assert await router.count() == 20
        recent = (await client.get("/requests")).json()["requests"]  # Both workers' requests, latest first.
        arrivals = [one["arrived_at_s"] for one in recent]
        assert (len(recent), arrivals) == (20, sorted(arrivals, reverse=True))
        one = (await client.get(f"/requests/{recent[7]['id']}")).json()
        assert one["request"] == recent[7]

        new.url = await servers.start(new)
        order = {"type": "decode", "instance": new.url}
        assert (await client.post("/instances/add", json=order)).status_code == 200
        order["instance"] = decode.url
        assert (await client.post("/instances/remove", json=order)).status_code == 200
        num_before = len(decode.calls)
        for _ in range(20):
            assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        assert (len(decode.calls), len(new.calls)) == (num_before, 20)

        assert await router.count() == 40
        os.kill(min(first), signal.SIGKILL)
        async with asyncio.timeout(WAIT_S):
            while len(router.pids - first) != 1:
                await router.status_of("/health")
            while await router.count() != 40:  # Counts that were shown stay.
                pass
            second = router.pids
            os.kill(min(second & first), signal.SIGKILL)  # A new worker knows the added engine.
            while len(router.pids - first) != 2 or await router.status_of("/health") != 200:
                pass
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        assert len(new.calls) == 21

        order["instance"] = new.url  # A worker's refusal is an event of the whole router.
        assert (await client.post("/instances/remove", json=order)).status_code == 200
        kinds: set[str] = set()
        async with asyncio.timeout(WAIT_S):
            while "refusal" not in kinds:  # A worker that has just begun may not know of the order yet.
                answer = await client.post("/v1/completions", json={"prompt": "a"})
                assert answer.status_code in (200, 503)
                events = (await client.get("/fleet/events")).json()["events"]
                kinds = {event["kind"] for event in events}
            assert {"added", "removed"} <= kinds
            async with client.stream("GET", "/fleet/stream") as stream:
                lines = stream.aiter_lines()
                assert [await anext(lines) for _ in range(3)] == ["retry: 2000", "", "event: snapshot"]
                snapshot = json.loads((await anext(lines)).removeprefix("data: "))
            assert [engine["type"] for engine in snapshot["engines"]] == ["prefill"]
        left = router.pids
        router.process.kill()
        await until_gone(left)


async def test_a_signal_while_the_workers_start_ends_none_of_them() -> None:
    url, signalled = dead_url(), set[int]()
    process = await asyncio.create_subprocess_exec(*command_for(url, "http://p:1", "http://d:1"))
    router = Workers(url, process)
    try:
        async with asyncio.timeout(WAIT_S):
            while len(signalled) < 2:
                await asyncio.sleep(0)
                for pid in router.pids - signalled:  # Each worker gets signals as soon as it exists.
                    os.kill(pid, signal.SIGTERM)
                    os.kill(pid, signal.SIGINT)
                    signalled.add(pid)
            while await router.status_of("/version") != 200:
                assert process.returncode is None
        assert router.pids == signalled
        process.terminate()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@FORKS
async def test_workers_follow_a_file_that_is_read_again_at_sighup(tmp_path: Path) -> None:
    servers, url, path = Servers(), dead_url(), tmp_path / "route.toml"
    prefill, old, new = [await servers.start(FakeEngine(one)) for one in (lends, answers, answers)]

    def write(*decode: str) -> None:
        path.write_text(f"[route]\nprefill = {json.dumps([prefill])}\ndecode = {json.dumps(decode)}\n")

    write(old)
    port = url.rpartition(":")[2]
    command = [sys.executable, "-m", "baton.cli", "route", "--config", str(path), "--port", port]
    async with running(url, [*command, "--workers", "2"]) as router, router.client() as client:
        first = router.pids

        async def states() -> dict[str, str]:
            return {one["url"]: one["state"] for one in (await client.get("/status")).json()["engines"]}

        path.write_text("[route]\ndecode = 1\n")
        for pid in (*first, router.process.pid):  # A terminal signals the whole group, too.
            os.kill(pid, signal.SIGHUP)
        write(old, new)
        os.kill(router.process.pid, signal.SIGHUP)
        async with asyncio.timeout(WAIT_S):
            while (await states()).get(new) != "up":
                pass
        for _ in range(20):
            assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        write(new)
        async with asyncio.timeout(WAIT_S):
            while old in await states():
                pass
        for _ in range(20):
            assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        assert router.pids == first
    await servers.stop()


async def test_what_a_worker_is_told_while_it_starts_is_not_lost() -> None:
    """The notes come with the worker's welcome, before the worker has made its router."""
    prefill, decode, joins = "http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3"
    settings = RouterSettings(prefill_urls=(prefill,), decode_urls=(decode,))
    ours, theirs = socket.socketpair()
    listens = asyncio.Event()
    stream = FrameStream(
        decode_from_worker, lambda frame: listens.set() if isinstance(frame, Listening) else None
    )
    await asyncio.get_running_loop().create_unix_connection(lambda: stream, sock=ours)
    log_config = {"version": 1, "disable_existing_loggers": False}
    stream.send(Welcome(settings, "127.0.0.1", 0, True, log_config, []))
    stream.send(Joined(Member("decode", joins)))
    worker = Worker()
    running = asyncio.create_task(worker.run(theirs))
    await listens.wait()
    assert worker._router is not None
    assert worker._router.fleet.find(("decode", joins)) is not None
    stream.send(Drain(0.0))
    assert await running == 0
    stream.close()


@FORKS
async def test_a_router_that_is_terminated_lets_its_streams_end_and_exits_with_0() -> None:
    gate, servers = asyncio.Event(), Servers()
    async with two_workers(servers, FakeEngine(lends), streams(gate)) as router, router.client() as client:
        pids = router.pids
        async with client.stream("POST", "/v1/completions", json=ASKED) as answer:
            pieces = answer.aiter_bytes()
            text = await anext(pieces)
            assert "baton:router_in_flight 1.0" in (await client.get("/metrics")).text
            [running] = (await client.get("/requests")).json()["requests"]
            assert (running["status"], running["ended_s"] > 0) == (None, True)
            for pid in (*pids, router.process.pid):  # A terminal's Ctrl-C reaches the whole group, too.
                os.kill(pid, signal.SIGTERM)
            async with asyncio.timeout(WAIT_S):
                while await router.status_of("/health") == 200:
                    pass
            gate.set()
            text += b"".join([piece async for piece in pieces])
        assert text == 2 * EVENT + b"data: [DONE]\n\n"
        assert await router.process.wait() == 0
        await until_gone(pids)


@FORKS
async def test_a_port_that_another_router_has_is_refused() -> None:
    servers = Servers()
    async with two_workers(servers, FakeEngine(lends), FakeEngine(answers)) as router:
        second = await asyncio.create_subprocess_exec(*command_for(router.url, "http://p:1", "http://d:1"))
        assert await second.wait() == EXIT_NOT_STARTED
        assert await router.status_of("/health") == 200


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "num_cores", "expected"), [(1, 1, 8, 1), (2, 3, 8, 2), (16, 16, 4, 4)]
)
def test_a_worker_for_each_four_engines_on_a_core_each(
    num_prefill: int, num_decode: int, num_cores: int, expected: int
) -> None:
    settings = RouterSettings(
        prefill_urls=tuple(f"http://p:{n + 1}" for n in range(num_prefill)),
        decode_urls=tuple(f"http://d:{n + 1}" for n in range(num_decode)),
    )
    assert num_workers_for(settings, num_cores) == expected


@pytest.mark.parametrize(("num_decode", "num_cores", "expected"), [(0, 8, 4), (0, 2, 2), (32, 16, 8)])
def test_engines_that_may_join_have_four_workers(num_decode: int, num_cores: int, expected: int) -> None:
    urls = tuple(f"http://d:{n + 1}" for n in range(num_decode))
    settings = RouterSettings(prefill_urls=(), decode_urls=urls, has_sources=True)
    assert num_workers_for(settings, num_cores) == expected


def test_samples_of_processes_are_added_by_name_and_labels() -> None:
    one = {"m": [("m_total", {"a": "x"}, 1.0), ("m_created", {"a": "x"}, 20.0)]}
    two = {"m": [("m_total", {"a": "x"}, 2.0), ("m_created", {"a": "x"}, 10.0), ("m_total", {"a": "y"}, 5.0)]}
    assert sum_families([one, two, {}]) == {
        "m": [("m_total", {"a": "x"}, 3.0), ("m_created", {"a": "x"}, 10.0), ("m_total", {"a": "y"}, 5.0)]
    }
