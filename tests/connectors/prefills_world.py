"""Surroundings of `Prefills` for tests: steps as a scheduler builds them, and the agent that is notified."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.core.ids import TransferId
from baton.engine.step import NewRequestData, SchedulerOutput


@dataclass(frozen=True)
class Progress:
    """What `PushProducer.progress` is told."""

    transfer_id: TransferId
    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    partial_tokens: int
    partial_layers: int
    first_blocks: tuple[int, ...]


@dataclass
class FakeAgent:
    """A PullAgent and its PushProducer. Records what it is told; of progress, what `noted` makes of it."""

    noted: Callable[[Progress], Any]
    told: list[Any] = field(default_factory=list)

    @property
    def prefills(self) -> "FakeAgent":
        return self

    def carry_out(self, effects: Sequence[Any], now: float) -> None:
        assert not effects

    def progress(
        self,
        transfer_id: TransferId,
        num_tokens: int,
        block_ids: tuple[tuple[int, ...], ...],
        now: float,
        *,
        partial_tokens: int = 0,
        partial_layers: int = 0,
        first_blocks: tuple[int, ...] = (),
    ) -> Sequence[Any]:
        progress = Progress(transfer_id, num_tokens, block_ids, partial_tokens, partial_layers, first_blocks)
        self.told.append(self.noted(progress))
        return ()

    def preempted(self, transfer_id: TransferId, now: float) -> Sequence[Any]:
        self.told.append("preempted")
        return ()

    def failed(self, transfer_id: TransferId, reason: str, now: float) -> Sequence[Any]:
        self.told.append(reason)
        return ()


def first_step(request_id: str, num_cached: int, chunk: int, *tables: Sequence[int]) -> SchedulerOutput:
    """`tables`: block ids of each KV-cache group."""
    block_ids = tuple(list(table) for table in tables)
    new = NewRequestData(request_id, [], None, block_ids, num_cached)  # type: ignore[arg-type]
    return SchedulerOutput(scheduled_new_reqs=[new], num_scheduled_tokens={request_id: chunk})


def joined(*steps: SchedulerOutput) -> SchedulerOutput:
    """One step of the requests of all."""
    output = SchedulerOutput()
    for step in steps:
        output.scheduled_new_reqs += step.scheduled_new_reqs
        output.num_scheduled_tokens |= step.num_scheduled_tokens
        cached, more = output.scheduled_cached_reqs, step.scheduled_cached_reqs
        cached.req_ids += more.req_ids
        cached.new_block_ids += more.new_block_ids
        cached.num_computed_tokens += more.num_computed_tokens
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    return output


def later_step(
    request_id: str, num_computed: int, chunk: int, *fresh: Sequence[int], resumed: bool = False
) -> SchedulerOutput:
    """`fresh`: blocks that are new in the tables, of each group; none given: no table has changed."""
    output = SchedulerOutput(num_scheduled_tokens={request_id: chunk})
    cached = output.scheduled_cached_reqs
    cached.req_ids.append(request_id)
    cached.new_block_ids.append(tuple(list(table) for table in fresh) if fresh else None)
    cached.num_computed_tokens.append(num_computed)
    if resumed:
        cached.resumed_req_ids.add(request_id)
    return output
