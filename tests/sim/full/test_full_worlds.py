"""Whole engines, connectors and router policies in simulated worlds: no wrong token, no lost block, and an
outcome for every request."""

import os
import subprocess
import sys

import pytest

from baton.core.errors import UserError
from lab.sim.full import FAILED, FULL
from lab.sim.kernel.runs import MODES

NUM_WORLDS = 100  # Worlds of each mode.
RARE = {
    "pull": (169, 177, 189),
    "push": (133, 144, 181, 186, 245, 554),
}  # More worlds, with events of HAPPENS that the others lack.
TRIES = 60

# The first seed that is tried. When a change of the world moves it,
# `python -m lab.sim full --mutants --mode MODE` finds another.
SEEDS = {
    ("pull", "bound_answers"): 4,
    ("pull", "bound_ops"): 318,
    ("pull", "checksum"): 35,
    ("pull", "counters"): 2025,
    ("pull", "fence"): 44,
    ("pull", "filled_before_cached"): 10,
    ("pull", "frame_mac"): 4,
    ("pull", "last_members"): 4,
    ("pull", "link_replaced"): 16,
    ("pull", "probes_told"): 4,
    ("pull", "request_mac"): 4,
    ("pull", "resumes_short"): 4,
    ("pull", "sender_bound"): 28,
    ("pull", "silent_router"): 13,
    ("pull", "state_boundary"): 42,
    ("pull", "store_failed"): 9,
    ("pull", "store_fence"): 139,
    ("pull", "store_state_length"): 13,
    ("pull", "store_states"): 7,
    ("pull", "ticket_hash"): 28,
    ("pull", "ticket_windows"): 23,
    ("pull", "weights_answer"): 169,
    ("pull", "weights_cache"): 15,
    ("pull", "weights_chunk"): 15,
    ("pull", "weights_computed"): 133,
    ("pull", "weights_load"): 218,
    ("pull", "weights_ticket"): 70,
    ("pull", "whole_load"): 20,
    ("pull", "window_length"): 5,
    ("push", "bound_answers"): 4,
    ("push", "checksum"): 36,
    ("push", "counters"): 554,
    ("push", "drain_early_reads"): 109,
    ("push", "early_tables"): 5,
    ("push", "fence"): 323,
    ("push", "last_members"): 4,
    ("push", "link_replaced"): 16,
    ("push", "preempted"): 498,
    ("push", "probes_told"): 20,
    ("push", "request_mac"): 4,
    ("push", "resumes_short"): 9,
    ("push", "run"): 230,
    ("push", "sender_bound"): 24,
    ("push", "silent_router"): 8,
    ("push", "state_boundary"): 806,
    ("push", "store_failed"): 28,
    ("push", "store_fence"): 4,
    ("push", "store_state_length"): 13,
    ("push", "store_states"): 12,
    ("push", "ticket_hash"): 163,
    ("push", "ticket_windows"): 144,
    ("push", "weights_answer"): 245,
    ("push", "weights_cache"): 16,
    ("push", "weights_chunk"): 170,
    ("push", "weights_computed"): 300,
    ("push", "weights_load"): 133,
    ("push", "weights_ticket"): 226,
    ("push", "whole_load"): 12,
    ("push", "window_length"): 5,
}

