"""What of a prompt moves through which block tables: parts cut by group, and the blocks that they need.

Layers that share a table on both sides move together (`GroupPair`). Of those with a window W, what is
computed behind the prompt sees the last W tokens, so D needs the blocks from that of token `num_tokens - W`
on (`KVCacheGroup.first_kept`). A producer that has such tables too gives back those before it while it
computes, and announces a group's blocks from the first that stays:

    num_tokens = 18, W = 6, blocks of 4            announced, when 16 tokens are ready    first_blocks
    sees everything   |  7 |  3 |  9 |  4 | 12 |   7 3 9 4                                0
    window            |  . |  . |  . |  8 | 11 |   8                                      3: token 12 = 18 - 6
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from baton.core.ids import BlockId
from baton.core.kv_groups import NULL_BLOCK_ID, KVCacheGroup
from baton.core.layout import RankLayout
from baton.protocol.effects import Part
from baton.protocol.messages import BlockTables
from baton.protocol.plan import GroupPair, pair_groups


class GroupRoute(NamedTuple):
    """Layers that move through one table on each side."""

    groups: GroupPair | None  # None: of engines that have one table each.
    layers: frozenset[int] | None = None  # Positions in P's order; None: all of them.
    window: int | None = None  # D's; of what lies behind it nothing moves.


GroupRoutes: TypeAlias = tuple[GroupRoute, ...]

ONE_TABLE: GroupRoutes = (GroupRoute(None),)


def plan_group_routes(
    producers: Sequence[RankLayout], consumers: Sequence[RankLayout], windows: Sequence[int | None]
) -> GroupRoutes:
    """Of all ranks of two engines; `windows`: of D's groups. Raises PlanError as `pair_groups` does."""
    pairs = pair_groups(producers, consumers)
    ours = {layer.name: layer.group for rank in consumers for layer in rank.layers}
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
        )
        for pair in pairs
    )


@dataclass(frozen=True, slots=True)
class GroupedPrompt:
    """One prompt. `block_tokens` are P's, and D's as well where there are groups."""

    group_routes: GroupRoutes
    num_tokens: int
    block_tokens: int

    def cut(self, parts: Iterable[Part]) -> tuple[Part, ...]:
        """These parts, passage by passage, without what lies behind a window."""
        cuts = (self._through(passage, part) for part in parts for passage in self.group_routes)
        return tuple(cut for cut in cuts if cut is not None)

    def needed(
        self, block_ids: BlockTables, first_blocks: Sequence[int], end_token: int
    ) -> BlockTables | None:
        """Of P's blocks, which begin at these places, those that each passage needs, from its first one on.

        None if a token before `end_token` that moves has no block.
        """
        needed: list[tuple[BlockId, ...]] = []
        for passage in self.group_routes:
            remote = passage.groups.remote if passage.groups is not None else 0
            named = block_ids[remote] if remote < len(block_ids) else ()
            first_named = first_blocks[remote] if remote < len(first_blocks) else 0
            first = self._first_block(passage)
            if first * self.block_tokens >= end_token:
                named = ()  # Nothing moves yet.
            elif first_named > first or (first_named + len(named)) * self.block_tokens < end_token:
                return None
            needed.append(named[max(0, first - first_named) :])
        return tuple(needed)

    def table_of(self, part: Part, needed: BlockTables) -> tuple[BlockId, ...]:
        """P's, for this part, as from token 0 on; 0 in the places behind a window."""
        [index] = [index for index, passage in enumerate(self.group_routes) if passage.groups == part.groups]
        return (BlockId(NULL_BLOCK_ID),) * self._first_block(self.group_routes[index]) + needed[index]

    def _first_block(self, passage: GroupRoute) -> int:
        return KVCacheGroup((), passage.window).first_kept(self.num_tokens, self.block_tokens)

    def _through(self, passage: GroupRoute, part: Part) -> Part | None:
        first = max(part.first_token, self._first_block(passage) * self.block_tokens)
        end = part.first_token + part.num_tokens
        named = passage.layers is None or part.layers is None or passage.layers & {*range(*part.layers)}
        return Part(first, end - first, part.layers, passage.groups) if first < end and named else None
