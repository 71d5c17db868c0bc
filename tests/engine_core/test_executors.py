"""Behaviour of every executor: ranks in this process, in child processes, and in Ray's processes."""

import importlib.util
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from executor_fakes import FACTORY, Order, Pid, Seen

from baton.checkpoints.checkpoint import load_model_config
from baton.checkpoints.random_model import write_checkpoint
from baton.contract import KVConnectorOutput
from baton.core.config import EngineConfig, KVTransferConfig, ParallelConfig
from baton.core.errors import ConfigError
from baton.engine.api import EngineRequest, SamplingParams
from baton.engine.core.engine_core import EngineCore
from baton.engine.executor import Executor, ExecutorDied
from baton.engine.executor.ray import RayExecutor
from baton.engine.executor.ray_actors import RankActors, import_ray
from baton.engine.executor.start import start_executor
from baton.engine.llm import LLM
from baton.engine.step import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.usefixtures("forked_programs")]

NOTICED_S = 5.0  # Bound for noticing a rank's death. It takes milliseconds.
ENDED_S = 120.0  # Only reached when something is wrong; the machine may be busy.
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [list(range(20, 40)), [3, 4, 5], list(range(100, 131)), [7] * 9]

without_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
KINDS = ["inprocess", "multiprocess", pytest.param("ray", marks=without_ray)]
APART = KINDS[1:]  # Executors with ranks in other processes.


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    """Executors of this module share it, for speed; `test_ray_ends_with_its_executor` starts its own."""
    if importlib.util.find_spec("ray") is None:
        yield
        return
    ray = import_ray()
    ray.init(address="local", num_cpus=8, include_dashboard=False, configure_logging=False)
    yield
    ray.shutdown()


def parallel(kind: str, **fields: Any) -> ParallelConfig:
    return ParallelConfig(tensor_parallel_size=1 if kind == "inprocess" else 2, executor=kind, **fields)  # type: ignore[arg-type]


def told() -> KVTransferConfig:
    return KVTransferConfig(kv_connector="Told", kv_role="kv_both")


class Driver:
    """An executor, and the steps that a scheduler would make for it."""

    def __init__(self, config: Any, kind: str, actors: RankActors | None = None) -> None:
        self.num_ranks = config.parallel_config.tensor_parallel_size
        self.kind = kind
        self.executor: Executor = (
            start_executor(config, FACTORY) if actors is None else RayExecutor(config, FACTORY, actors)
        )
        self._num_steps = 0

    @property
    def pids(self) -> list[int]:
        cards = self.executor.handshake_metadata()
        assert sorted(cards) == list(range(self.num_ranks))
        return [card.pid for rank in range(self.num_ranks) if isinstance(card := cards[rank], Pid)]

    def empty(self, **order: Any) -> SchedulerOutput:
        self._num_steps += 1
        return SchedulerOutput(kv_connector_metadata=Order(self._num_steps, **order))

    def prefill(self, request_id: str = "a", **order: Any) -> SchedulerOutput:
        output = self.empty(**order)
        first = 3 * ord(request_id)  # Blocks of its own.
        blocks = ([first % 128, (first + 1) % 128, (first + 2) % 128],)
        output.scheduled_new_reqs = [NewRequestData(request_id, [5, 6, 7, 8, 9], GREEDY, blocks, 0)]
        output.num_scheduled_tokens = {request_id: 5}
        output.total_num_scheduled_tokens = 5
        return output

    def decode(self, num_output: int, request_id: str = "a") -> SchedulerOutput:
        output = self.empty()
        output.scheduled_cached_reqs = CachedRequestData(
            [request_id],
            new_block_ids=[None],
            num_computed_tokens=[4 + num_output],
            num_output_tokens=[num_output],
        )
        output.num_scheduled_tokens = {request_id: 1}
        output.total_num_scheduled_tokens = 1
        return output

    def wait_death(self) -> float:
        """Seconds until an idle engine core notices it."""
        started = time.monotonic()
        assert select.select(self.executor.death_filenos(), [], [], 4 * NOTICED_S)[0], (
            "the death was not noticed"
        )
        return time.monotonic() - started


@pytest.fixture
def driver_of(make_config, one_ray) -> Iterator[Any]:
    drivers: list[Driver] = []

    def make(kind: str, **fields: Any) -> Driver:
        config = make_config(parallel_config=parallel(kind), kv_transfer_config=told(), **fields)
        drivers.append(Driver(config, kind))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.executor.shutdown()


def seen(output: KVConnectorOutput | None) -> list[Seen]:
    """The reports of the ranks, in rank order."""
    assert output is not None
    assert isinstance(output.kv_connector_worker_meta, Seen)
    return sorted((s for _, s in output.kv_connector_worker_meta.each_rank()), key=lambda s: s.rank)