EVERYWHERE = {
    "a producer's token is EOS, of states",
    "a router is silent",
    "a router's message: TurnKept",
    "a router's message: TurnTaken",
    "a router's message: lost",
    "answer exchanged",
    "answer flipped",
    "answer truncated",
    "answers dropped with a loan",
    "bad frames",
    "clock steps",
    "clog",
    "forged frames",
    "lies of a member",
    "request flipped",
    "request renumbered",
    "request truncated",
    "suspended as it hears something",
    "crash",
    "drained in time",
    "failed: deadline passed",
    "failed: no answer to 5 hellos",
    "failed: read failed",
    "failed: the producer has restarted or is gone",
    "failed: the producer no longer holds the blocks",
    "handoffs of cache groups",
    "handoffs of states",
    "host load: error",
    "host memory evicts by learned",
    "host memory reset",
    "host store: error",
    "hung steps",
    "hung up",
    "leg: broken",
    "links reset",
    "links stalled",
    "loaded from host memory",
    "leg: timeout",
    "leg: unreachable",
    "loans expired",
    "member: Hold",
    "member: Join",
    "member: Leave",
    "leg: ejected",
    "router: resumed_streams broken",
    "requests that wait in the router",
    "leg: refused by the server",
    "loans taken back",
    "partition",
    "pause",
    "pieces cut",
    "preempted",
    "preempted after a load",
    "preempted after a load, of states",
    "prefix hits",
    "prefix hits of states",
    "note: Handoff",
    "note: LegFailed",
    "note: TurnKept",
    "note: TurnTaken",
    "prompts looked up",
    "read: corrupt",
    "read: error",
    "read: hang",
    "read: partial",
    "replays",
    "router restarts",
    "router: broken_streams",
    "router: first_tokens yes",
    "router: hedges_won",
    "router: prefills local cheaper",
    "router: prefills local prefill_failed",
    "router: prefills local ticket_refused",
    "router: retries decode",
    "router: retries prefill",
    "router: workers killed",
    "routers killed",
    "ticket refused: in use",
    "ticket refused: layout",
    "ticket refused: prompt",
    "ticket refused: schema",
    "ticket refused: signature",
    "turns resumed",
    # Updates of the weights
    "a continued stream of other weights",
    "a rollback finds what was stored",
    "failed: other weights",
    "router: handoffs other_weights",
    "router: prefills local other_weights",
    "ticket refused: weights",
    "update: another is under way",
    "update: named",
    "update: out of time",
    "update: rollback",
    "update: unnamed",
    "updated during a load",
    "updated with a loan open",
    "updated: abort",
    "updated: keep",
    "updated: wait",
}
HAPPENS = {
    "pull": EVERYWHERE | {"request replayed"},  # Rarer in push.
    "push": EVERYWHERE
    | {
        "answer replayed",
        "failed: the producer gave up",
        "failed: the producer has said nothing",
        "layers reported",
        "router: pushes after",
        "router: pushes at_once",
        "router: pushes late",
        "read early",
        "read early of cache groups",
        "updated during a stream, D",
        "updated during a stream, P",
    },
}


@pytest.mark.parametrize("mode", MODES)
def test_no_seed_that_ever_failed_fails_again(mode: str) -> None:
    report = FULL.run_seeds(mode, tuple(FAILED[mode]))
    assert [f"{broken.command}: {broken.kind}" for broken in report.broken] == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_no_invariant_breaks_in_full_worlds(mode: str) -> None:
    report = FULL.run_seeds(mode, (*range(NUM_WORLDS), *RARE[mode]))
    assert [f"{broken.command}: {broken.kind}" for broken in report.broken] == []
    assert report.counts["handoffs delivered"] > 3 * report.num_worlds
    assert report.counts["client: answered"] > 3 * report.num_worlds
    # A fault that is never drawn proves nothing.
    assert HAPPENS[mode] - report.counts.keys() == set()


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "guard"), [(mode, guard) for mode in MODES for guard in FULL.mutants[mode]])
def test_a_missing_guard_is_noticed(mode: str, guard: str) -> None:
    assert FULL.find_broken(mode, guard, SEEDS.get((mode, guard), 0), TRIES) is not None


@pytest.mark.parametrize("mode", MODES)
def test_a_full_world_is_replayed_by_its_seed(mode: str) -> None:
    first, second = FULL.replay(mode, 3), FULL.replay(mode, 3)
    assert first == second
    assert first[-1].endswith("every invariant held")


@pytest.mark.slow
@pytest.mark.processes
def test_a_seed_tells_the_same_story_in_every_process() -> None:
    """Sets have another order in each process. No world may depend on it."""
    seeds = (49, 192)  # One step of each preempts two requests in pull.
    script = (
        "from lab.sim.full import FULL\n"
        f"for seed in {seeds}:\n"
        "    for mode in ('pull', 'push'):\n"
        "        print('\\n'.join(FULL.replay(mode, seed)))\n"
    )
    there = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    here = [line for seed in seeds for mode in ("pull", "push") for line in FULL.replay(mode, seed)]
    assert there.splitlines() == here


def test_the_replay_of_a_broken_full_world_ends_with_what_broke() -> None:
    broken = FULL.find_broken("pull", "loan", 0, 5)
    assert broken is not None
    assert broken.command == f"python -m lab.sim full --seed {broken.seed}"
    assert "VIOLATION I2" in FULL.replay("pull", broken.seed, mutant="loan")[-1]


def test_a_full_world_that_does_not_exist_is_named() -> None:
    with pytest.raises(UserError, match=r"mode: .*choose one of pull, push"):
        FULL.run_worlds("luck", 0, 1)
    with pytest.raises(UserError, match=r"mutant: .*choose one of fence"):
        FULL.run_worlds("pull", 0, 1, mutant="luck")
