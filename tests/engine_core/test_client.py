"""The engine in its own processes: outputs at the front end, and the state after a process has died."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from engine_core_fakes import FACTORY

from baton.cli.processes import free_ports, is_port_free
from baton.core.config import EngineConfig, KVTransferConfig, ParallelConfig
from baton.core.errors import ConfigError, UserError
from baton.engine.api import EngineOutput, EngineRequest, SamplingParams, SchedulerStats
from baton.engine.core.client import EngineClient, EngineDeadError, EngineUnreadyError
from baton.engine.llm import LLM
from baton.engine.process import liveness
from baton.engine.runner.malloc_tuning import compute_environment
from tests import fork_server

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.usefixtures("forked_programs")]

BOUND_S = 60.0  # Bound for events without a trigger; long, because the machine may be busy.
PROMPT = list(range(20, 40))
TP2 = ParallelConfig(tensor_parallel_size=2, executor="multiprocess")


def request(request_id: str = "a", *, max_tokens: int = 6, prompt: list[int] = PROMPT) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        arrival_time_s=0.0,
    )


def transfer(**told: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector="Fake", kv_role="kv_both", kv_connector_extra_config=told)


@asynccontextmanager
async def engine(config: EngineConfig, factory: str | None = None) -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(config, connector_factory=factory)
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture(autouse=True)
def every_process_has_ended() -> Iterator[None]:
    others = set(psutil.Process().children(recursive=True))  # Python's resource tracker of earlier tests.
    yield
    left = set(psutil.Process().children(recursive=True)) - others
    assert not left, "every process that was started has ended"


async def collect(client: EngineClient, asked: EngineRequest) -> list[EngineOutput]:
    return [output async for output in client.generate(asked)]


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


@pytest.fixture(scope="module")
def reference(make_config) -> list[int]:
    with LLM(make_config()) as llm:
        return llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))[
            0
        ].token_ids


async def test_a_session_with_one_engine(make_config, reference: list[int]) -> None:
    stats: list[SchedulerStats] = []
    told = asyncio.Event()

    def note(step: SchedulerStats) -> None:
        stats.append(step)
        told.set()

    async def has_told(is_so: Callable[[], bool]) -> None:
        """Wait, because a step's counts may arrive after its last token."""
        while not is_so():
            told.clear()
            await told.wait()

    async with engine(make_config()) as client:
        client.on_stats = note

        several = await asyncio.gather(*(collect(client, request(str(number))) for number in range(5)))
        assert [tokens_of(outputs) for outputs in several] == [reference] * 5
        assert all(len(outputs) == 6 for outputs in several), "each token arrives in its own output"
        assert [outputs[-1].finish_reason for outputs in several] == ["length"] * 5
        await has_told(lambda: sum(step.num_generation_tokens for step in stats) >= 30)
        assert sum(step.num_generation_tokens for step in stats) == 30

        [refused] = await collect(client, request(prompt=[10**7]))
        assert refused.finish_reason == "error"
        assert refused.error is not None
        assert refused.error.is_users

        for unsendable in (request("half a pair \ud800"), request(prompt=[2**70])):
            with pytest.raises(UserError, match="cannot be sent"):
                await collect(client, unsendable)

        # Closing early aborts. The id stays in use until the engine has ended the request.
        stream = client.generate(request("early", max_tokens=200))
        await anext(stream)
        with pytest.raises(UserError, match="in use"):
            await anext(client.generate(request("early")))
        await stream.aclose()

        aborted = client.generate(request("aborted", max_tokens=200))
        await anext(aborted)
        await client.abort("aborted")
        assert [output.finish_reason async for output in aborted][-1] == "abort"

        assert tokens_of(await collect(client, request("last"))) == reference
        await has_told(lambda: stats[-1].num_running == 0)
        assert not client.is_dead
    assert client.is_dead
    with pytest.raises(EngineDeadError, match="closed"):
        await collect(client, request())
    await client.close()


async def test_killing_the_core_fails_what_was_open_and_what_comes_later(make_config) -> None:
    async with engine(make_config()) as client:
        streams = [client.generate(request(str(number), max_tokens=200)) for number in range(3)]
        for stream in streams:
            await anext(stream)
        psutil.Process(client.pid).kill()
        async with asyncio.timeout(BOUND_S):
            for stream in streams:
                with pytest.raises(EngineDeadError, match="SIGKILL"):
                    async for _ in stream:
                        pass
            await client.wait_dead()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await collect(client, request())


async def test_a_core_that_cannot_start_reports_the_reason(
    make_config, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="no such wire"):
        await EngineClient.start(
            make_config(kv_transfer_config=transfer(refuse="no such wire"), parallel_config=TP2),
            connector_factory=FACTORY,
        )
    assert "Traceback" not in capfd.readouterr().err, "no process prints a traceback for a wrong setting"
    with pytest.raises(EngineDeadError, match="not ready within"):
        await EngineClient.start(make_config(), start_timeout_s=0.0)


