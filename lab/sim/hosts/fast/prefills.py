"""P of a host: prompts are computed in steps, lent when they are complete, and freed.

    add --> waiting --step: chunk, chunk, ...--> finished --> lent --> freed
               ^            |
               +-preempted--+

One step runs at a time and computes a chunk of each prompt that finds room. A preempted prompt frees its
blocks and starts again. Blocks that a window has left are freed before the next chunk and at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from baton.core.ids import BlockId, TransferId
from baton.core.kv_groups import NULL_BLOCK_ID
from baton.core.prefilled import PrefilledTokens
from baton.core.transfer_params import CONTINUE
from baton.engine.api import SamplingParams
from baton.engine.request import RequestStatus
from baton.engine.step import NewRequestData, SchedulerOutput
from baton.protocol.ticket import open_ticket
from lab.sim.checkers import bounded, held
from lab.sim.hosts.fast.facts import HostRequest, Landing, Lent
from lab.sim.hosts.fast.memory import NUM_LAYERS, Tables
from lab.sim.hosts.fast.model import TURN_KEPT_S, tokens_of
from lab.sim.kernel.wire import KEY

if TYPE_CHECKING:
    from lab.sim.hosts.fast.host import Host

TRIES_MAX = 12  # Attempts for a chunk that finds no room.
CHUNK_MEAN_S = 1.0
CHUNK_MAX_S = 4.0  # Otherwise a healed world might not be done in time.
STALL_S = 20.0  # Longer than any peer waits.
SAMPLING = SamplingParams(max_tokens=1)


@dataclass(slots=True, eq=False)
class Prefill:
    """One request that is computed here, to be decoded elsewhere."""

    request: HostRequest
    prompt: int
    transfer_id: TransferId
    on_ticket: Callable[[dict[str, Any]], None]
    run: Lent  # What it holds now.
    told: Tables = ()  # The request's tables, as the half sees them.
    has_begun: bool = False  # True: it has run in some step.
    is_running: bool = False  # True: it ran in the last step and was not preempted since.
    mean_s: float = CHUNK_MEAN_S
    num_done: int = 0
    kv: int = 0  # Content that the step writes: that of the weights with which it began.
    num_tries: int = 0
    is_aborted: bool = False
    is_over: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids)


@dataclass(slots=True, eq=False)
class _Step:
    number: int  # The half's number of the step; 0: the half does not count it.
    chunks: list[tuple[Prefill, Lent, int]] = field(default_factory=list)  # Each with its number of tokens.


class Prefills:
    def __init__(self, host: Host) -> None:
        self._host, self._world = host, host.world
        self._num_requests = 0
        self._step: _Step | None = None  # The step in flight.
        self._is_due = False
        self.open: list[Prefill] = []
        self.lent: dict[str, Lent] = {}  # Loans by request id.

    def add(
        self,
        prompt: int,
        num_tokens: int,
        transfer_id: TransferId,
        request_id: str,
        on_ticket: Callable[[dict[str, Any]], None],
        *,
        continues: bool,
    ) -> Prefill | None:
        """Take a prefill leg. None: the host drains. `continues`: the answer goes on after P's token."""
        host = self._host
        if host.is_draining:
            self._world.count("P drains")
            return None
        self._num_requests += 1
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        if continues:
            params[CONTINUE] = True
        told = prompt if host.cluster.parts.prompts_differ else 0
        request = HostRequest(f"{request_id}-p{self._num_requests}", tokens_of(told, num_tokens), params)
        prefill = Prefill(request, prompt, transfer_id, on_ticket, Lent(prompt, transfer_id))
        self.open.append(prefill)
        host.half.on_new_request(request)
        self._schedule_in(self._world.spread(0.05))
        return prefill

    def abort(self, prefill: Prefill) -> None:
        """End the prefill, after the step that runs, as an engine does."""
        if prefill.is_over:
            return
        self._world.count("prefill aborted")
        if self._step is None:
            self._end(prefill, RequestStatus.FINISHED_ABORTED)
        else:
            prefill.is_aborted = True

    # --- Steps ------------------------------------------------------------------------------------

    def _schedule_in(self, delay_s: float) -> None:
        if self._step is None and not self._is_due:
            self._is_due = True
            self._world.after(delay_s, lambda: self._host.when_awake(self._schedule))

    def _schedule(self) -> None:
        """Put a step together and begin it."""
        self._is_due = False
        output, step = SchedulerOutput(), _Step(0)
        for prefill in list(self.open):
            self._schedule_one(prefill, output, step)
        if not step.chunks and not output.preempted_req_ids:
            if self.open:
                self._schedule_in(self._world.spread(0.5))
            return
        self._step = step
        metadata = self._host.begin_step(output)
        step.number = metadata.step
        if metadata.wants_report:
            self._host.step()
        world, faults = self._world, self._world.faults
        mean_s = max((prefill.mean_s for prefill, _, _ in step.chunks), default=0.0)
        took_s = min(world.spread(mean_s), CHUNK_MAX_S)
        if world.chance(faults.stall):
            world.count("prefill stalls")
            took_s += STALL_S
        reports_layers = metadata.layer_reports is not None
        if reports_layers and world.chance(faults.layerwise):
            world.after(took_s / 2, lambda: self._host.when_awake(partial(self._layer_computed, step)))
        world.after(took_s, lambda: self._host.when_awake(partial(self._computed, step)))

    def _schedule_one(self, prefill: Prefill, output: SchedulerOutput, step: _Step) -> None:
        world, faults = self._world, self._world.faults
        request_id = prefill.request.request_id
        if prefill.is_running and world.chance(faults.preempt):
            return self._preempt(prefill, output)
        prefill.kv = self._host.kv_of(prefill.prompt)
        left = prefill.num_tokens - prefill.num_done
        count = 1 if world.chance(faults.chunked) else left
        num_hits = 0
        can_hit = not (self._host.cluster.has_states and self._host.cluster.states_stay)
        if can_hit and not prefill.num_done and count < left and world.chance(faults.prefix_hit):
            world.count("P had the beginning")
            num_hits = 1
        self._drop_outside_windows(prefill)
        tables = self._allocate(prefill, num_hits, count)
        if tables is None:
            prefill.num_tries += 1
            if prefill.num_tries > TRIES_MAX:
                self._end(prefill, RequestStatus.FINISHED_ERROR)
            elif prefill.is_running:
                self._preempt(prefill, output)
            return
        prefill.run.tables = _joined(prefill.run.tables, tables)
        prefill.told = _joined(prefill.told, tables)
        if num_hits:
            self._write(prefill, 0, num_hits, NUM_LAYERS)
            prefill.num_done = num_hits
        lists = _lists(tables)
        if not prefill.has_begun:
            output.scheduled_new_reqs.append(
                NewRequestData(request_id, prefill.request.prompt_token_ids, SAMPLING, lists, num_hits)
            )
        else:
            cached = output.scheduled_cached_reqs
            cached.req_ids.append(request_id)
            cached.new_block_ids.append(lists)
            cached.num_computed_tokens.append(prefill.num_done)
            if not prefill.is_running:
                cached.resumed_req_ids.add(request_id)
        prefill.has_begun = prefill.is_running = True
        output.num_scheduled_tokens[request_id] = count
        output.total_num_scheduled_tokens += count
        step.chunks.append((prefill, prefill.run, count))

    def _layer_computed(self, step: _Step) -> None:
        """The first layer of each chunk is in memory. All ranks report it."""
        if self._step is not step:
            return  # The process stood still until the step had ended.
        reports = self._host.layer_reports
        assert reports is not None
        for prefill, _, count in step.chunks:
            self._write(prefill, prefill.num_done, prefill.num_done + count, 1)
        self._world.count("told of a layer")
        for rank in range(self._host.num_ranks):
            reports.on_report(rank, step.number, 1)
        self._host.step()

    def _computed(self, step: _Step) -> None:
        self._step = None
        for prefill, _, count in step.chunks:
            end = prefill.num_done + count
            self._write(prefill, prefill.num_done, end, NUM_LAYERS)
            prefill.num_done = prefill.request.num_computed_tokens = end
        if step.number:
            self._host.step(step.number)
        for prefill in list(self.open):
            if prefill.is_aborted:
                self._end(prefill, RequestStatus.FINISHED_ABORTED)
        for prefill, _, _ in step.chunks:
            if prefill.num_done == prefill.num_tokens and not prefill.is_over:
                failed = self._world.chance(self._world.faults.prefill_fails)
                self._end(prefill, RequestStatus.FINISHED_ERROR if failed else RequestStatus.FINISHED_STOPPED)
        if self.open:
            self._schedule_in(0.0)

    def _preempt(self, prefill: Prefill, output: SchedulerOutput) -> None:
        pool, run = self._host.pool, prefill.run
        self._world.count("preempted")
        self._world.note(self._host.name, f"preempts prompt {prefill.prompt} {run.tables}")
        output.preempted_req_ids.add(prefill.request.request_id)
        # Reversed, so that the pool hands them out in the same order.
        pool.free(pool.held(run.tables)[::-1], run)
        prefill.run, prefill.told = Lent(prefill.prompt, prefill.transfer_id), ()
        prefill.num_done, prefill.is_running = 0, False
        prefill.mean_s = self._world.rng.choice([0.01, CHUNK_MEAN_S])  # Some of it may be cached now.

    # --- The end ----------------------------------------------------------------------------------

    def _end(self, prefill: Prefill, status: RequestStatus) -> None:
        host, world, run = self._host, self._world, prefill.run
        prefill.is_over = True
        self.open.remove(prefill)
        self._drop_outside_windows(prefill)
        request = prefill.request
        request.status = status
        if (request.kv_transfer_params or {}).get(CONTINUE) and status is RequestStatus.FINISHED_STOPPED:
            request.prefilled_tokens = PrefilledTokens((prefill.prompt,))
        tables = _lists(prefill.told) or ([],) * len(host.pool.groups)
        is_lent, params = host.half.request_finished_all_groups(request, tables)
        if params is None:
            world.count("prefill failed")
            host.pool.free(host.pool.held(run.tables), run)
            host.settle()
            return
        assert is_lent
        self._lend(request.request_id, run, params)
        host.settle()
        assert run.loan_id is not None
        if world.faults.keeps and run.loan_id.counter % 4 == 2:
            world.count("given up unless claimed")  # A reason could be that the router's client has gone.
            self._later(0.3 * (run.loan_id.counter % 7), partial(self._take_back, params))
        prefill.on_ticket(params)

    def keep(self, landing: Landing, params: dict[str, Any]) -> None:
        """D has decoded and keeps the blocks for the next turn, which may come to another engine."""
        host, world = self._host, self._world
        run = Lent(landing.prompt, landing.transfer_id, landing.tables, kept_s=TURN_KEPT_S)
        host.pool.hand_over(landing.blocks, run)
        self._lend(landing.request.request_id, run, params)
        if world.chance(0.5):
            world.count("kept, and given up unless claimed")
            self._later(world.rng.uniform(0, TURN_KEPT_S), partial(self._take_back, params))
        host.cluster.on_turn(host, landing, params)

    def _lend(self, request_id: str, run: Lent, params: dict[str, Any]) -> None:
        ticket = open_ticket(params["baton_ticket"], KEY)
        self._host.cluster.tickets[params["baton_ticket"]] = ticket
        run.loan_id, run.transfer_id, run.lent_at = ticket.loan_id, ticket.transfer_id, self._world.now
        self.lent[request_id] = run
        if not self._host.cluster.parts.keeps_lent_states:
            self._later(0.5, partial(self._overwrite, run))
        self._world.note(self._host.name, f"lends {run.loan_id} prompt {run.prompt} blocks {run.tables}")

    def _take_back(self, params: dict[str, Any]) -> None:
        self._host.half.take_back(params)
        self._host.step()

    def loan_freed(self, request_id: str) -> None:
        """The half reports the end of a loan."""
        host, run = self._host, self.lent.pop(request_id)
        self._world.count("loans freed")
        assert run.loan_id is not None
        held.check_free(host, run.loan_id)
        bounded.check_loan_freed(host, run)
        host.pool.free(host.pool.held(run.tables), run)

    # --- Parts ------------------------------------------------------------------------------------

    def _allocate(self, prefill: Prefill, num_hits: int, count: int) -> Tables | None:
        """Blocks for the next `num_hits` tokens, which are cached, and `count`, which are computed.

        Only the last state of either part takes a block.
        """
        pool, run, stays = self._host.pool, prefill.run, self._host.cluster.states_stay
        lengths = [length for length in (num_hits, count) if length]
        num_states = len(lengths) if not stays else 0 if run.tables else 1
        tables = pool.allocate_tables(
            [num_states if group.is_state else num_hits + count for group in pool.groups], run
        )
        if tables is None:
            return None
        found = list(tables)
        for index, group in enumerate(pool.groups):
            if group.is_state:
                blocks = tables[index] or run.tables[index][-1:]
                found[index] = tuple(
                    block
                    for length, last in zip(lengths, blocks, strict=True)
                    for block in (*(BlockId(NULL_BLOCK_ID),) * (length - 1), last)
                )
        if stays and run.tables:
            run.tables, prefill.told = (self._without_states(one) for one in (run.tables, prefill.told))
        return tuple(found)

    def _without_states(self, tables: Tables) -> Tables:
        return tuple(
            (BlockId(NULL_BLOCK_ID),) * len(table) if group.is_state else table
            for group, table in zip(self._host.pool.groups, tables, strict=True)
        )

    def _write(self, prefill: Prefill, first: int, end: int, num_layers: int) -> None:
        """Write the first `num_layers` layers, each where its group's table says."""
        pool = self._host.pool
        for number, (group, table) in enumerate(zip(pool.groups, prefill.run.tables, strict=True)):
            for index in range(end - 1 if group.is_state else first, end):
                pool.write(table[index], prefill.kv, index, number, num_layers)

    def _overwrite(self, run: Lent) -> None:
        """Compute one more token into a lent state (a mutant)."""
        pool = self._host.pool
        for number, (group, table) in enumerate(zip(pool.groups, run.tables, strict=True)):
            if group.is_state and pool.owner[table[-1]] is run:
                pool.write(table[-1], run.prompt, len(table), number)

    def _drop_outside_windows(self, prefill: Prefill) -> None:
        pool, run, early = self._host.pool, prefill.run, self._host.cluster.parts.drops_early
        if not run.tables:
            return
        holes, told = [], []
        for group, table, as_told in zip(pool.groups, run.tables, prefill.told, strict=True):
            num_gone = group.first_kept(prefill.num_done, 1)
            told.append((BlockId(NULL_BLOCK_ID),) * num_gone + as_told[num_gone:])
            if group.window is not None:
                num_gone = min(num_gone + early, len(table))
            gone = pool.held((table[:num_gone],)) if num_gone else ()
            self._world.count("a window moves on", bool(gone) and prefill.num_done < prefill.num_tokens)
            pool.free(gone, run)
            holes.append((BlockId(NULL_BLOCK_ID),) * num_gone + table[num_gone:])
        run.tables, prefill.told = tuple(holes), tuple(told)

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._world.after(delay_s, lambda: self._host.when_awake(action))


def _joined(tables: Tables, more: Tables) -> Tables:
    return tuple(old + new for old, new in zip(tables, more, strict=True)) if tables else more


def _lists(tables: Tables) -> tuple[list[int], ...]:
    return tuple([list[int](table) for table in tables])
