"""Random answers, ends and exceptions of two children on two ranks, compared with the rules.

The reference knows no metadata, reports or aggregation. It tracks each child's loads and loans, counts the
ranks that have reported, and derives what the host must get.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.contract import KVConnectorTransferResults
from tests.connectors.multi_world import BLOCK, MultiWorld, Step, request_of
from tests.connectors.pull_world import FakeBlocks

CHILDREN = ("a", "b")
NUM_RANKS = 2
IN_TIME = ("handle_preemptions", "bind_connector_metadata", "start_load_kv", "wait_for_layer_load")
LATER = ("save_kv_layer", "wait_for_save", "build_connector_worker_meta")


def any_answer(draw: Random) -> Any:
    count = draw.choice([BLOCK, 2 * BLOCK, 3 * BLOCK])
    answers: list[Any] = [(0, False), (None, False), RuntimeError("bug"), (99, True)]
    return draw.choice([*answers, *[(count, is_async) for is_async in (True, False, True, True)]])


@dataclass
class Twin:
    """The expected state."""

    broken: dict[str, set[str]] = field(default_factory=dict)  # Children that have failed, by request.
    loader: dict[str, str] = field(default_factory=dict)
    arrived: dict[str, set[int]] = field(default_factory=dict)  # Ranks that have reported, by request.
    bad: set[str] = field(default_factory=set)
    # Ranks that have sent, by request and child.
    lent_by: dict[str, dict[str, set[int]]] = field(default_factory=dict)

    def choose(self, request_id: str, answers: dict[str, Any]) -> tuple[int | None, bool, str | None]:
        best: tuple[int | None, bool, str | None] = (0, False, None)
        later = False
        for child in CHILDREN:
            if child in self.broken.get(request_id, ()):
                continue
            answer = answers[child]
            if isinstance(answer, Exception) or answer[0] == 99:
                self.broken.setdefault(request_id, set()).add(child)
            elif answer[0] is None:
                later = True
            elif answer[0] and best[2] is None:
                best = (answer[0], answer[1], child)
        return (None, False, None) if later else best


class Game:
    """One run; `seed` determines every choice."""

    def __init__(self, seed: int) -> None:
        self.draw = Random(seed)
        self.world = MultiWorld(CHILDREN, NUM_RANKS)
        self.twin = Twin()
        self.count = 0
        self.live: list[str] = []  # Requests that have not finished.
        self.begun: dict[str, str] = {}  # Asynchronous loads since the last step.
        self.sync: dict[str, set[int]] = {
            child: set() for child in CHILDREN
        }  # Blocks of synchronous loads since the last step.
        self.num_bad_steps = dict.fromkeys(CHILDREN, 0)

    def play(self, num_moves: int) -> None:
        for _ in range(num_moves):
            self.draw.choice([self.a_request_arrives, self.a_request_finishes, self.a_step, self.a_step])()

    def a_request_arrives(self) -> None:
        answers = {child: any_answer(self.draw) for child in CHILDREN}
        request_id, self.count = f"r{self.count}", self.count + 1
        for child in CHILDREN:
            self.world.schedulers[child].answers[request_id] = answers[child]
        request = request_of(request_id)
        for _ in range(self.draw.randrange(1, 3)):  # Repeated queries have no effect.
            count, is_async, child = self.twin.choose(request_id, answers)
            assert self.world.half.get_num_new_matched_tokens(request, 0) == (count, is_async)
        if count is None:
            self.world.half.request_finished(request, [])
            return
        first = 100 * self.count
        self.world.half.update_state_after_alloc(request, FakeBlocks([first + i for i in range(5)]), count)
        self.live.append(request_id)
        if child is not None and is_async:
            self.twin.loader[request_id] = child
            self.twin.arrived[request_id] = set()
            self.begun[request_id] = child
        elif child is not None:
            self.sync[child] |= {first + i for i in range(count // BLOCK)}

    def a_request_finishes(self) -> None:
        if not self.live:
            return
        request_id = self.draw.choice(self.live)
        delays = {child: self.draw.random() < 0.5 for child in CHILDREN}
        self.live.remove(request_id)
        for child in CHILDREN:
            self.world.schedulers[child].at_end[request_id] = (delays[child], {child: request_id})
        is_delayed, params = self.world.half.request_finished(request_of(request_id), [])
        assert is_delayed == any(delays.values())
        assert params == dict.fromkeys(CHILDREN, request_id)
        if is_delayed:
            self.twin.lent_by[request_id] = {child: set() for child in CHILDREN if delays[child]}

    def a_step(self) -> None:
        draw = self.draw
        silent = {c for c in CHILDREN if self.num_bad_steps[c] < 2 and draw.random() < 0.1}
        for child in silent:
            self.world.schedulers[child].raises["build_connector_meta"] = RuntimeError("bug")
        expected = Step()
        loads_failed: set[str] = set()
        errors = set(silent)
        for rank in range(NUM_RANKS):
            for child in CHILDREN:
                error = self._tell_rank(draw, rank, child, expected, takes_part=child not in silent)
                if error in IN_TIME and (error != "wait_for_layer_load" or self.sync[child]):
                    loads_failed.add(child)
                if error is not None:
                    errors.add(child)
        self._draw_additions(draw, expected)
        for child in silent | loads_failed:
            expected.abandoned |= {r for r, loader in self.begun.items() if loader == child}
            expected.invalid |= self.sync[child]
        self._settle(expected)
        step = self.world.step()
        assert step == expected
        for child in CHILDREN:
            self.num_bad_steps[child] = self.num_bad_steps[child] + 1 if child in errors else 0
            self.sync[child] = set()
        self.begun = {}

    def _tell_rank(
        self, draw: Random, rank: int, child: str, expected: Step, *, takes_part: bool
    ) -> str | None:
        """Actions of this rank of this child in the step; returns the name of the method that raises."""
        worker = self.world.workers[rank][child]
        if not takes_part:
            return None
        twin = self.twin
        received, sent = self._some_ids(twin.loader), self._some_ids(twin.lent_by)
        failed = {r for r in received if draw.random() < 0.5}
        worker.results = KVConnectorTransferResults(sent, received, failed)
        worker.invalid = {draw.randrange(1, 9)} if draw.random() < 0.2 else set()
        expected.invalid |= worker.invalid
        for request_id in received:
            if twin.loader.get(request_id) == child:
                if request_id in failed and rank not in twin.arrived[request_id]:
                    twin.bad.add(request_id)
                twin.arrived[request_id].add(rank)
        for request_id in sent:
            if child in twin.lent_by.get(request_id, {}):
                twin.lent_by[request_id][child].add(rank)
        error: str | None = None
        if self.num_bad_steps[child] < 2 and draw.random() < 0.15:
            error = draw.choice([*IN_TIME, *LATER])
            worker.raises = {error}
        return error

    def _some_ids(self, known: Iterable[str]) -> set[str]:
        """Ids of any child; some are another child's, some unknown."""
        ids = [*sorted(known), "unknown"]
        return set(self.draw.sample(ids, self.draw.randrange(min(3, len(ids)) + 1)))

    def _draw_additions(self, draw: Random, expected: Step) -> None:
        """An end reported by a scheduler half counts as if every rank had reported it."""
        twin = self.twin
        for child in CHILDREN:
            if draw.random() < 0.6:
                continue
            received, sent = self._some_ids(twin.loader), self._some_ids(twin.lent_by)
            self.world.schedulers[child].adds = (set(sent), set(received))
            for request_id in received:
                if twin.loader.get(request_id) == child and len(twin.arrived[request_id]) < NUM_RANKS:
                    twin.arrived[request_id] = set(range(NUM_RANKS))
                    twin.bad.discard(request_id)  # Not every rank has reported how it ended.
            for request_id in sent:
                if child in twin.lent_by.get(request_id, {}):
                    twin.lent_by[request_id][child] = set(range(NUM_RANKS))

    def _settle(self, expected: Step) -> None:
        twin = self.twin
        for request_id, ranks in list(twin.arrived.items()):
            if len(ranks) == NUM_RANKS:
                expected.received.add(request_id)
                if request_id in twin.bad:
                    expected.failed.add(request_id)
                    twin.bad.discard(request_id)
                del twin.arrived[request_id], twin.loader[request_id]
        for request_id, by_child in list(twin.lent_by.items()):
            if all(len(ranks) == NUM_RANKS for ranks in by_child.values()):
                expected.sent.add(request_id)
                del twin.lent_by[request_id]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable()  # Thousands of contained exceptions, with their stacks.
    yield
    logging.disable(logging.NOTSET)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32 - 1))
def test_the_hosts_report_follows_the_rules(seed: int) -> None:
    Game(seed).play(num_moves=60)
