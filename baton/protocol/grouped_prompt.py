"""Prompts of models with several block tables: parts cut by cache group, and the blocks that they need.

Layers that share a table on both sides move together (`GroupPair`). In layers with a window W, tokens
computed after the prompt see its last W tokens only, so D needs the blocks from that of token
`num_tokens - W` on (`KVCacheGroup.first_kept`). A producer with such tables frees the earlier blocks while
it computes, and announces a group's blocks from the first one that it keeps:

    num_tokens = 18, W = 6, blocks of 4            announced, when 16 tokens are ready    first_blocks
    full attention    |  7 |  3 |  9 |  4 | 12 |   7 3 9 4                                0
    window            |  . |  . |  . |  8 | 11 |   8                                      3: token 12 = 18 - 6

A recurrent state is replaced as P computes, so it is never announced. It moves when P has lent it, as one
block for the prompt's last token.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from baton.core.ids import BlockId
from baton.core.kv_groups import NULL_BLOCK_ID, KVCacheGroup
from baton.core.layout import RankLayout
from baton.protocol.effects import Part
from baton.protocol.messages import BlockTables
from baton.protocol.plan import GroupPair, pair_groups, unfilled_drafts


class GroupRoute(NamedTuple):
    """Layers that move through one table on each side."""

    groups: GroupPair | None  # None: each engine has one table.
    layers: frozenset[int] | None = None  # Positions in P's order; None: all of them.
    window: int | None = None  # D's window; blocks that lie before it do not move.
    is_state: bool = False  # The layers have a recurrent state: one block moves, when it is lent.


GroupRoutes: TypeAlias = tuple[GroupRoute, ...]

ONE_TABLE: GroupRoutes = (GroupRoute(None),)


def plan_group_routes(
    producers: Sequence[RankLayout], consumers: Sequence[RankLayout], windows: Sequence[int | None]
) -> GroupRoutes:
    """Routes between two engines, given all ranks of both and the `windows` of D's groups.

    Raises PlanError as `pair_groups` does.
    """
    pairs = pair_groups(producers, consumers)
    of_states = {state.group for rank in consumers for state in rank.states}
    unfilled = unfilled_drafts(producers, consumers)
    ours = {
        layer.name: layer.group for rank in consumers for layer in rank.layers if layer.name not in unfilled
    }
    in_order = [layer for rank in producers[:: producers[0].tp_size] for layer in rank.layers]
    return tuple(
        GroupRoute(
            pair,
            frozenset(
                position
                for position, layer in enumerate(in_order)
                if (ours.get(layer.name), layer.group) == (pair.local, pair.remote)
            ),
            windows[pair.local],
            pair.local in of_states,
        )
        for pair in pairs
    )


class GroupedPrompt(msgspec.Struct, frozen=True):
    """One prompt. `block_tokens` is P's block size; with groups D has the same."""

    group_routes: GroupRoutes
    num_tokens: int
    block_tokens: int

    def cut(self, parts: Iterable[Part]) -> tuple[Part, ...]:
        """Splits the parts by route and drops what lies before a window. States are not among them."""
        cuts = (self._through(route, part) for part in parts for route in self.group_routes)
        return tuple(cut for cut in cuts if cut is not None)

    def states(self) -> tuple[Part, ...]:
        """The parts of all routes of states, for a prompt that is lent."""
        return tuple(
            Part(self.num_tokens - 1, 1, None, route.groups) for route in self.group_routes if route.is_state
        )

    def needed(
        self, block_ids: BlockTables, first_blocks: Sequence[int], end_token: int
    ) -> BlockTables | None:
        """Ids of P's blocks that each route needs.

        `block_ids` lists P's blocks by group, from the block indices `first_blocks` on. None if a token that
        moves before `end_token` has no block.
        """
        needed: list[tuple[BlockId, ...]] = []
        for route in self.group_routes:
            if route.is_state:
                needed.append(())
                continue
            remote = route.groups.remote if route.groups is not None else 0
            named = block_ids[remote] if remote < len(block_ids) else ()
            first_named = first_blocks[remote] if remote < len(first_blocks) else 0
            first = self._first_block(route)
            if first * self.block_tokens >= end_token:
                named = ()  # Nothing moves yet.
            elif first_named > first or (first_named + len(named)) * self.block_tokens < end_token:
                return None
            needed.append(named[max(0, first - first_named) :])
        return tuple(needed)

    def table_of(self, part: Part, needed: BlockTables) -> tuple[BlockId, ...]:
        """P's block ids for this part, from token 0 on, with 0 for blocks before the window."""
        [index] = [index for index, route in enumerate(self.group_routes) if route.groups == part.groups]
        assert not self.group_routes[index].is_state, "a state is never announced"
        return (BlockId(NULL_BLOCK_ID),) * self._first_block(self.group_routes[index]) + needed[index]

    def _first_block(self, route: GroupRoute) -> int:
        return KVCacheGroup((), route.window).first_kept(self.num_tokens, self.block_tokens)

    def _through(self, route: GroupRoute, part: Part) -> Part | None:
        if route.is_state:
            return None
        first = max(part.first_token, self._first_block(route) * self.block_tokens)
        end = part.first_token + part.num_tokens
        is_affected = route.layers is None or part.layers is None or route.layers & {*range(*part.layers)}
        return Part(first, end - first, part.layers, route.groups) if first < end and is_affected else None