def report(result: ModelRunnerOutput) -> KVConnectorOutput:
    assert result.kv_connector_output is not None
    return result.kv_connector_output


def received(result: ModelRunnerOutput) -> set[str] | None:
    return result.kv_connector_output.finished_recving if result.kv_connector_output is not None else None


@pytest.mark.parametrize("kind", KINDS)
def test_a_life_of_an_executor(driver_of, kind: str) -> None:
    """One executor for all checks that keep it alive, because starting it takes long."""
    driver = driver_of(kind)
    executor, every_rank = driver.executor, range(driver.num_ranks)
    processes = [psutil.Process(pid) for pid in driver.pids]
    assert len({p.pid for p in processes}) == driver.num_ranks
    assert (processes[0].pid == os.getpid()) == (kind == "inprocess")
    assert {p.nice() for p in processes} == {psutil.Process().nice()}, "ranks have the engine's priority"

    # Each step, with tokens and without: metadata to each rank, bound and cleared, and a report from each.
    first = executor.execute(driver.empty()).kv_connector_output
    assert [(s.rank, s.steps) for s in seen(first)] == [(rank, (1,)) for rank in every_rank]
    tokens = [executor.execute(driver.prefill()).sampled_token_ids]
    tokens += [executor.execute(driver.decode(n)).sampled_token_ids for n in (1, 2)]
    assert all(len(step) == 1 and len(step[0]) == 1 for step in tokens)
    last = executor.execute(driver.empty()).kv_connector_output
    assert [s.steps for s in seen(last)] == [(1, 2, 3, 4, 5)] * driver.num_ranks
    assert {(s.num_binds, s.num_clears) for s in seen(last)} == {(5, 4)}, "cleared last, after the report"

    # Several steps in flight: results in order, whichever is asked for first; ranks get all of them.
    futures = [executor.submit(step) for step in (driver.decode(3), driver.prefill("b"), driver.empty())]
    results = [future.result() for future in reversed(futures)]
    assert [result.req_ids for result in reversed(results)] == [["a"], ["b"], []]
    assert all(future.done() for future in futures)
    assert results[1].sampled_token_ids == [[tokens[0][0][0]]], "the same prompt"
    assert executor.execute(driver.decode(4)).req_ids == ["a"], "other ranks got the tokens in between"
    assert executor.execute(driver.decode(1, "b")).sampled_token_ids == [tokens[1][0]]

    # Ids of finished requests reach every rank, once.
    ends = driver.empty()
    ends.finished_req_ids = {"a", "b"}
    assert {s.finished for s in seen(executor.execute(ends).kv_connector_output)} == {("a", "b")}

    # An id counts when the last rank has reported it. If one rank reports a failure, the load has failed.
    output = executor.execute(driver.empty(received={0: {"r"}}, failed={0: {"r"}})).kv_connector_output
    if kind != "inprocess":
        assert output is not None
        assert not output.finished_recving
        output = report(executor.execute(driver.empty(received={1: {"r"}})))
    assert output.finished_recving == output.failed_recving == {"r"}

    # A bad block of any rank is reported at once.
    output = report(executor.execute(driver.empty(invalid={driver.num_ranks - 1: {9}})))
    assert output.invalid_block_ids == {9}

    # Partial reports of a request are dropped when the request has ended.
    if kind != "inprocess":
        executor.execute(driver.empty(received={0: {"gone"}}))
        executor.execute(driver.empty(received={0: {"held"}}))
        executor.forget_all_but({"held"})
        output = report(executor.execute(driver.empty(received={1: {"gone", "held"}})))
        assert output.finished_recving == {"held"}

    # Connector data that cannot be pickled is lost, in both directions, and nothing else is.
    if kind != "inprocess":
        step = driver.prefill("c", unsendable=threading.Lock())
        result = executor.execute(step)
        assert result.sampled_token_ids == [[tokens[0][0][0]]]
        assert result.connector_error is not None
        assert result.connector_error.startswith("build_connector_meta: TypeError")
        assert step.kv_connector_metadata is None, "so the scheduler fails the loads"
        result = executor.execute(driver.empty(says_unsendable=True, received={0: {"v"}, 1: {"v"}}))
        assert received(result) == {"v"}
        assert result.connector_error == "its report cannot be pickled"
        result = executor.execute(driver.empty())
        assert result.connector_error is None
        assert len(seen(result.kv_connector_output)) == driver.num_ranks

    # A connector may wait for fewer reports than there are ranks.
    executor.expect_reports(1)
    output = report(executor.execute(driver.empty(received={driver.num_ranks - 1: {"s"}})))
    assert output.finished_recving == {"s"}

    # A rank may change the number in any step, also for ids that other ranks have reported before.
    last_rank = driver.num_ranks - 1
    executor.expect_reports(driver.num_ranks + 1)
    assert not received(executor.execute(driver.empty(received={last_rank: {"t"}}, is_silent=True)))
    assert received(executor.execute(driver.empty(expected={last_rank: 1}, is_silent=True))) == {"t"}
    assert received(executor.execute(driver.empty(received={0: {"u"}}, is_silent=True))) == {"u"}

    executor.shutdown()
    executor.shutdown()
    if kind != "inprocess":
        _, alive = psutil.wait_procs(processes, timeout=ENDED_S)
        assert not alive


