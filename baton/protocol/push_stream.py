"""What D knows of one stream: what P has announced of a prompt, and what of it is ordered to be read.

What is announced may be news, or old, or name fewer blocks than it needs; a ticket may lend what was read, or
something else. That is judged here, from what is known and nothing else; what follows is `push_consumer`'s.
"""

from dataclasses import dataclass, field

from baton.core.ids import Address, Pair, PromptHash, TransferId
from baton.protocol.effects import Part
from baton.protocol.grouped_prompt import ONE_TABLE, GroupedPrompt, GroupRoutes
from baton.protocol.messages import Announced, BlockTables, Finished
from baton.protocol.progress_frontier import ProgressFrontier, parts_between
from baton.protocol.ticket import Ticket


@dataclass(slots=True)
class PushStream:
    claim: int
    transfer_id: TransferId
    producer: Address
    prompt_hash: PromptHash
    num_tokens: int
    block_tokens: int | None  # P's; None until it is known.
    give_up_at: float
    heard_at: float
    next_want: float
    pairs: tuple[Pair, ...] | None = None  # None until there is something to read into.
    first_token: int = 0
    group_routes: GroupRoutes = ONE_TABLE
    latest: Announced | None = None
    run: int = 0  # What is read, or has been.
    front: ProgressFrontier | None = None  # How far it is ordered to be read; None: nothing is.
    blocks: BlockTables = ()  # P's that are read, of each passage.
    reading: set[Pair] = field(default_factory=set)  # Reads whose end is owed.
    is_clearing: bool = False  # They are of an older run, and cancelled.
    finished: Finished | None = None
    draining: bool = False

    @property
    def prompt(self) -> GroupedPrompt:
        assert self.block_tokens is not None, "said when it is ready"
        return GroupedPrompt(self.group_routes, self.num_tokens, self.block_tokens)

    def is_news(self, message: Announced) -> bool:
        """They overtake each other: none is what is older than what we know, or names too few blocks."""
        if self.pairs is not None and self.needed(message) is None:
            return False
        latest = self.latest
        if latest is None or message.run > latest.run:
            return message.run > 0
        return message.run == latest.run and front_of(message).reaches(front_of(latest))

    def needed(self, message: Announced) -> BlockTables | None:
        """None: not a block for every token. Seen when we know P's blocks, and before any is read."""
        end = min(front_of(message).end, self.num_tokens)
        return self.prompt.needed(message.block_ids, message.first_blocks, end)

    def goes_on_in(self, blocks: BlockTables) -> bool:
        """Do these, of each passage, begin with those that are read?"""
        if not self.blocks:
            return True
        return len(blocks) == len(self.blocks) and all(
            longer[: len(known)] == known for longer, known in zip(blocks, self.blocks, strict=True)
        )

    def is_lent_by(self, ticket: Ticket) -> bool:
        """Does the ticket name the blocks that are read, and blocks of the size that was announced?"""
        if ticket.block_tokens != (self.block_tokens or ticket.block_tokens):
            return False
        if not self.blocks:
            return True
        lent = self.prompt.needed(ticket.block_ids, ticket.first_blocks, ticket.num_tokens)
        return lent is not None and self.goes_on_in(lent)

    def unread(self, num_layers: int) -> tuple[Part, ...] | None:
        """What of the whole prompt is not ordered to be read; None: nothing is."""
        if self.front is None:
            return None
        unread = parts_between(self.front, ProgressFrontier(self.num_tokens), num_layers)
        return self.prompt.cut(unread)


def front_of(message: Announced) -> ProgressFrontier:
    return ProgressFrontier(message.num_tokens, message.partial_tokens, message.partial_layers)
