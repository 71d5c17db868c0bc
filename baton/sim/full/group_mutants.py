"""Safeguards around cache groups taken away, one at a time; see `mutants`. Worlds with windows notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from baton.connectors.pull.consumer.fetch import Fetch
from baton.connectors.pull.intent import Borrow, read_params
from baton.core.ids import BlockId, Pair
from baton.core.kv_groups import KVCacheGroup
from baton.core.reasons import Fault
from baton.protocol.grouped_prompt import GroupRoutes
from baton.protocol.handshake import RankCard
from baton.protocol.ticket import BadTicket, Ticket, open_ticket
from baton.sim.full.engine import Engine
from baton.sim.full.parts import Parts
from baton.sim.mutants import OneTable


def _shorter(groups: tuple[KVCacheGroup, ...]) -> tuple[KVCacheGroup, ...]:
    return tuple(
        msgspec.structs.replace(group, window=group.window - 1) if group.window is not None else group
        for group in groups
    )


def _read_less(engine: Engine) -> None:
    """D takes its windows for one token shorter than they are."""
    planner = engine.half._borrower._reads._planner
    plan_group_routes = planner.group_routes

    def plan_shorter(ranks: Sequence[RankCard]) -> GroupRoutes:
        return tuple(
            passage._replace(window=passage.window - 1) if passage.window is not None else passage
            for passage in plan_group_routes(ranks)
        )

    planner.group_routes = plan_shorter  # type: ignore[method-assign]
    planner.check_windows = _check_nothing  # type: ignore[method-assign]


def _with_tables(tables_of: Callable[[Ticket], tuple[tuple[BlockId, ...], ...]]) -> Parts:
    """D reads from other places than the ticket says."""

    def tamper(engine: Engine) -> None:
        orders = engine.half._borrower._orders
        read_lent = orders.read_lent

        def read(incoming: Fetch, pairs: Sequence[Pair]) -> None:
            offer = incoming.offer
            assert offer is not None
            assert offer.ticket is not None
            ticket = offer.ticket
            offer.ticket = msgspec.structs.replace(ticket, block_ids=tables_of(ticket))
            read_lent(incoming, pairs)
            offer.ticket = ticket

        orders.read_lent = read  # type: ignore[method-assign]

    return Parts(tamper=tamper)


def _next_group(ticket: Ticket) -> tuple[tuple[BlockId, ...], ...]:
    return (*ticket.block_ids[1:], ticket.block_ids[0])


def _from_the_front(ticket: Ticket) -> tuple[tuple[BlockId, ...], ...]:
    """As if the first id of a window were that of token 0."""
    num_blocks = -(-ticket.num_tokens // ticket.block_tokens)
    return tuple(held + held[-1:] * (num_blocks - len(held)) for held in ticket.block_ids)


def _write_askew(engine: Engine) -> None:
    """D reads a window's blocks into those of the next group."""
    orders = engine.half._borrower._orders
    read_lent = orders.read_lent

    def read(incoming: Fetch, pairs: Sequence[Pair]) -> None:
        tables = incoming.tables
        incoming.tables = (*tables[1:], tables[0])
        read_lent(incoming, pairs)
        incoming.tables = tables

    orders.read_lent = read  # type: ignore[method-assign]


def _believe_windows(engine: Engine) -> None:
    """D takes a ticket whatever it says of groups and blocks."""
    borrower = engine.half._borrower
    verify = borrower.verify

    def verify_all_but_layout(request: Any) -> Any:
        try:
            return verify(request)
        except BadTicket as error:
            if error.reason is not Fault.LAYOUT:
                raise
        borrower._incoming.pop(request.request_id)
        wish = read_params(request.kv_transfer_params, borrower._identity)
        assert isinstance(wish, Borrow)
        return wish

    def accept_of_stream(incoming: Fetch, text: str, now: float) -> None:
        borrower._agent.accept(incoming.claim, open_ticket(text, borrower._identity.ticket_key), now)

    borrower.verify = verify_all_but_layout  # type: ignore[method-assign]
    borrower._reads.open_ticket = accept_of_stream  # type: ignore[method-assign]
    borrower._reads._planner.check_windows = _check_nothing  # type: ignore[method-assign]


def _check_nothing(group_routes: GroupRoutes, ticket: Ticket) -> None:
    return


def _free_lent_windows(engine: Engine) -> None:
    """P gives a lent window's blocks to whoever comes."""
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
    """Blocks are given back one token before the window has left them."""
    kv_cache = engine.scheduler.kv_cache
    kv_cache.groups = _shorter(kv_cache.groups)


def _keep_behind(engine: Engine) -> None:
    """What lies behind the window at a request's end stays with it."""
    engine.scheduler.kv_cache.drop_outside_windows = lambda request: None  # type: ignore[method-assign]


def _believe_half(engine: Engine) -> None:
    """A load that failed in part is gone on with where it is still good, window or not."""
    remote, kv_cache = engine.scheduler.remote, engine.scheduler.kv_cache
    settle = remote.settle

    def settle_as_one_table(load: Any, **how: Any) -> bool:
        is_hybrid, kv_cache.is_hybrid = kv_cache.is_hybrid, False
        is_of_use = settle(load, **how)
        kv_cache.is_hybrid = is_hybrid
        return is_of_use

    remote.settle = settle_as_one_table  # type: ignore[method-assign]


def _read_early_through_one(engine: Engine) -> None:
    """D reads all that is announced early through the table of the first part, whatever its group."""
    engine.half._agent._streams.__class__ = OneTable


EARLY_GROUPS: dict[str, Parts] = {
    "early_tables": Parts(tamper=_read_early_through_one),
}
GROUPS: dict[str, Parts] = {
    "window_length": Parts(tamper=_read_less),
    "group_order": _with_tables(_next_group),
    "window_source": _with_tables(_from_the_front),
    "window_target": Parts(tamper=_write_askew),
    "ticket_windows": Parts(tamper=_believe_windows),
    "lent_windows": Parts(tamper=_free_lent_windows),
    "window_drop": Parts(tamper=_drop_early),
    "window_keep": Parts(tamper=_keep_behind),
    "whole_load": Parts(tamper=_believe_half),
}
