"""D of a host: from the kv_transfer_params of a decode leg to blocks in use, and free again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.core.ids import BlockId
from baton.core.kv_groups import NULL_BLOCK_ID
from baton.core.transfer_params import CONTINUE
from baton.engine.request import RequestStatus
from baton.protocol.ticket import BadTicket, Ticket, open_ticket
from lab.sim.checkers import bounded, contained, fenced, fresh
from lab.sim.hosts.fast.facts import HostRequest, Landing
from lab.sim.hosts.fast.model import tokens_of
from lab.sim.kernel.wire import KEY

if TYPE_CHECKING:
    from lab.sim.hosts.fast.host import Host

USE_MAX_S = 8.0


@dataclass(slots=True)
class Blocks:
    """A `baton.contract.host.KVCacheBlocks`."""

    tables: tuple[list[int], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.tables


class Fetches:
    def __init__(self, host: Host) -> None:
        self._host, self._world = host, host.world
        self._num_requests = 0
        self.landings: dict[str, Landing] = {}  # Fetches by request id.
        self.by_claim: dict[int, Landing] = {}

    # --- Requests ---------------------------------------------------------------------------------

    def fetch(
        self,
        params: dict[str, Any],
        prompt: int,
        num_tokens: int,
        on_end: Callable[[bool], None],
        *,
        producer: Host | None = None,
    ) -> Landing | None:
        """Take a decode leg. None: nothing is fetched for it.

        `producer`: the producer of a stream. A ticket names its own.
        """
        host, world = self._host, self._world
        ticket = self._ticket_of(params)
        if ticket is not None:
            producer = host.cluster.incarnations[ticket.producer]
        if host.is_draining or producer is None:
            if producer is None:
                self._refuse_forged(params, prompt, num_tokens)
            else:
                world.count("not admitted")
            return None
        if ticket is not None:
            covered, transfer_id = ticket.num_tokens, ticket.transfer_id
        else:
            covered, transfer_id = num_tokens, params["transfer_id"]
            if host.cluster.has_states and not params.get(CONTINUE):
                covered = max(1, covered - 1)
        landing = Landing(
            self._request(params, prompt, num_tokens),
            prompt,
            covered,
            world.rng.randint(1, covered) if world.chance(world.faults.prefix_hit) else 0,
            transfer_id,
            producer,
            "remote_port" in params and ticket is None,
            world.now,
            on_end,
            loan_id=None if ticket is None else ticket.loan_id,
            heard_at=world.now,
        )
        self.landings[landing.request.request_id] = landing
        host.half.on_new_request(landing.request)
        if world.chance(world.faults.reject):
            world.count("not admitted")
            self._forget(landing)
            return None
        if not host.half.get_num_new_matched_tokens(landing.request, 0)[0]:
            self._forget(landing)  # Refused, or failed already.
            return None
        world.count("started")
        if world.chance(world.faults.queueing) or not self._find_room(landing):
            self._wait_for_room(landing)
        return landing

    def abort(self, landing: Landing) -> None:
        if self.landings.get(landing.request.request_id) is not landing or landing.delivered:
            return
        if landing.is_open:
            landing.failed_at = self._world.now
            self._world.count("failed: aborted")
            awaits_states = self._host.cluster.has_states and not landing.has_states_read
            self._world.count(
                "aborted between attention and state", bool(landing.num_early and awaits_states)
            )
            landing.on_end(False)
        self._forget(landing)
        self._host.settle()

    def _refuse_forged(self, params: dict[str, Any], prompt: int, num_tokens: int) -> None:
        """A ticket that no engine signed. The half must refuse it."""
        request = self._request(params, prompt, num_tokens)
        self._host.half.on_new_request(request)
        contained.check_forged(self._host.half.get_num_new_matched_tokens(request, 0)[0])
        self._finish(request, (), RequestStatus.FINISHED_ABORTED)
        self._host.settle()

    def _request(self, params: dict[str, Any], prompt: int, num_tokens: int) -> HostRequest:
        self._num_requests += 1
        told = prompt if self._host.cluster.parts.prompts_differ else 0
        return HostRequest(f"d{self._num_requests}", tokens_of(told, num_tokens), params)

    def _ticket_of(self, params: dict[str, Any]) -> Ticket | None:
        text = params.get("baton_ticket")
        if text is None:
            return None
        tickets = self._host.cluster.tickets
        if text not in tickets:
            try:
                return open_ticket(text, KEY)  # The same bytes in another spelling.
            except BadTicket:
                return None
        return tickets[text]

    def _wait_for_room(self, landing: Landing) -> None:
        """The request waits in the scheduler's queue. The half keeps its claim meanwhile."""

        def look() -> None:
            if self.landings.get(landing.request.request_id) is not landing or not landing.is_open:
                return
            if self._world.chance(0.1):
                return self.abort(landing)
            if not self._find_room(landing):
                return self._wait_for_room(landing)
            self._world.count("started late")

        self._world.after(self._world.rng.uniform(0.1, 3.0), lambda: self._host.when_awake(look))

    def _find_room(self, landing: Landing) -> bool:
        """Allocate blocks for the whole prompt. Those of hits have content already."""
        host, pool = self._host, self._host.pool
        firsts = [group.first_kept(landing.num_tokens, 1) for group in pool.groups]
        tables = pool.allocate_tables([landing.num_tokens - first for first in firsts], landing)
        if tables is None:
            return False
        hole = BlockId(NULL_BLOCK_ID)
        landing.tables = tuple((hole,) * n + table for n, table in zip(firsts, tables, strict=True))
        landing.blocks = pool.held(landing.tables)
        for group, (first, table) in enumerate(zip(firsts, landing.tables, strict=True)):
            for index in range(first, landing.num_hits):
                pool.write(table[index], host.kv_of(landing.prompt), index, group)
        num_external, _ = host.half.get_num_new_matched_tokens(landing.request, landing.num_hits)
        assert num_external is not None
        blocks = Blocks(tuple(list(table) for table in landing.tables))
        host.half.update_state_after_alloc(landing.request, blocks, num_external)
        if num_external:
            host.settle()
        else:
            self._world.count("nothing to move")
            self._delivered(landing)
            host.settle()
        return True

    # --- Outcomes ---------------------------------------------------------------------------------

    def received(self, request_id: str) -> None:
        """The half reports the request as received: delivered, or free of reads after an abort."""
        landing = self.landings[request_id]
        if landing.is_open:
            self._delivered(landing)
        else:
            self._free_target(landing)

    def load_failed(self, request_id: str) -> None:
        """The half reports a failed load. The engine would compute the prompt; here its blocks are freed."""
        landing = self.landings[request_id]
        self.look_for_failures()
        self._free_target(landing)

    def look_for_failures(self) -> None:
        half = self._host.half
        for landing in [landing for landing in self.landings.values() if landing.is_open]:
            reason = half.get_load_failure(landing.request.request_id)
            if reason is None:
                continue
            bounded.check_failure(self._host, landing)
            contained.check_failure(self._host, landing, reason)
            landing.failed_at = self._world.now
            landing.on_end(False)
            if not landing.blocks:
                self._forget(landing)

    def _delivered(self, landing: Landing) -> None:
        host = self._host
        bounded.check_outcome(host, landing)
        landing.delivered, landing.kv = True, host.kv_of(landing.prompt)
        landing.request.num_computed_tokens = landing.num_tokens
        fenced.check_delivery(host.cluster.reads.live, landing)
        fresh.check_delivery(host, landing)
        self._world.count("delivered")
        self._world.count("delivered to cache groups", len(landing.blocks) != landing.num_tokens)
        landing.on_end(True)
        used_s = min(USE_MAX_S, self._world.spread(host.cluster.use_mean_s))
        self._world.after(used_s, lambda: host.when_awake(lambda: self._used(landing)))

    def _used(self, landing: Landing) -> None:
        """The request has ended. Its blocks may be kept for the next turn."""
        host = self._host
        fresh.check_use(host, landing)
        del self.landings[landing.request.request_id]
        is_kept = self._world.chance(self._world.faults.keeps)
        status = RequestStatus.FINISHED_STOPPED if is_kept else RequestStatus.FINISHED_ABORTED
        params = self._finish(landing.request, landing.tables, status)
        if params is None:
            self._free_blocks(landing)
        else:
            host.prefills.keep(landing, params)
        host.settle()

    def _forget(self, landing: Landing) -> None:
        """End the request. Its blocks stay while reads run into them."""
        self._finish(landing.request, landing.tables, RequestStatus.FINISHED_ABORTED)
        if not landing.blocks:
            self.landings.pop(landing.request.request_id, None)

    def _finish(
        self, request: HostRequest, tables: tuple[Any, ...], status: RequestStatus
    ) -> dict[str, Any] | None:
        request.status = status
        lists = tuple(list(table) for table in tables)
        return self._host.half.request_finished_all_groups(request, lists)[1]

    def _free_target(self, landing: Landing) -> None:
        bounded.check_target_freed(self._host, landing)
        landing.freed = True
        if landing.request.status is RequestStatus.RUNNING:
            self._finish(landing.request, landing.tables, RequestStatus.FINISHED_ABORTED)
        del self.landings[landing.request.request_id]
        self._free_blocks(landing)

    def _free_blocks(self, landing: Landing) -> None:
        fenced.check_free(self._host.cluster.reads.live, self._host, landing.blocks)
        self._host.pool.free(landing.blocks, landing)

    def of_claim(self, claim: int, is_of: Callable[[Landing], bool]) -> Landing:
        """`is_of` finds it among landings without a claim, when its claim is seen for the first time."""
        if claim not in self.by_claim:
            found = next(one for one in self.landings.values() if not one.claim and is_of(one))
            found.claim, self.by_claim[claim] = claim, found
        return self.by_claim[claim]
