"""Facts of a fast world that the checkers compare with what the engines do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.core.ids import BlockId, LoanId, TransferId
from baton.core.prefilled import PrefilledTokens
from baton.engine.request import RequestStatus

if TYPE_CHECKING:
    from lab.sim.hosts.fast.host import Host
    from lab.sim.hosts.fast.memory import Tables


@dataclass(slots=True, eq=False)
class HostRequest:
    """One request as a half sees it (`baton.contract.host.Request`)."""

    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None
    num_computed_tokens: int = 0
    status: RequestStatus = RequestStatus.RUNNING
    cache_salt: str | None = None
    prefilled_tokens: PrefilledTokens | None = None  # Tokens of a prefill, once it has ended.

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids)

    def drop_last_prompt_token(self) -> None:
        if len(self.prompt_token_ids) > 1:
            del self.prompt_token_ids[-1]


@dataclass(slots=True, eq=False)
class Lent:
    """Blocks of one run of a prefill at P. They are lent from `lent_at` on."""

    prompt: int
    transfer_id: TransferId
    tables: Tables = ()
    loan_id: LoanId | None = None
    lent_at: float = 0.0
    kept_s: float = 0.0  # Time for which the blocks wait for a claim by a consumer.


@dataclass(slots=True, eq=False)
class Landing:
    """One fetch at D, from its request to the end of the use of its blocks."""

    request: HostRequest
    prompt: int
    num_tokens: int  # A block holds one.
    num_hits: int  # Tokens at the front that D had already.
    transfer_id: TransferId
    producer: Host  # The incarnation that the ticket or the introduction names, or that answered.
    is_named: bool  # Only the name of P is known, until P answers.
    started_at: float
    on_end: Callable[[bool], None]  # Tells the router whether it was delivered.
    claim: int = 0  # Number of the claim, once D has sent it.
    loan_id: LoanId | None = None  # Id of the loan, once it is known.
    tables: Tables = ()  # Blocks by group, once there is room.
    blocks: tuple[BlockId, ...] = ()  # All blocks in them.
    heard_at: float = 0.0  # When the producer of a stream last sent something.
    failed_at: float | None = None
    delivered: bool = False
    kv: int = 0  # Content that its blocks have to have, once delivered.
    freed: bool = False
    num_early: int = 0  # Parts read before the loan.
    has_states_read: bool = False  # Reads of states have been posted.

    @property
    def is_open(self) -> bool:
        return not self.delivered and self.failed_at is None
