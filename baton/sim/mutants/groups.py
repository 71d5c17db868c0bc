"""Mutants of full worlds that lack a guard of cache groups. Worlds with windows find them."""

from __future__ import annotations

from typing import Any

from baton.connectors.pull.consumer.fetch import Fetch
from baton.connectors.pull.control.agent import Machines
from baton.connectors.pull.intent import FetchIntent
from baton.core.reasons import Fault
from baton.protocol.grouped_prompt import GroupRoutes
from baton.protocol.ticket import BadTicket, Ticket, open_ticket
from baton.sim.hosts.full.engine import Engine
from baton.sim.hosts.full.parts import Parts
from baton.sim.kernel.windows import shortened
from baton.sim.mutants import halves
from baton.sim.mutants.machines import OneTable


def _believe_windows(engine: Engine) -> None:
    """D takes a ticket with any groups and blocks."""
    fetches, agent = engine.half._fetches, engine.half._agent
    verify = fetches.verify

    def verify_all_but_layout(request: Any, fetch: FetchIntent) -> None:
        try:
            verify(request, fetch)
        except BadTicket as error:
            if error.reason is not Fault.LAYOUT:
                raise

    def accept_of_stream(fetch: Fetch, text: str, now: float) -> None:
        ticket = open_ticket(text, fetches._identity.ticket_key)
        agent.carry_out(agent.streams.accept(fetch.claim, ticket, now), now)

    fetches.verify = verify_all_but_layout  # type: ignore[method-assign]
    fetches._reads.open_ticket = accept_of_stream  # type: ignore[method-assign]
    fetches._reads.planner.check_windows = _check_nothing  # type: ignore[method-assign]


def _check_nothing(group_routes: GroupRoutes, ticket: Ticket) -> None:
    return


def _free_lent_windows(engine: Engine) -> None:
    """P frees a lent window's blocks."""
    remote, kv_cache = engine.scheduler.remote, engine.scheduler.kv_cache
    hold = remote.hold

    def hold_and_free(request: Any, *, is_lent: bool) -> bool:
        if not hold(request, is_lent=is_lent):
            return False
        if is_lent:
            for group, table in zip(kv_cache.groups, kv_cache._tables[request.request_id], strict=True):
                if group.window is not None:
                    dropped, table.blocks = table.blocks[table.first_kept :], []
                    engine.pool.free_blocks(reversed(dropped))
        return True

    remote.hold = hold_and_free  # type: ignore[method-assign]


def _drop_early(engine: Engine) -> None:
    """Blocks are freed one token before the window has left them."""
    kv_cache = engine.scheduler.kv_cache
    kv_cache.groups = shortened(kv_cache.groups, 1)


def _keep_outside(engine: Engine) -> None:
    """A request keeps blocks outside its windows when it ends."""
    engine.scheduler.kv_cache.drop_outside_windows = lambda request: None  # type: ignore[method-assign]


def _believe_half(engine: Engine) -> None:
    """A load that failed in part goes on from its valid beginning, also with windows."""
    remote, kv_cache = engine.scheduler.remote, engine.scheduler.kv_cache
    settle = remote.settle

    def settle_as_one_table(load: Any, **how: Any) -> bool:
        is_hybrid, kv_cache.is_hybrid = kv_cache.is_hybrid, False
        is_of_use = settle(load, **how)
        kv_cache.is_hybrid = is_hybrid
        return is_of_use

    remote.settle = settle_as_one_table  # type: ignore[method-assign]


EARLY_GROUPS: dict[str, Parts] = {
    "early_tables": Parts(machines=Machines(streams=OneTable)),
}
GROUPS: dict[str, Parts] = {
    "window_length": Parts(window_error=1),
    "group_order": Parts(half=halves.ReadsNextGroup),
    "window_source": Parts(half=halves.ReadsFromFront),
    "window_target": Parts(half=halves.WritesNextGroup),
    "ticket_windows": Parts(tamper=_believe_windows),
    "lent_windows": Parts(tamper=_free_lent_windows),
    "window_drop": Parts(tamper=_drop_early),
    "window_keep": Parts(tamper=_keep_outside),
    "whole_load": Parts(tamper=_believe_half),
}
