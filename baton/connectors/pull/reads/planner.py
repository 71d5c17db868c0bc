"""Through which pairs of ranks, and which block tables, a producer's KV gets here."""

from __future__ import annotations

from collections.abc import Sequence

from baton.connectors.pull.identity import EngineIdentity
from baton.core.ids import Pair
from baton.core.layout import RankLayout
from baton.protocol.grouped_prompt import ONE_TABLE, GroupRoutes, plan_group_routes
from baton.protocol.handshake import RankCard
from baton.protocol.plan import PlanError, plan_pairs_of_layouts
from baton.protocol.ticket import Ticket


class ReadPlanner:
    def __init__(self, identity: EngineIdentity, rotation: int) -> None:
        """Engines that want the same from replicas take it from different ones, by their `rotation`."""
        self._identity = identity
        self._rotation = rotation
        self._own_layouts: list[RankLayout] = []

    def registered(self, layouts: Sequence[RankLayout]) -> None:
        """Our own ranks' memory is known: from now on there is something to read into."""
        self._own_layouts = list(layouts)

    def pairs(self, ranks: Sequence[RankCard]) -> tuple[Pair, ...]:
        """Of a producer's ranks and ours. Raises PlanError."""
        theirs = [card.layout for card in ranks]
        return plan_pairs_of_layouts(theirs, self._own_layouts, rotation=self._rotation)

    def group_routes(self, ranks: Sequence[RankCard]) -> GroupRoutes:
        """Through which tables the layers move. Raises PlanError."""
        theirs = [card.layout for card in ranks]
        if not self._identity.has_block_tables and not any(
            layer.group for layout in theirs for layer in layout.layers
        ):
            return ONE_TABLE
        return plan_group_routes(theirs, self._own_layouts, self._identity.windows)

    def check_windows(self, group_routes: GroupRoutes, ticket: Ticket) -> None:
        """Raises PlanError for groups that are not those of the ticket."""
        for groups, _, window in group_routes:
            if groups is None:
                if len(ticket.windows) > 1:
                    raise PlanError(f"layouts of one cache group, and a ticket of {len(ticket.windows)}")
                continue
            if groups.remote >= len(ticket.windows):
                raise PlanError(
                    f"layers of cache group {groups.remote}, and a ticket of {len(ticket.windows)}"
                )
            if ticket.windows[groups.remote] not in (None, window):
                raise PlanError(f"layers see {window} tokens here and {ticket.windows[groups.remote]} there")
