"""Random worlds: arrivals, aborts, loads, failures, loans and shortage of blocks in any order.

Each request ends once, with the tokens of a single engine or with an error. Blocks that may still be written
or read are never reused. At rest the pool is whole.
"""

from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from baton.core.errors import BadTransferParams, UserError
from baton.core.prefilled import PrefilledTokens
from baton.testing.host.model import EOS_IDS, STATE
from tests.engine_sched.world import BLOCK, FakeLoad, World, prefilled_tokens

STEMS = [[1 + (7 * stem + i) % 48 for i in range(30)] for stem in range(3)]
SCRIPTS = ["compute", "async", "sync", "later", "user error", "bug", "bug in alloc", "too many"]


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.scripts: dict[str, tuple[str, int]] = {}
        self.lends: dict[str, bool] = {}
        self.hands_over: dict[str, str] = {}
        self.lent: dict[str, tuple[list[int], list[bytes]]] = {}
        self.sync_failure_rate = 0
        self.aborted: set[str] = set()

    @initialize(
        num_blocks=st.integers(6, 24),
        budget=st.sampled_from([3, 8, 40]),
        max_num_seqs=st.integers(1, 6),
        policy=st.sampled_from(["fcfs", "priority"]),
        on_failure=st.sampled_from(["recompute", "fail"]),
        caching=st.booleans(),
        longest_chunk=st.sampled_from([0, 5]),
        windows=st.sampled_from(
            [(), (), (None, 6), (6, None, 3), (8,), (None, 1), (None, STATE), (STATE,), (STATE, 6)]
        ),
        depth=st.integers(1, 3),
    )
    def start(self, **kwargs: Any) -> None:
        self.world = World(**kwargs, max_model_len=60)
        self.on_failure = kwargs["on_failure"]
        half = self.world.half
        half.prefilled = self._prefilled
        half.verdict, half.on_alloc, half.on_new, half.lends = (
            self._verdict,
            self._on_alloc,
            self._on_new,
            self._lends,
        )
        self.world.bad_sync_blocks = self._bad_sync_blocks

    @property
    def _is_hybrid(self) -> bool:
        return self.world.scheduler.kv_cache.is_hybrid

    # --- Connector behaviour -----------------------------------------------------------------

    def _on_new(self, request: Any) -> None:
        script, number = self.scripts[request.request_id]
        if number == 13 and script == "bug":
            raise RuntimeError
        if number == 13 and script == "user error":
            raise BadTransferParams("no")

    def _verdict(self, request: Any, local: int) -> tuple[int | None, bool]:
        script, number = self.scripts[request.request_id]
        there = min(number, request.num_tokens) - local
        if script == "user error":
            raise BadTransferParams("no")
        if script == "bug":
            raise KeyError("no")
        if script == "later" and self.world.half.asked[request.request_id] <= number:
            return None, False
        if script == "too many":
            return request.num_tokens + 1, True
        if script in ("async", "sync", "bug in alloc") and there > 0:
            return there, script == "async" or number % 2 == 1
        return 0, False

    def _on_alloc(self, request: Any, external: int) -> None:
        if self.scripts[request.request_id][0] == "bug in alloc":
            raise RuntimeError

    def _lends(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if not self.lends[request.request_id] or not block_ids or request.status.name == "FINISHED_ERROR":
            return False, None
        if request.request_id in self.world.half.loads:
            block_ids = []  # Aborted while it was filled: its contents may still change, its blocks may not.
        self.lent[request.request_id] = (block_ids, self.world.content(block_ids))
        return True, {"ticket": request.request_id}

    def _prefilled(self, request_id: str) -> PrefilledTokens | None:
        asked = self.world.answers[request_id].asked
        match self.hands_over[request_id]:
            case "right":
                count = 1 + self.scripts[request_id][1] % 3
                return prefilled_tokens(asked, self.world.expected_output(request_id)[:count])
            case "others":
                other = msgspec.structs.replace(asked.sampling_params, temperature=0.5)
                return prefilled_tokens(msgspec.structs.replace(asked, sampling_params=other), [40])
            case "bug":
                raise RuntimeError
            case _:
                return None

    def _bad_sync_blocks(self, load: FakeLoad) -> set[int]:
        first, last = load.first_token // BLOCK, (load.first_token + load.num_tokens - 1) // BLOCK
        external = [b for table in load.tables for b in table[first : last + 1]]
        bad = {b for i, b in enumerate(external) if (i + self.count) % 3 < self.sync_failure_rate}
        return bad - self.world.null_blocks

    # --- Actions --------------------------------------------------------------------------

    @rule(
        stem=st.sampled_from(STEMS),
        length=st.integers(1, 30),
        tail=st.lists(st.integers(1, 48), max_size=2),
        max_tokens=st.integers(1, 12),
        script=st.sampled_from(SCRIPTS),
        number=st.integers(1, 34),
        lends=st.booleans(),
        hands_over=st.sampled_from(["nothing", "right", "right", "others", "bug"]),
        priority=st.integers(0, 2),
        ignore_eos=st.booleans(),
        salt=st.sampled_from([None, None, "salt"]),
    )
    def arrive(
        self,
        stem: list[int],
        length: int,
        tail: list[int],
        max_tokens: int,
        script: str,
        number: int,
        lends: bool,
        hands_over: str,
        **kwargs: Any,
    ) -> None:
        self.count += 1
        request_id = f"r{self.count}"
        self.scripts[request_id] = (script, number)
        self.lends[request_id] = lends
        self.hands_over[request_id] = hands_over
        prompt = [*stem[:length], *tail]
        try:
            self.world.add(request_id, prompt, max_tokens=max_tokens, **kwargs)
        except UserError:
            pool_tokens = self.world.config.cache_config.num_gpu_blocks * BLOCK
            assert self._is_hybrid or len(prompt) + max_tokens > pool_tokens + 1
            assert request_id not in self.world.half.asked

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.world.step()

    @precondition(lambda self: self.world.in_flight)
    @rule()
    def a_result_comes(self) -> None:
        self.world.finish_oldest()

    @rule(rate=st.integers(0, 2))
    def sync_loads_fail(self, rate: int) -> None:
        self.sync_failure_rate = rate

    @precondition(lambda self: self.world.scheduler.requests)
    @rule(choice=st.integers(0, 100))
    def abort(self, choice: int) -> None:
        live = sorted(self.world.scheduler.requests)
        request_id = live[choice % len(live)]
        if self.world.answers[request_id].reason is None:
            self.aborted.add(request_id)
        self.world.scheduler.abort([request_id])

    @precondition(lambda self: self.world.half.loads)
    @rule(
        choice=st.integers(0, 100),
        how=st.sampled_from(["good", "good", "bad", "failed"]),
        bad=st.integers(0, 7),
        group=st.integers(0, 2),
    )
    def a_load_ends(self, choice: int, how: str, bad: int, group: int) -> None:
        loads = sorted(self.world.half.loads)
        request_id = loads[choice % len(loads)]
        load = self.world.half.loads[request_id]
        first = load.first_token // BLOCK
        if how == "good":
            self.world.end_load(request_id)
        elif how == "failed":
            self.world.end_load(request_id, failed=True)
        else:
            indices = {first + bad % (len(load.block_ids) - first)}
            self.world.end_load(request_id, bad_indices=indices, bad_group=group % len(load.tables))
        self.world.step()

    @precondition(lambda self: self.lent)
    @rule(choice=st.integers(0, 100))
    def a_loan_ends(self, choice: int) -> None:
        lent = sorted(self.lent)
        request_id = lent[choice % len(lent)]
        del self.lent[request_id]
        self.world.end_send(request_id)
        self.world.step()

    @rule(kind=st.sampled_from(["finished_recving", "finished_sending", "failed_recving"]))
    def a_ghost_reports(self, kind: str) -> None:
        report = self.world.report
        setattr(report, kind, (getattr(report, kind) or set()) | {"ghost"})
        self.world.step()

    @rule(pending=st.booleans())
    def frees_are_pending(self, pending: bool) -> None:
        self.world.half.frees_are_pending = pending

    # --- Invariants ---------------------------------------------------------------------

    @invariant()
    def what_is_lent_is_not_touched(self) -> None:
        for block_ids, content in self.lent.values():
            assert self.world.content(block_ids) == content

    @invariant()
    def what_a_step_in_flight_writes_is_fenced(self) -> None:
        if hasattr(self, "world"):
            self.world.assert_fenced()

    @invariant()
    def blocks_under_a_load_are_still_its_own(self) -> None:
        if not hasattr(self, "world"):
            return
        for request_id, load in self.world.half.loads.items():
            assert self.world.scheduler.kv_cache.get_block_ids(request_id) == load.tables

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.half.frees_are_pending = False
        for _ in range(3000):
            if not world.scheduler.has_requests() and not world.in_flight:
                break
            for request_id in list(world.half.loads):
                world.end_load(request_id)
            world.end_send(*self.lent)
            self.lent.clear()
            world.step_if_useful()
        world.check_at_rest()
        for request_id in world.answers:
            self._check(request_id, world.expected_output(request_id))

    def _check(self, request_id: str, expected: list[int]) -> None:
        answer = self.world.answers[request_id]
        assert answer.token_ids == expected[: len(answer.token_ids)], "a wrong token"
        script = self.scripts[request_id][0]
        match answer.reason:
            case "abort":
                assert request_id in self.aborted
            case "error":
                allowed = {"user error", "bug in alloc"}
                if self.on_failure == "fail":
                    allowed |= {"async", "sync"}
                assert script in allowed
            case "stop":
                assert answer.token_ids == expected
                assert expected[-1] in EOS_IDS
            case "length":
                assert answer.token_ids == expected
            case _:
                raise AssertionError(answer)


SchedulerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