async def test_two_ranks_give_the_tokens_of_one(
    make_config, reference: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "_fork_exec", fork_server.start_interpreter)  # Nothing is imported yet.
    config = make_config(parallel_config=TP2, kv_transfer_config=transfer())
    async with engine(config, FACTORY) as client:
        assert tokens_of(await collect(client, request())) == reference
        maps = [mapped.path for mapped in psutil.Process(client.pid).memory_maps()]
        assert not [path for path in maps if "torch" in path], "only ranks import torch"

        # One rank dies while the engine is idle.
        ranks = psutil.Process(client.pid).children()
        assert len(ranks) == 2
        limits = compute_environment()
        assert all(limits.items() <= rank.environ().items() for rank in ranks), "inherited from the core"
        ranks[1].kill()
        async with asyncio.timeout(BOUND_S):
            await client.wait_dead()
        with pytest.raises(EngineDeadError, match="rank"):
            await collect(client, request())


async def test_open_requests_do_not_wait_for_a_core_that_ends_slowly(make_config) -> None:
    told = transfer(kill_rank=1, kill_on_step=3, hangs_in_shutdown=True)
    async with engine(make_config(parallel_config=TP2, kv_transfer_config=told), FACTORY) as client:
        async with asyncio.timeout(BOUND_S):
            with pytest.raises(EngineDeadError, match="rank 1 is gone"):
                await collect(client, request(max_tokens=50))
        core = psutil.Process(client.pid)
        assert core.is_running()
        core.kill()


async def test_a_core_that_hangs_in_a_step_is_ended_and_its_requests_fail(make_config) -> None:
    config = make_config(kv_transfer_config=transfer(hang_on_step=3), step_timeout_s=1.0)
    async with engine(config, FACTORY) as client:
        async with asyncio.timeout(BOUND_S):
            with pytest.raises(EngineDeadError, match=r"hangs: no step has ended for 1 s"):
                await collect(client, request(max_tokens=50))
            await client.wait_dead()
        with pytest.raises(EngineDeadError, match="hangs"):
            await collect(client, request())


async def test_a_rank_that_hangs_is_named_by_the_core(make_config) -> None:
    told = transfer(hang_on_step=3)
    config = make_config(parallel_config=TP2, kv_transfer_config=told, step_timeout_s=5.0)
    async with engine(config, FACTORY) as client:
        async with asyncio.timeout(BOUND_S):
            with pytest.raises(EngineDeadError, match=r"ranks \[0, 1\] did not answer within 5 s"):
                await collect(client, request(max_tokens=50))


async def test_a_stopped_engine_fails_requests_serves_when_it_continues_and_ends_at_sigterm(
    make_config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "STOP_LOOK_S", 0.05)
    monkeypatch.setattr(liveness, "STALLED_S", 0.2)

    async def is_so(condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(liveness.STOP_LOOK_S)

    async with engine(make_config(parallel_config=ParallelConfig(executor="multiprocess"))) as client:
        core = psutil.Process(client.pid)
        (rank,) = (process for process in core.children() if process.name() != fork_server.NAME)
        for stopped in (core, rank):
            assert client.unready_reason is None
            stopped.suspend()
            with pytest.raises(EngineUnreadyError, match=f"process {stopped.pid} .* is stopped"):
                await collect(client, request("waits"))
            assert client.unready_reason is not None
            with pytest.raises(EngineUnreadyError):
                await collect(client, request("comes later"))
            stopped.resume()
            await is_so(lambda: client.unready_reason is None)
            assert len(tokens_of(await collect(client, request()))) == 6
        core.terminate()
        async with asyncio.timeout(BOUND_S):
            await client.wait_dead()
        with pytest.raises(EngineDeadError, match="SIGTERM"):
            await collect(client, request())


FRONT_END = """
import asyncio, sys
import msgspec, psutil
from baton.core.config import EngineConfig
from baton.engine.core.client import EngineClient

async def main():
    config = msgspec.msgpack.decode(open(sys.argv[1], "rb").read(), type=EngineConfig)
    client = await EngineClient.start(config, connector_factory="baton.assemble:connector_factory")
    pids = [client.pid, *(child.pid for child in psutil.Process(client.pid).children())]
    print(*pids, flush=True)
    await client.wait_dead()

asyncio.run(main())
"""


def test_no_stopped_process_outlives_a_front_end_that_was_killed(make_config, tmp_path: Path) -> None:
    """The next engine can use the ports. The test of `baton up` kills it over running processes."""
    (port,) = free_ports(1)
    pull = KVTransferConfig(
        kv_connector="BatonPullConnector", kv_role="kv_both", kv_connector_extra_config={"port": port}
    )
    config = make_config(
        parallel_config=ParallelConfig(executor="multiprocess"),
        kv_transfer_config=pull,
        insecure_no_secret=True,
    )
    path = tmp_path / "config"
    path.write_bytes(msgspec.msgpack.encode(config))
    with subprocess.Popen(
        [sys.executable, "-c", FRONT_END, str(path)], stdout=subprocess.PIPE, text=True
    ) as front_end:
        assert front_end.stdout is not None
        started = [psutil.Process(int(pid)) for pid in front_end.stdout.readline().split()]
        assert len(started) == 2
        assert not is_port_free("127.0.0.1", port)
        for process in started:
            process.suspend()
        front_end.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(started, timeout=BOUND_S)
        assert not alive
        assert is_port_free("127.0.0.1", port)


async def test_a_core_and_a_rank_that_are_stopped_end_in_order_when_they_are_asked_to(
    make_config, caplog: pytest.LogCaptureFixture
) -> None:
    one_rank = ParallelConfig(executor="multiprocess")
    client = await EngineClient.start(make_config(parallel_config=one_rank))
    core = psutil.Process(client.pid)
    for process in (core, *core.children()):
        process.suspend()
    await client.close()
    assert "killing it" not in caplog.text