def test_an_error_of_the_model_is_raised_in_its_own_process(driver_of) -> None:
    driver = driver_of("inprocess")
    # A request that the ranks do not know is a bug of the engine.
    with pytest.raises(KeyError, match="unknown"):
        driver.executor.execute(driver.decode(1, "unknown"))


@pytest.mark.parametrize("kind", APART)
def test_an_idle_core_and_every_step_in_flight_notice_a_killed_rank(driver_of, kind: str) -> None:
    driver = driver_of(kind)
    driver.executor.execute(driver.prefill())
    driver.executor.check_alive()
    futures = [driver.executor.submit(driver.decode(1)), driver.executor.submit(driver.empty())]
    for future in futures:
        future.result()
    os.kill(driver.pids[1], signal.SIGKILL)
    assert driver.wait_death() < NOTICED_S
    with pytest.raises(ExecutorDied, match="rank 1"):
        driver.executor.check_alive()
    with pytest.raises(ExecutorDied):
        driver.executor.execute(driver.decode(2))
    driver.executor.shutdown()
    assert have_ended(driver.pids)


def have_ended(pids: list[int]) -> bool:
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs(processes, timeout=ENDED_S)[1]


@pytest.mark.parametrize("kind", APART)
def test_a_rank_killed_in_a_step_is_noticed_although_the_other_hangs_in_a_collective(
    driver_of, kind: str
) -> None:
    driver = driver_of(kind)
    stuck, killed = driver.pids
    os.kill(killed, signal.SIGSTOP)  # The other rank waits for it in the first all-reduce.
    future = driver.executor.submit(driver.prefill())
    assert not future.done()
    os.kill(killed, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(ExecutorDied, match="rank"):
        future.result()
    assert time.monotonic() - started < NOTICED_S
    driver.executor.shutdown()
    assert have_ended([stuck])


@pytest.mark.parametrize("kind", APART)
def test_a_killed_rank_is_named_although_its_consequence_arrives_first(driver_of, kind: str) -> None:
    """The other rank fails in the collective, possibly before the end of the killed rank is noticed."""
    driver = driver_of(kind)
    executor, (survivor, killed) = driver.executor, driver.pids
    os.kill(killed, signal.SIGSTOP)
    future = executor.submit(driver.decode(1, "unknown"))  # The survivor raises KeyError.
    if kind == "ray":
        [(_, tasks)] = executor._in_flight
        assert import_ray().wait(tasks, timeout=ENDED_S)[0] == [tasks[0]]
    else:
        assert have_ended([survivor])
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(ExecutorDied, match=r"rank 1 is gone: .*; rank 0 failed: KeyError"):
        future.result()


@pytest.mark.parametrize("kind", APART)
def test_a_rank_that_fails_is_named_although_the_other_continues(driver_of, kind: str) -> None:
    driver = driver_of(kind)
    os.kill(driver.pids[1], signal.SIGSTOP)
    with pytest.raises(ExecutorDied, match=r"^rank 0 failed: KeyError: 'unknown'$"):
        driver.executor.execute(driver.decode(1, "unknown"))


@without_ray
def test_only_actors_that_closed_in_order_are_reused(make_config, one_ray) -> None:
    config = make_config(parallel_config=ParallelConfig(executor="ray"), kv_transfer_config=told())
    actors = RankActors(config)

    def life(*, is_broken: bool = False) -> tuple[list[int], list[list[int]]]:
        driver = Driver(config, "ray", actors=actors)
        try:
            if is_broken:
                with pytest.raises(ExecutorDied):
                    driver.executor.execute(driver.decode(1, "unknown"))
                return driver.pids, []
            return driver.pids, driver.executor.execute(driver.prefill()).sampled_token_ids
        finally:
            driver.executor.shutdown()

    try:
        first, tokens = life()
        again, tokens_again = life()
        assert sorted(again) == sorted(first)
        assert tokens_again == tokens
        life(is_broken=True)
        assert have_ended(first)
        others, tokens_of_others = life()
        assert not set(others) & set(first)
        assert tokens_of_others == tokens
    finally:
        actors.close()
    assert have_ended(others)


# --- Whole engines --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(make_config) -> list[list[int]]:
    with LLM(make_config()) as llm:
        return [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize(
    ("kind", "num_batches"),
    [("multiprocess", 3), pytest.param("ray", 2, marks=without_ray)],
)
def test_two_ranks_with_steps_in_flight_give_one_engines_tokens(
    make_config, one_ray, reference: list[list[int]], kind: str, num_batches: int
) -> None:
    config = make_config(parallel_config=parallel(kind, max_concurrent_batches=num_batches))
    core = EngineCore(config, None)
    produced: dict[str, list[int]] = {}
    most = 0
    try:
        # One request arrives with each step, so that several steps are in flight.
        asked = [(f"{turn}-{index}", PROMPTS[index]) for turn in range(3) for index in range(len(PROMPTS))]
        while asked or core.has_requests:
            if asked:
                request_id, prompt = asked.pop(0)
                request = EngineRequest(
                    request_id=request_id, prompt_token_ids=prompt, sampling_params=GREEDY, arrival_time_s=0.0
                )
                assert core.add_request(request) is None
            for output in core.step().outputs:
                produced.setdefault(output.request_id, []).extend(output.new_token_ids)
            most = max(most, len(core.scheduler.in_flight))
    finally:
        core.shutdown()
    assert produced == {
        f"{turn}-{index}": reference[index] for turn in range(3) for index in range(len(PROMPTS))
    }
    assert most >= num_batches - 1, "the test had too few steps in flight"


@pytest.mark.parametrize("kind", APART)
def test_two_ranks_change_weights_together(
    make_config, one_ray, reference: list[list[int]], kind: str, tmp_path: Path
) -> None:
    other = write_checkpoint(tmp_path, hidden=64, layers=2, heads=4, kv_heads=2, vocab=512, seed=1)
    with LLM(make_config(parallel_config=parallel(kind))) as llm:
        llm.update_weights(other, mode="keep")
        changed = [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)]
    model = msgspec.structs.replace(load_model_config(other), max_model_len=256)
    with LLM(msgspec.structs.replace(make_config(), model_config=model)) as llm:
        assert changed == [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)]
    assert changed != reference


