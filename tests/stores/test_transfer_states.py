"""States of jobs without threads: each job ends once, with an outcome of each chunk; then no copy runs."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.stores.chunks.transfer_states import Ended, Outcome, Reason, TransferStates

CHUNKS = "abcde"


def prefix_of(num_chunks: int = len(CHUNKS)) -> tuple[TransferStates[str], Any]:
    states: TransferStates[str] = TransferStates(1, 100)
    return states, states.begin("job", "load", CHUNKS[:num_chunks], 0.0, 1.0, places=range(num_chunks))


def reasons_of(states: TransferStates[str]) -> list[Reason | None]:
    (ended,) = states.ended
    return [outcome.reason for outcome in ended.outcomes]


def test_after_a_chunk_that_failed_only_earlier_ones_are_awaited() -> None:
    states, job = prefix_of()
    states.settle(job, 4, Outcome("e"), 0.0)
    states.settle(job, 2, Outcome("c", "gone"), 0.0)
    assert job.left == {0, 1}
    states.settle(job, 3, Outcome("d", "corrupt"), 0.0)
    states.settle(job, 0, Outcome("a"), 0.0)
    assert not states.ended, "chunk 1 is still being read"
    states.settle(job, 1, Outcome("b"), 0.5)
    assert reasons_of(states) == [None, None, "gone", "corrupt", None]
    assert states.ended[0].seconds == 0.5


@given(
    reasons=st.lists(st.sampled_from([None, None, "gone", "corrupt"]), min_size=1, max_size=len(CHUNKS)),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=50)
def test_a_prefix_ends_as_if_read_in_order(reasons: list[Reason | None], order: random.Random) -> None:
    states, job = prefix_of(len(reasons))
    indices = list(range(len(reasons)))
    order.shuffle(indices)
    for index in indices:
        if index in job.left:
            states.settle(job, index, Outcome(CHUNKS[index], reasons[index]), 0.0)
    found = reasons_of(states)
    first_bad = next((i for i, reason in enumerate(reasons) if reason is not None), len(reasons))
    assert found[: first_bad + 1] == reasons[: first_bad + 1]


def test_a_backlog_has_a_limit() -> None:
    states: TransferStates[str] = TransferStates(1, 10)
    assert [states.reserve(nbytes) for nbytes in (6, 5, 4)] == [True, False, True]
    assert states.backlog_bytes == 10


@pytest.mark.parametrize("seed", range(40))
def test_each_job_ends_once_and_then_no_copy_runs(seed: int) -> None:
    """Random threads: in a turn each of three moves its chunk on, or time passes, or a job is cancelled."""
    rng = random.Random(seed)
    states: TransferStates[str] = TransferStates(2, 100)
    now, jobs, ended = 0.0, [], []
    waiting: list[tuple[Any, int]] = []
    threads: dict[int, tuple[Any, int, str]] = {}

    def check() -> None:
        known: list[Ended[str]] = states.ended[len(ended) :]
        for each in known:
            (job,) = (job for job in jobs if job.job_id == each.job_id)
            assert not job.copying
            assert [outcome.chunk for outcome in each.outcomes] == list(job.chunks)
        ended.extend(each.job_id for each in known)
        assert len(set(ended)) == len(ended)

    def turn(thread: int) -> None:
        if thread not in threads and waiting:
            job, index = waiting.pop(rng.randrange(len(waiting)))
            is_wanted = bool(states.start(thread, job, [index], now, 2.0))
            threads[thread] = job, index, "moves" if is_wanted else "stops"
            return
        if thread not in threads:
            return
        job, index, stage = threads[thread]
        if stage == "moves":
            is_wanted = states.begin_copy(job, index)
            threads[thread] = job, index, "copies" if is_wanted else "stops"
        elif stage == "copies":
            if job.kind == "store":
                states.end_copy(job, index, now)
            else:
                states.settle(job, index, Outcome(job.chunks[index]), now)
            threads[thread] = job, index, "stops"
        else:
            reason: Reason | None = rng.choice([None, "io"])
            if index in job.left:
                states.settle(job, index, Outcome(job.chunks[index], reason), now)
            states.stop(thread)
            del threads[thread]

    for number in range(60):
        if number < 30 and rng.random() < 0.5:
            kind: Any = rng.choice(["load", "store", "ahead"])
            chunks = CHUNKS[: rng.randrange(6)]
            places = rng.choice([(), range(len(chunks)), [number // 2 for number in range(len(chunks))]])
            job = states.begin(number, kind, chunks, now, rng.choice([3.0, 30.0]), places=places)
            jobs.append(job)
            waiting += [(job, index) for index in range(len(chunks))]
        now += rng.choice([0.0, 0.0, 1.0])
        states.expire(now)
        if rng.random() < 0.1:
            states.cancel(rng.randrange(30), now)
        for thread in range(3):
            if rng.random() < 0.7:
                turn(thread)
        check()
    for _ in range(3):
        for thread in list(threads):
            turn(thread)
    states.expire(now + 100.0)
    check()
    assert sorted(ended) == [job.job_id for job in jobs]
