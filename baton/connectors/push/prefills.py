"""Prefills of P while they compute: how much of each prompt is ready in memory, and in which blocks.

    expect --> EXPECTED
    EXPECTED, PAUSED --scheduled--> COMPUTING    what the cache had is ready at once; the rest after its step
    COMPUTING --preempted, rolled back--> PAUSED     what was announced is void: a new run
    any --finished--> (lent with a ticket, or failed)

Consumers may read what is ready while the rest computes. Only whole blocks are announced, so that no reader
touches a block that is still being written; the tail goes with the ticket.

In layers with a window only those blocks are announced that tokens after the prompt see: they stay while the
prompt computes, and all blocks before them are freed. If the request decodes on here, the window leaves them
too, and what was announced is void.

A recurrent state is replaced as the prompt computes. It is not announced, and goes with the ticket.

The work of a step is done when every rank has reported *that* step, by number: a host that schedules ahead is
some steps further by then. In between, layers are announced as ranks report them.

"What the cache had" is less than what the host calls computed: hosts let a prompt share the blocks that
another one computes in the same step. Those are ready when that step is done. With a host that schedules
ahead it may be an earlier step that is still in flight, so there the steps of all requests are remembered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.connectors.pull.control.agent import PullAgent
from baton.contract import host
from baton.core.ids import BlockId, TransferId
from baton.core.kv_groups import NULL_BLOCK_ID, KVCacheGroup, is_hybrid
from baton.protocol.messages import BlockTables


@dataclass(slots=True)
class _Prefill:
    transfer_id: TransferId
    num_prompt_tokens: int
    # Index, in each KV-cache group, of the first block that stays until the prompt is computed.
    first_blocks: tuple[int, ...]
    # Block ids of each KV-cache group, from token 0 on.
    tables: list[list[int]] = field(default_factory=list)
    num_ready: int = 0  # Tokens of this run, as announced.
    is_computing: bool = False


@dataclass(slots=True)
class _Step:
    """A step in flight: how far it takes each prompt."""

    # Request id, prefill, and number of its tokens that are computed once the step is done.
    reaches: list[tuple[str, _Prefill, int]] = field(default_factory=list)
    # Prefills that begin, and the number of tokens that the host calls computed.
    begun: list[tuple[_Prefill, int]] = field(default_factory=list)
    written: set[int] = field(default_factory=set)  # Blocks that the step computes, in whole or in part.
    writes_others: bool = False  # The step also writes blocks of requests whose tables are not known here.
    layers_by_rank: dict[int, int] = field(default_factory=dict)
    num_layers: int = 0  # Computed by every rank, as announced.


class Prefills:
    """Prefills that consumers may read along, and the steps in flight. Calls need the agent's lock.

    Args:
        agent: the agent whose machine `prefills` is told what is ready.
        block_tokens: tokens of a block.
        num_ranks: number of ranks that report each step and each layer.
        groups: KV-cache groups of the layers; by default all layers share one table.
        host_schedules_ahead: the host puts a step together while an earlier one computes.
    """

    def __init__(
        self,
        agent: PullAgent,
        block_tokens: int,
        num_ranks: int,
        *,
        groups: tuple[KVCacheGroup, ...] = (KVCacheGroup(()),),
        host_schedules_ahead: bool = False,
    ) -> None:
        self._agent = agent
        self._machine = agent.prefills
        self._block_tokens = block_tokens
        self._num_ranks = num_ranks
        self._groups = groups
        self._is_hybrid = is_hybrid(groups)
        self._host_schedules_ahead = host_schedules_ahead
        self._prefills: dict[str, _Prefill] = {}  # Prefills by request id.
        self._steps: dict[int, _Step] = {}  # Steps in flight, oldest first.

    def expect(self, request_id: str, transfer_id: TransferId, num_prompt_tokens: int) -> None:
        firsts = tuple(
            0 if group.is_state else group.first_kept(num_prompt_tokens, self._block_tokens)
            for group in self._groups
        )
        self._prefills[request_id] = _Prefill(transfer_id, num_prompt_tokens, firsts)

    def fail_all(self, reason: str, now: float) -> None:
        """Fail all prefills, because their state is not reliable any more. Consumers that wait compute."""
        for prefill in self._prefills.values():
            self._agent.carry_out(self._machine.failed(prefill.transfer_id, reason, now), now)
        self._prefills.clear()
        self._steps.clear()

    def outdate_all(self, now: float) -> None:
        """The weights have changed. Steps in flight go on; what they compute is not announced."""
        for prefill in self._prefills.values():
            self._agent.carry_out(self._machine.outdated(prefill.transfer_id, now), now)
        self._prefills.clear()

    def ended(self, request_id: str) -> TransferId | None:
        """The host has finished the request."""
        prefill = self._prefills.pop(request_id, None)
        return prefill.transfer_id if prefill is not None else None

    # --- Steps ---------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no step concerns a consumer: the step is done before the next prompt comes."""
        return not self._prefills and not self._host_schedules_ahead

    def scheduled(self, step: int, output: host.SchedulerOutput, now: float) -> bool:
        """The host has put a step together. True: `step_done` is to be called for it."""
        if self.is_idle:
            return False
        if not output.num_scheduled_tokens and not output.preempted_req_ids:
            return False
        # Sorted: the numbers of runs must not depend on the order of a set.
        for request_id in sorted(output.preempted_req_ids or ()):
            self._pause(request_id, now)
        work, num_new = _Step(), output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            end = new.num_computed_tokens + num_new.get(new.req_id, 0)
            self._start(work, new.req_id, new.block_ids, new.num_computed_tokens, end, now)
        cached = output.scheduled_cached_reqs
        for request_id, fresh, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            end = num_computed + num_new.get(request_id, 0)
            if request_id in cached.resumed_req_ids:
                self._start(work, request_id, fresh or (), num_computed, end, now)
            else:
                self._go_on(work, request_id, fresh or (), num_computed, end, now)
        if not work.reaches and not (self._host_schedules_ahead and (work.written or work.writes_others)):
            return False
        self._steps[step] = work
        for prefill, num_computed in work.begun:
            self._announce(prefill, self._num_filled(prefill, num_computed), now)
        return True

    def step_done(self, step: int, now: float) -> None:
        """Every rank has reported the step."""
        if not self._steps:
            return
        for done in [number for number in self._steps if number <= step]:
            for request_id, prefill, num_tokens in self._steps.pop(done).reaches:
                if self._prefills.get(request_id) is prefill and prefill.is_computing:
                    self._announce(prefill, num_tokens, now)

    def layers_done(self, rank: int, step: int, num_layers: int, now: float) -> None:
        """One rank has computed so many layers of a step that is in flight."""
        work = self._steps.get(step)
        if work is None:
            return
        work.layers_by_rank[rank] = max(num_layers, work.layers_by_rank.get(rank, 0))
        if len(work.layers_by_rank) < self._num_ranks:
            return
        num_layers = min(work.layers_by_rank.values())
        if num_layers <= work.num_layers:
            return
        work.num_layers = num_layers
        for request_id, prefill, num_tokens in work.reaches:
            if self._prefills.get(request_id) is prefill and prefill.is_computing:
                self._announce(prefill, num_tokens, now, num_layers=num_layers)

    # --- Parts ---------------------------------------------------------------------------------

    def _start(
        self,
        work: _Step,
        request_id: str,
        tables: Sequence[Sequence[int]],
        num_computed: int,
        end: int,
        now: float,
    ) -> None:
        """The request begins, or begins again, in this step; the step computes its tokens up to `end`."""
        tables = self._without_states(tables)
        self._write(work, tables, num_computed, end)
        if (prefill := self._prefills.get(request_id)) is None:
            return
        self._pause(request_id, now)
        prefill.is_computing = True
        prefill.tables = [list(table) for table in tables]
        prefill.num_ready = 0
        work.begun.append((prefill, num_computed))
        work.reaches.append((request_id, prefill, end))

    def _go_on(
        self,
        work: _Step,
        request_id: str,
        fresh: Sequence[Sequence[int]],
        num_computed: int,
        end: int,
        now: float,
    ) -> None:
        """Like `_start`, for a request that was in a step before. `fresh`: new blocks of its tables."""
        if (prefill := self._prefills.get(request_id)) is None:
            work.writes_others = True
            return
        for table, blocks in zip(prefill.tables, self._without_states(fresh), strict=False):
            table.extend(blocks)
        self._write(work, prefill.tables, num_computed, end)
        if self._leaves(prefill, num_computed):
            self._make_void(prefill, now)
        work.reaches.append((request_id, prefill, end))

    def _without_states(self, tables: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        # A request without new blocks has no table.
        return [() if group.is_state else table for group, table in zip(self._groups, tables, strict=False)]

    def _write(self, work: _Step, tables: Iterable[Sequence[int]], num_computed: int, end: int) -> None:
        size = self._block_tokens
        for table in tables:
            work.written.update(table[num_computed // size : -(-end // size)])

    def _num_filled(self, prefill: _Prefill, num_computed: int) -> int:
        """Number of tokens that the host calls computed, up to the first that a step in flight computes."""
        if any(work.writes_others for work in self._steps.values()):
            return 0  # The prefill may share unknown blocks, which are announced when that step is done.
        last = -(-num_computed // self._block_tokens)
        for table, first in zip(prefill.tables, prefill.first_blocks, strict=True):
            for index in range(first, min(last, len(table))):
                if any(table[index] in work.written for work in self._steps.values()):
                    last = index
                    break
        return min(num_computed, last * self._block_tokens)

    def _pause(self, request_id: str, now: float) -> None:
        prefill = self._prefills.get(request_id)
        if prefill is None or not prefill.is_computing:
            return
        prefill.tables = []
        self._make_void(prefill, now)

    def _leaves(self, prefill: _Prefill, num_computed: int) -> bool:
        """Whether a window moves on from what tokens after the prompt see."""
        if not prefill.is_computing or num_computed < prefill.num_prompt_tokens:
            return False
        return any(
            group.first_kept(num_computed + 1, self._block_tokens) > first  # A host may keep one token fewer.
            for group, first in zip(self._groups, prefill.first_blocks, strict=True)
            if not group.is_state
        )

    def _make_void(self, prefill: _Prefill, now: float) -> None:
        prefill.is_computing = False
        self._agent.carry_out(self._machine.preempted(prefill.transfer_id, now), now)
        for work in self._steps.values():
            work.reaches = [reach for reach in work.reaches if reach[1] is not prefill]

    def _whole(self, prefill: _Prefill, num_tokens: int) -> int:
        num_tokens = min(num_tokens, prefill.num_prompt_tokens)
        return num_tokens - num_tokens % self._block_tokens

    def _announce(
        self, prefill: _Prefill, num_tokens: int, now: float, *, num_layers: int | None = None
    ) -> None:
        """`num_layers`: number of layers that are ready for the tokens up to `num_tokens`; None: all."""
        reached = self._whole(prefill, num_tokens)
        if reached <= prefill.num_ready or (blocks := self._blocks(prefill, reached)) is None:
            return
        is_whole = num_layers is None
        if is_whole:
            prefill.num_ready = reached
        sends = self._machine.progress(
            prefill.transfer_id,
            prefill.num_ready,
            blocks,
            now,
            partial_tokens=0 if is_whole else reached,
            partial_layers=num_layers or 0,
            # () means that all tables begin with token 0.
            first_blocks=prefill.first_blocks if any(prefill.first_blocks) else (),
        )
        self._agent.carry_out(sends, now)

    def _blocks(self, prefill: _Prefill, num_tokens: int) -> BlockTables | None:
        """None: a window has left some of them, for example when the request was resumed while it decoded."""
        end = num_tokens // self._block_tokens
        tables = tuple(
            tuple(BlockId(block_id) for block_id in table[first:end])
            for table, first in zip(prefill.tables, prefill.first_blocks, strict=True)
        )
        if self._is_hybrid and any(NULL_BLOCK_ID in table for table in tables):
            return None
        return tables
