"""The invariants I1 to I6 in simulated worlds, and proof that the worlds are unkind enough to break them."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from baton.core.errors import UserError
from baton.sim import MUTANTS, Report, find_broken, replay, run_worlds

NUM_WORLDS = 20_000
SLICE = 1_250

# Where a world that misses the guard is found, and how many worlds are tried from there. A rare fault needs
# its seed; when a change of the world moves it, `python -m baton.sim mutants` finds another.
SEEDS = {
    "claim_epoch": 358,
    "incarnation": 1366,
}
TRIES = 300


def test_no_invariant_breaks_in_two_hundred_worlds() -> None:
    report = run_worlds("pull", 0, 200)
    assert [broken.command for broken in report.broken] == []


def test_everything_that_can_go_wrong_does() -> None:
    """A fault that is never drawn proves nothing."""
    counts = run_worlds("pull", 0, 300).counts
    missing = {
        "batched envelopes",
        "crash",
        "delivered",
        "drain",
        "loan already in use",
        "loans expired",
        "loans released",
        "malformed frames",
        "not admitted",
        "nothing to move",
        "prefill failed",
        "started late",
        "ticket refused: prompt",
        "ticket refused: schema",
        "ticket refused: signature",
        "failed: aborted",
        "failed: deadline",
        "failed: the producer has restarted or is gone",
        "failed: the producer no longer holds the blocks",
    } - counts.keys()
    assert missing == set()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_WORLDS, NUM_WORLDS // 4))
def test_no_invariant_breaks_in_twenty_thousand_worlds(first: int) -> None:
    """A quarter of them at a time."""
    total = Report("pull")
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
        slices = range(first, first + NUM_WORLDS // 4, SLICE)
        for report in processes.map(run_worlds, ["pull"] * len(slices), slices, [SLICE] * len(slices)):
            total.add(report)
    assert [f"{broken.command}: {broken.kind}" for broken in total.broken] == []
    assert total.num_worlds == NUM_WORLDS // 4
    assert total.counts["delivered"] > total.num_worlds


@pytest.mark.slow
@pytest.mark.parametrize("guard", MUTANTS)
def test_a_missing_guard_is_noticed(guard: str) -> None:
    assert find_broken("pull", guard, SEEDS.get(guard, 0), TRIES) is not None


def test_a_world_is_replayed_by_its_seed() -> None:
    first, second = replay("pull", 7), replay("pull", 7)
    assert first == second
    assert first[-1].endswith("every invariant held")
    assert any("StartReads" in line for line in first)


def test_the_replay_of_a_broken_world_ends_with_what_broke() -> None:
    broken = find_broken("pull", "all_ranks", 0, 20)
    assert broken is not None
    assert broken.command == f"baton sim pull --seed {broken.seed}"
    assert replay("pull", broken.seed, mutant="all_ranks")[-1].endswith(f"VIOLATION {broken.kind}")


def test_a_world_that_does_not_exist_is_named() -> None:
    with pytest.raises(UserError, match=r"mode: .*choose one of pull"):
        run_worlds("push", 0, 1)
    with pytest.raises(UserError, match=r"mutant: .*choose one of fence"):
        run_worlds("pull", 0, 1, mutant="luck")
