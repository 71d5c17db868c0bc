"""D's state of one stream: what P has announced of a prompt, and which of it D has ordered to be read.

The checks here depend on this state alone: whether an announcement is new, whether it names all the blocks it
needs, and whether a ticket lends what was read. push_consumer acts on the results.
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
    block_tokens: int | None  # P's block size; None until it is known.
    give_up_at: float
    heard_at: float
    next_want: float
    pairs: tuple[Pair, ...] | None = None  # None until there are blocks to read into.
    first_token: int = 0
    group_routes: GroupRoutes = ONE_TABLE
    latest: Announced | None = None
    run: int = 0  # The run that is or was read.
    frontier: ProgressFrontier | None = None  # What is ordered to be read; None: nothing.
    blocks: BlockTables = ()  # P's blocks that are read, by group route.
    reading: set[Pair] = field(default_factory=set)  # Reads whose end has not been reported.
    is_clearing: bool = False  # The reads are of an older run, and cancelled.
    finished: Finished | None = None
    draining: bool = False

    @property
    def prompt(self) -> GroupedPrompt:
        assert self.block_tokens is not None, "set by PushConsumer.ready"
        return GroupedPrompt(self.group_routes, self.num_tokens, self.block_tokens)

    def is_news(self, message: Announced) -> bool:
        """Whether it is newer than `latest` and names enough blocks. Announcements can overtake others."""
        if self.pairs is not None and self.needed(message) is None:
            return False
        latest = self.latest
        if latest is None or message.run > latest.run:
            return message.run > 0
        return message.run == latest.run and frontier_of(message).reaches(frontier_of(latest))

    def needed(self, message: Announced) -> BlockTables | None:
        """P's blocks by group route, or None if they do not cover every token. Requires P's block size."""
        end = min(frontier_of(message).end, self.num_tokens)
        return self.prompt.needed(message.block_ids, message.first_blocks, end)

    def extends_read_blocks(self, blocks: BlockTables) -> bool:
        """Whether `blocks`, by group route, begin with those that are read."""
        if not self.blocks:
            return True
        return len(blocks) == len(self.blocks) and all(
            longer[: len(known)] == known for longer, known in zip(blocks, self.blocks, strict=True)
        )

    def is_lent_by(self, ticket: Ticket) -> bool:
        """Whether the ticket has the announced block size and names the blocks that are read."""
        if ticket.block_tokens != (self.block_tokens or ticket.block_tokens):
            return False
        if not self.blocks:
            return True
        lent = self.prompt.needed(ticket.block_ids, ticket.first_blocks, ticket.num_tokens)
        return lent is not None and self.extends_read_blocks(lent)

    def unread(self, num_layers: int) -> tuple[Part, ...] | None:
        """The parts of the whole prompt not yet ordered to be read; None: nothing was ordered."""
        if self.frontier is None:
            return None
        unread = parts_between(self.frontier, ProgressFrontier(self.num_tokens), num_layers)
        return self.prompt.cut(unread) + self.prompt.states()


def frontier_of(message: Announced) -> ProgressFrontier:
    return ProgressFrontier(message.num_tokens, message.partial_tokens, message.partial_layers)
