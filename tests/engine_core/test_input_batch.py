"""The rank's rows compared with a reference that uses plain lists."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.api import SamplingParams
from baton.engine.forward_context import build_attention_metadata
from baton.engine.runner.input_batch import InputBatch
from baton.engine.step import CachedRequestData, NewRequestData, SchedulerOutput

BLOCK = 4


@dataclass
class Twin:
    """One request as lists."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    is_known: bool = False
    is_preempted: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class World:
    """A scheduler that makes arbitrary legal decisions."""

    def __init__(self, config, seed: int) -> None:
        self.batch = InputBatch(config)
        self.draw = random.Random(seed)
        self.twins: dict[str, Twin] = {}
        self.num_made = 0
        self.finished: set[str] = set()

    def add(self) -> None:
        prompt = [self.draw.randrange(500) for _ in range(self.draw.randrange(1, 20))]
        self.twins[f"r{self.num_made}"] = Twin(prompt)
        self.num_made += 1

    def finish(self) -> None:
        if self.twins:
            req_id = self.draw.choice(sorted(self.twins))
            del self.twins[req_id]
            self.finished.add(req_id)

    def preempt(self) -> None:
        running = [twin for twin in self.twins.values() if twin.is_known]
        if running:
            twin = self.draw.choice(running)
            twin.is_preempted, twin.blocks, twin.num_computed = True, [], 0

    def drop_last_token(self) -> None:
        """Drops a sampled token, as the scheduler does after a failed synchronous load."""
        with_output = [twin for twin in self.twins.values() if twin.output and not twin.is_preempted]
        if with_output:
            twin = self.draw.choice(with_output)
            twin.output.pop()
            twin.num_computed = min(twin.num_computed, len(twin.tokens) - 1)

    def step(self) -> None:
        output = SchedulerOutput(finished_req_ids=self.finished)
        self.finished = set()
        chosen = [req_id for req_id in self.twins if self.draw.random() < 0.8]
        for req_id in chosen:
            self.schedule(output, req_id)
        self.batch.update(output)
        if not chosen:
            return
        twins = [self.twins[req_id] for req_id in chosen]
        scheduled = list(output.num_scheduled_tokens.values())
        got = self.batch.step_input(output.num_scheduled_tokens)
        expected = build_attention_metadata(
            [twin.num_computed for twin in twins], scheduled, [twin.blocks for twin in twins], BLOCK
        )
        for name in (
            "query_start_loc_np",
            "seq_lens_np",
            "slot_mapping_np",
            "positions_np",
        ):
            np.testing.assert_array_equal(getattr(got.attn_metadata, name), getattr(expected, name))
        for row, table, seq_len in zip(
            got.attn_metadata.block_table_np, expected.block_table_np, expected.seq_lens_np, strict=True
        ):
            used = -(-seq_len // BLOCK)
            assert row[:used].tolist() == table[:used].tolist()
        for name in ("num_actual_tokens", "num_reqs", "max_query_len", "max_seq_len", "block_size"):
            assert getattr(got.attn_metadata, name) == getattr(expected, name)
        assert got.token_ids.tolist() == [
            token
            for twin, count in zip(twins, scheduled, strict=True)
            for token in twin.tokens[twin.num_computed : twin.num_computed + count]
        ]
        sampled = [
            index
            for index, (twin, count) in enumerate(zip(twins, scheduled, strict=True))
            if twin.num_computed + count == len(twin.tokens)
        ]
        assert got.sampled_index.tolist() == sampled
        assert got.sampled_positions.tolist() == [len(twins[index].tokens) for index in sampled]
        for twin, count in zip(twins, scheduled, strict=True):
            twin.num_computed += count
        fresh = [self.draw.randrange(500) for _ in sampled]
        self.batch.append(got.sampled_rows, fresh)
        for index, token in zip(sampled, fresh, strict=True):
            twins[index].output.append(token)

    def schedule(self, output: SchedulerOutput, req_id: str) -> None:
        twin = self.twins[req_id]
        left = len(twin.tokens) - twin.num_computed
        count = self.draw.randint(1, left) if self.draw.random() < 0.5 else left
        num_missing = -(-(twin.num_computed + count) // BLOCK) - len(twin.blocks)
        fresh = [self.draw.randrange(128) for _ in range(max(0, num_missing))]
        twin.blocks += fresh
        output.num_scheduled_tokens[req_id] = count
        if not twin.is_known:
            twin.is_known = True
            output.scheduled_new_reqs.append(
                NewRequestData(req_id, twin.prompt, SamplingParams(), (list(twin.blocks),), twin.num_computed)
            )
            return
        cached: CachedRequestData = output.scheduled_cached_reqs
        cached.req_ids.append(req_id)
        cached.num_computed_tokens.append(twin.num_computed)
        cached.num_output_tokens.append(len(twin.output))
        if twin.is_preempted:
            twin.is_preempted = False
            cached.resumed_req_ids.add(req_id)
            cached.all_token_ids[req_id] = twin.tokens
            cached.new_block_ids.append((list(twin.blocks),))
        else:
            cached.new_block_ids.append((fresh,) if fresh else None)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    verbs=st.lists(
        st.sampled_from(["add", "add", "step", "step", "step", "finish", "preempt", "drop_last_token"]),
        max_size=60,
    ),
)
def test_rows_hold_what_the_scheduler_told(make_config, seed: int, verbs: list[str]) -> None:
    world = World(make_config(), seed)
    for verb in verbs:
        getattr(world, verb)()
    world.step()
    assert len(world.batch) == sum(twin.is_known for twin in world.twins.values())


def test_more_requests_than_the_first_capacity_find_room(make_config) -> None:
    world = World(make_config(), 7)
    for _ in range(70):
        world.add()
        world.step()
    assert world.batch._tokens.shape[0] >= len(world.batch) > 16


def test_tokens_without_a_block_are_an_assertion_error(make_config) -> None:
    batch = InputBatch(make_config())
    batch.update(
        SchedulerOutput(scheduled_new_reqs=[NewRequestData("a", [1] * 5, SamplingParams(), ([3],), 0)])
    )
    with pytest.raises(AssertionError, match="beyond its blocks"):
        batch.step_input({"a": 5})


def test_penalties_forget_a_dropped_token(make_config) -> None:
    batch = InputBatch(make_config())
    params = SamplingParams(frequency_penalty=1.0)
    batch.update(SchedulerOutput(scheduled_new_reqs=[NewRequestData("a", [1, 2], params, ([3],), 0)]))
    rows = batch.step_input({"a": 2}).sampled_rows
    [state] = batch.sampling_rows(rows)
    assert state.counts is not None
    state.counts.add(9)
    batch.append(rows, [9])
    cached = CachedRequestData(
        req_ids=["a"], new_block_ids=[None], num_computed_tokens=[0], num_output_tokens=[0]
    )
    batch.update(SchedulerOutput(scheduled_cached_reqs=cached))
    assert dict(zip(state.counts.tokens.tolist(), state.counts.counts.tolist(), strict=True)) == {1: 0, 2: 0}
