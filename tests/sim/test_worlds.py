"""The invariants I1 to I6 in fast worlds, and proof that these worlds find a missing guard."""

import os
import subprocess
import sys

import pytest

from baton.core.errors import UserError
from lab.sim import FAILED_ONCE, GUARDS, MODES, find_broken, replay, run_worlds
from lab.sim.__main__ import main

# The first seed that is tried, and how many worlds from there. A rare fault needs its seed. When a change of
# the world moves it, `python -m lab.sim mutants` finds another.
SEEDS = {
    ("pull", "bound_ops"): 140,
    ("pull", "claim_epoch"): 20,
    ("pull", "claim_number"): 54,
    ("pull", "counters"): 21,
    ("pull", "deadline"): 70,
    ("pull", "drift"): 277,
    ("pull", "from_send"): 136,
    ("pull", "incarnation"): 3137,
    ("pull", "loan_cap"): 136,
    ("pull", "promises"): 32,
    ("pull", "ticket_hash"): 24,
    ("push", "bound_ops"): 1760,
    ("push", "counters"): 582,
    ("push", "drain_handed"): 1016,
    ("push", "frame_mac"): 23,
    ("push", "run_check"): 22,
    ("push", "run_count"): 97,
    ("push", "state_lent"): 20,
    ("push", "void_first"): 632,
}
TRIES = 300

COMMON = {
    "altered frames dropped",
    "answer exchanged",
    "answer flipped",
    "answer replayed",
    "answer truncated",
    "clock steps",
    "frames in another's name dropped",
    "lies of a member",
    "links reset",
    "links stalled",
    "request flipped",
    "request renumbered",
    "request replayed",
    "request truncated",
    "slices of states read",
    "states read",
    "suspended as it hears something",
    # Updates of the weights
    "failed: other weights",
    "ticket refused: weights",
    "update: named",
    "update: rollback",
    "update: unnamed",
    "updated during a load",
    "updated with a loan open",
}
HAPPENS = {
    "pull": COMMON
    | {
        "batched envelopes",
        "crash",
        "delivered",
        "delivered to cache groups",
        "drain",
        "kept, and given up unless claimed",
        "ticket refused: in use",
        "loans expired",
        "loans freed",
        "malformed frames",
        "not admitted",
        "nothing to move",
        "prefill failed",
        "started late",
        "ticket refused: prompt",
        "ticket refused: schema",
        "ticket refused: signature",
        "failed: aborted",
        "failed: deadline passed",
        "failed: the producer has restarted or is gone",
        "failed: the producer no longer holds the blocks",
    },
    "push": COMMON
    | {
        "a window moves on",
        "delivered to cache groups",
        "early reads of cache groups",
        "P had the beginning",
        "a ticket beside the stream",
        "aborted between attention and state",
        "batched envelopes",
        "crash",
        "delivered",
        "drain",
        "early reads",
        "early reads of some layers",
        "failed: aborted",
        "failed: deadline passed",
        "failed: its loan is in use here",
        "failed: the producer gave up",
        "failed: the producer has restarted or is gone",
        "failed: the producer has said nothing",
        "failed: the producer no longer holds the blocks",
        "found by name",
        "lent to a stream that has read",
        "lent to a stream that has read nothing",
        "lent to a stream whose void reads still run",
        "nothing to move",
        "preempted",
        "prefill aborted",
        "prefill stalls",
        "started late",
        "ticket refused: in use",
        "updated during a prefill",
        "updated during a stream, D",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_no_invariant_breaks_in_300_worlds(mode: str) -> None:
    report = run_worlds(mode, 0, 300)
    assert [f"{broken.command}: {broken.kind}" for broken in report.broken] == []
    assert report.counts["delivered"] > report.num_worlds
    # A fault that is never drawn proves nothing.
    assert HAPPENS[mode] - report.counts.keys() == set()


@pytest.mark.parametrize(("mode", "seed"), FAILED_ONCE)
def test_a_world_that_broke_once_holds(mode: str, seed: int) -> None:
    assert run_worlds(mode, seed, 1).broken == [], FAILED_ONCE[mode, seed]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "guard"), [(mode, guard) for mode in MODES for guard in GUARDS[mode]])
def test_a_missing_guard_is_noticed(mode: str, guard: str) -> None:
    assert find_broken(mode, guard, SEEDS.get((mode, guard), 0), TRIES) is not None


@pytest.mark.parametrize("mode", MODES)
def test_a_world_is_replayed_by_its_seed(mode: str) -> None:
    first, second = replay(mode, 7), replay(mode, 7)
    assert first == second
    assert first[-1].endswith("every invariant held")
    assert any("ReadBlocks" in line for line in first)


def test_the_replay_of_a_broken_world_ends_with_what_broke() -> None:
    broken = find_broken("pull", "all_ranks", 0, 20)
    assert broken is not None
    assert broken.command == f"python -m lab.sim pull --seed {broken.seed}"
    assert replay("pull", broken.seed, mutant="all_ranks")[-1].endswith(f"VIOLATION {broken.kind}")


@pytest.mark.processes
def test_worlds_in_processes_are_those_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["pull", "--seeds", "12", "--first", "15"]  # Two batches.
    # This runs in a new process, because a fork of a process with threads may deadlock.
    forked = subprocess.run(
        [sys.executable, "-m", "lab.sim", *options, "--jobs", "2"],
        capture_output=True,
        check=True,
        text=True,
    )
    assert main(options) == 0
    assert forked.stdout.splitlines()[:-1] == capsys.readouterr().out.splitlines()[:-1]  # The last has times.


def test_a_campaign_without_worlds_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "--seeds", "0"]) == 0
    assert "0 worlds/s" in capsys.readouterr().out


def test_a_world_that_does_not_exist_is_named() -> None:
    with pytest.raises(UserError, match=r"mode: .*choose one of pull, push"):
        run_worlds("carry", 0, 1)
    with pytest.raises(UserError, match=r"mutant: .*choose one of fence"):
        run_worlds("pull", 0, 1, mutant="luck")


@pytest.mark.parametrize("mode", MODES)
def test_a_seed_is_the_same_world_in_each_process(mode: str) -> None:
    """The order of a set of strings, which differs between processes, decides nothing."""
    program = f"from lab.sim.campaigns import FAST; print(FAST.digest({mode!r}, range(15, 25)))"
    digests = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert digests[0] == digests[1]