def test_one_process_cannot_have_steps_in_flight() -> None:
    with pytest.raises(ConfigError, match="max_concurrent_batches"):
        ParallelConfig(max_concurrent_batches=2)


# --- Rays of their own: these tests end the shared one ---------------------------------------------------


@without_ray
def test_ray_ends_with_its_executor_and_binds_to_loopback_only(make_config) -> None:
    ray = import_ray()
    if ray.is_initialized():
        ray.shutdown()  # The Ray of the other tests, which have ended.
    before = set(psutil.Process().children(recursive=True))
    executor = start_executor(make_config(parallel_config=parallel("ray")), None)
    started = set(psutil.Process().children(recursive=True)) - before
    assert len(started) >= 4
    addresses = {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in (psutil.Process(), *started)
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1"}
    of_one = ParallelConfig(executor="ray")
    second = start_executor(make_config(parallel_config=of_one), None)  # Both use the same Ray.
    executor.shutdown()
    second.check_alive()
    assert ray.is_initialized()
    second.shutdown()
    _, alive = psutil.wait_procs(list(started), timeout=ENDED_S)
    assert not alive
    assert not ray.is_initialized()


def started_with(config: EngineConfig, program: str) -> subprocess.Popen[str]:
    """A process that runs `program` on the pickled `config`, which it reads from its standard input."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"import pickle, sys\nconfig = pickle.load(sys.stdin.buffer)\n{program}"],
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    pickle.dump(config, process.stdin.buffer)
    process.stdin.close()
    return process


@without_ray
def test_a_ray_that_was_imported_too_early_is_not_started_on_all_interfaces(make_config) -> None:
    program = (
        "import ray\n"
        "from baton.core.errors import ConfigError\n"
        "from baton.engine.executor.start import start_executor\n"
        "try:\n"
        "    start_executor(config, None)\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
        "assert not ray.is_initialized()\n"
    )
    with started_with(make_config(parallel_config=parallel("ray")), program) as process:
        assert process.stdout is not None
        assert "call ray.init" in process.stdout.read()
        assert process.wait(timeout=ENDED_S) == 0


@without_ray
def test_the_end_of_rays_own_control_process_is_noticed(make_config) -> None:
    """Steps hang without that process, by Ray's default for a minute. Ray ends the waiting process."""
    program = (
        "import psutil\n"
        "from baton.engine.executor.start import start_executor\n"
        "from baton.engine.step import SchedulerOutput\n"
        "executor = start_executor(config, None)\n"
        "[gcs] = [p for p in psutil.Process().children(recursive=True) if p.name() == 'gcs_server']\n"
        "gcs.kill()\n"
        "print('killed', flush=True)\n"
        "while True:\n"
        "    executor.execute(SchedulerOutput())\n"
    )
    with started_with(make_config(parallel_config=ParallelConfig(executor="ray")), program) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "killed\n"
            assert process.wait(timeout=4 * NOTICED_S) != 0
        finally:
            process.kill()
