"""What is true in the world, whatever the engines believe. The checkers judge by these."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.core.ids import BlockId, LoanId, Pair

if TYPE_CHECKING:
    from baton.sim.engine import Engine


@dataclass(slots=True, eq=False)
class Lent:
    """One prefilled prompt at P; from `lent_at` on, one loan."""

    prompt: int
    blocks: tuple[BlockId, ...]
    lent_at: float = 0.0


@dataclass(slots=True, eq=False)
class Landing:
    """One fetch at D, from its claim to the end of the use of its blocks."""

    prompt: int
    blocks: tuple[BlockId, ...]
    num_hits: int  # Blocks at the front that D had already.
    sources: tuple[BlockId, ...]  # For blocks[num_hits:].
    loan_id: LoanId
    producer: "Engine"  # The incarnation that the ticket names.
    started_at: float
    on_end: Callable[[bool], None]  # Tells the router: delivered or not.
    claim: int = 0
    failed_at: float | None = None
    delivered: bool = False
    freed: bool = False
    is_torn: bool = False  # A copy ran while its source was not held.
    waiting_pairs: list[Pair] = field(default_factory=list)  # For the handshake.

    @property
    def targets(self) -> tuple[BlockId, ...]:
        return self.blocks[self.num_hits :]


@dataclass(slots=True, eq=False)
class Read:
    """A copy under way: it lives until nothing can move any more, whatever the processes believe."""

    landing: Landing
    pair: Pair
    consumer: "Engine"
    generations: list[int]  # Of the sources, when it was posted.
    is_live: bool = True
