"""What is true in the world, whatever the engines believe. The checkers judge by these."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.core.ids import BlockId, LoanId, Pair, TransferId
from baton.protocol.effects import Part
from baton.sim.connection import Connection, Request

if TYPE_CHECKING:
    from baton.sim.engine import Engine
    from baton.sim.memory import Content, Tables


@dataclass(slots=True, eq=False)
class Lent:
    """The blocks of one run of a prefill at P; from `lent_at` on, one loan."""

    prompt: int
    transfer_id: TransferId
    tables: "Tables" = ()
    lent_at: float = 0.0
    kept_s: float = 0.0  # For whoever may come, before anything is promised.


@dataclass(slots=True, eq=False)
class Landing:
    """One fetch at D, from its claim to the end of the use of its blocks."""

    prompt: int
    num_tokens: int  # A block holds one.
    num_hits: int  # Tokens at the front that D had already.
    transfer_id: TransferId
    producer: "Engine"  # The incarnation that the ticket, or the introduction, names, or that was found.
    tp_size: int  # Its.
    started_at: float
    on_end: Callable[[bool], None]  # Tells the router: delivered or not.
    claim: int = 0
    tables: "Tables" = ()  # Once there is room.
    blocks: tuple[BlockId, ...] = ()  # All that is in them.
    loan_id: LoanId | None = None  # Once a ticket names it.
    sources: "Tables" = ()  # As the ticket names them, from token 0 on.
    unread: tuple[Part, ...] | None = None  # None: all that is missing.
    heard_at: float = 0.0  # Last of a stream's producer.
    failed_at: float | None = None
    delivered: bool = False
    freed: bool = False
    waiting_pairs: tuple[Pair, ...] = ()  # For the handshake.

    @property
    def is_open(self) -> bool:
        return not self.delivered and self.failed_at is None


@dataclass(slots=True, eq=False)
class Read:
    """A copy under way: it lives until nothing can move any more, whatever the processes believe."""

    landing: Landing
    pair: Pair
    consumer: "Engine"
    sources: tuple[BlockId, ...]
    targets: tuple[BlockId, ...]
    part: Part
    on_end: Callable[[bool], None]
    generations: list[int] = field(default_factory=list)  # Of the sources, when it was posted.
    cells: list[tuple[int, int]] = field(default_factory=list)  # From which of P's into which of D's.
    before: "list[Content]" = field(default_factory=list)  # What they held then.
    is_torn: bool = False  # A source was not held for this transfer, or changed.
    is_live: bool = True
    link: Connection | None = None
    request: Request | None = None  # On that link.
