"""Loans of P: a finished prefill becomes a loan and a ticket; the end of the loan frees its blocks.

    request_finished --lend, sign--> LENT (blocks stay) --FreeLoan--> freed --> finished_sending

With the setting `turns`, D lends in the same way what it has decoded: the blocks are *kept* for the prefill
of the next turn. All kept blocks are bounded by a share of the pool; beyond it the oldest are given up.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from baton.connectors.host_view import BlockHolder
from baton.connectors.prompt_identity import UnnamedPrompt
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.intent import (
    LendBlocks,
    TransferIntents,
    hash_of_tokens,
    num_blocks,
    transfer_of_request,
)
from baton.connectors.pull.settings import TurnSettings
from baton.connectors.pull.stats import PullStats
from baton.contract import host
from baton.core.errors import BadTransferParams
from baton.core.ids import Address, BlockId, LoanId, PromptHash, RequestId, TransferId
from baton.core.kv_groups import NULL_BLOCK_ID
from baton.core.prefilled import PrefilledTokens
from baton.core.transfer_params import MAX_TRANSFER_ID_CHARS
from baton.protocol.effects import FreeLoan, Unwanted
from baton.protocol.pull_producer import PullProducer
from baton.protocol.ticket import TICKET_FIELD, Ticket, open_ticket, sign_ticket

logger = logging.getLogger(__name__)

_LENDABLE: Final = frozenset({"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"})
"""vLLM's names of the ends after which the KV of a prompt is complete."""

FOREGONE_MAX = 4096  # Names; an older one is of a request that has long ended.
_REQUEST_ID_CHARS = 256  # Length of a request id in logs; a client's may be of any length.


@dataclass(frozen=True, slots=True)
class Lending:
    """Record of an open loan."""

    request_id: str
    transfer_id: TransferId
    num_blocks: int
    lent_at: float


class Loans:
    """What this engine lends and keeps, from the end of a request to the end of its loan.

    Args:
        machine: the protocol's producer; it decides when a loan ends.
        control_url: where consumers reach this engine, for tickets.
        public_key: public key of this process, for tickets.
        requests: the intents of open requests.
        holder: keeps lent blocks; None: the host does, because it is asked to (`delay_free`).
    """

    def __init__(
        self,
        machine: PullProducer,
        identity: EngineIdentity,
        control_url: str,
        public_key: bytes,
        requests: TransferIntents,
        stats: PullStats,
        holder: BlockHolder | None = None,
    ) -> None:
        self._machine = machine
        self._identity = identity
        self._control_url = control_url
        self._public_key = public_key
        self._requests = requests
        self._stats = stats
        self._holder = holder
        self._lent: dict[LoanId, Lending] = {}
        self._foregone: dict[str, None] = {}  # Transfers taken back before they were lent, oldest first.
        # Number of blocks of each loan that is kept for a next turn, oldest first.
        self._kept: dict[LoanId, int] = {}
        self._ended: list[LoanId] = []  # Not released by the holder yet.
        self.freed: set[str] = set()  # Requests whose blocks are no longer lent, not reported yet.
        self.num_pool_blocks: int | None = None  # None: the host has not reported it.

    # --- Requests --------------------------------------------------------------------------------

    def finished(
        self, request: host.Request, block_ids: Sequence[Sequence[int]], now: float
    ) -> tuple[bool, dict[str, Any] | None]:
        """Lend the blocks of a finished request, if its params ask for it.

        Args:
            block_ids: block ids of each KV-cache group, from token 0 on.

        Returns:
            Whether the host has to keep the blocks, and the `kv_transfer_params` of the answer.
        """
        if request.status.name not in _LENDABLE:
            return False, None
        try:
            intent = self._requests.params_of(request)
        except BadTransferParams:
            return False, None  # Refused and counted when the request came.
        if intent is None:
            return False, None
        if not isinstance(intent, LendBlocks):
            return self._keep(request, block_ids, now)
        if intent.transfer_id in self._foregone:
            return False, None
        num_tokens = min(request.num_prompt_tokens, request.num_computed_tokens)
        held = self._held(block_ids, num_tokens, request.num_computed_tokens)
        if not held or request.prompt_token_ids is None:
            return False, None
        # Only hosts that can take prefilled tokens give them away; vLLM does neither.
        prefilled: PrefilledTokens | None = getattr(request, "prefilled_tokens", None)
        params = self.lend_blocks(request, held, num_tokens, now, intent.transfer_id, prefilled)
        return self._holder is None and params is not None, params

    def lend_blocks(
        self,
        request: host.Request,
        held: tuple[tuple[BlockId, ...], ...],
        num_tokens: int,
        now: float,
        transfer_id: TransferId | None = None,
        prefilled: PrefilledTokens | None = None,
    ) -> dict[str, Any] | None:
        """Lend blocks of each group with the KV of the first `num_tokens` tokens of the request's prompt.

        Returns the params that lead to them. None while draining, and for a prompt that cannot be named: the
        consumer computes the prompt.
        """
        assert request.prompt_token_ids is not None
        prompt_hash = self._hash_of(request, request.prompt_token_ids, num_tokens)
        loan_id = self._machine.lend(now) if prompt_hash is not None else None
        if prompt_hash is None or loan_id is None:
            return None
        name = transfer_id or transfer_of_request(request.request_id)
        lent = self._lend(request, loan_id, held, num_tokens, prompt_hash, name, now, prefilled)
        return {"do_remote_prefill": True, "do_remote_decode": False, **lent, "transfer_id": name}

    def _keep(
        self, request: host.Request, block_ids: Sequence[Sequence[int]], now: float
    ) -> tuple[bool, dict[str, Any] | None]:
        """Lend what was decoded here to the prefill of the next turn: vLLM's bidirectional transfer."""
        turns = self._identity.settings.turns
        if turns is None or not self._identity.is_producer:
            return False, None
        token_ids = request.all_token_ids  # The last one has no KV: it was sampled and never computed.
        num_tokens = min(request.num_computed_tokens, len(token_ids))
        held = self._held(block_ids, num_tokens, request.num_computed_tokens)
        num_held = sum(map(len, held))
        if not held or num_tokens < turns.min_tokens or not self._bound_kept(num_held, turns, now):
            return False, None
        prompt_hash = self._hash_of(request, token_ids, num_tokens)
        loan_id = self._machine.keep(now, turns.ttl_s) if prompt_hash is not None else None
        if prompt_hash is None or loan_id is None:
            return False, None
        # The transfer id of the next leg is another one: the router gives it.
        name = transfer_of_request(request.request_id)
        lent = self._lend(request, loan_id, held, num_tokens, prompt_hash, name, now)
        self._kept[loan_id] = num_held
        return self._holder is None, {"do_remote_prefill": False, "do_remote_decode": True, **lent}

    def _lend(
        self,
        request: host.Request,
        loan_id: LoanId,
        held: tuple[tuple[BlockId, ...], ...],
        num_tokens: int,
        prompt_hash: PromptHash,
        transfer_id: TransferId,
        now: float,
        prefilled: PrefilledTokens | None = None,
    ) -> dict[str, Any]:
        """Hold the blocks and sign the ticket. Returns the params that lead to them.

        Existing proxies hand vLLM's keys on; a consumer believes the signed ticket alone.
        """
        if self._holder is not None:
            self._holder.hold(loan_id, [block_id for group in held for block_id in group])
        identity = self._identity
        ticket = Ticket(
            producer=Address(identity.engine_id, loan_id.epoch),
            control_url=self._control_url,
            public_key=self._public_key,
            loan_id=loan_id,
            transfer_id=transfer_id,
            request_id=_name_for_logs(request.request_id),
            kv_identity=identity.kv_identity,
            tp_size=identity.tp_size,
            block_tokens=identity.block_tokens,
            block_ids=held,
            windows=identity.windows,
            state_groups=identity.state_groups,
            num_tokens=num_tokens,
            prompt_hash=prompt_hash,
            prefilled=prefilled,
        )
        params = self._params(ticket)
        num_held = sum(map(len, held))
        self._lent[loan_id] = Lending(request.request_id, transfer_id, num_held, now)
        self._stats.add(num_loans=1)
        return params

    def _hash_of(self, request: host.Request, token_ids: Sequence[int], num_tokens: int) -> PromptHash | None:
        try:
            return hash_of_tokens(request, token_ids, num_tokens, self._identity)
        except UnnamedPrompt as error:
            logger.info("nothing is lent of request %s: %s", request.request_id, error)
            return None

    def _params(self, ticket: Ticket) -> dict[str, Any]:
        url = urlsplit(ticket.control_url)
        return {
            "remote_engine_id": ticket.producer.engine_id,
            "remote_host": url.hostname,
            "remote_port": url.port,
            "remote_block_ids": [list(group) for group in ticket.block_ids],
            "remote_request_id": ticket.request_id,
            "remote_num_tokens": ticket.num_tokens,
            "tp_size": ticket.tp_size,
            "baton_ticket": sign_ticket(ticket, self._identity.ticket_key),
        }

    def _held(
        self, tables: Sequence[Sequence[int]], num_tokens: int, num_computed: int
    ) -> tuple[tuple[BlockId, ...], ...]:
        """Blocks of each group that tokens after the first `num_tokens` need. Empty: they cannot be lent."""
        if self._identity.state_groups and num_tokens != num_computed:
            return ()  # The states are those after other tokens.
        size = self._identity.block_tokens
        last = num_blocks(num_tokens, size)
        held: list[tuple[BlockId, ...]] = []
        for group, table in zip(self._identity.groups, tables, strict=True):
            needed = tuple(BlockId(block_id) for block_id in table[group.first_kept(num_tokens, size) : last])
            if not needed or (group.window is not None and NULL_BLOCK_ID in needed):
                return ()  # Nothing is computed, or the window has moved on.
            assert group.window is not None or len(needed) == last, "computed tokens without a block"
            held.append(needed)
        return tuple(held)

    # --- Ends of loans ---------------------------------------------------------------------------

    def ended(self, effect: FreeLoan, now: float, *, is_given_up: bool = False) -> None:
        """The machine has ended a loan. On any thread. `is_given_up`: no consumer will come."""
        loan_id = effect.loan_id
        if self._holder is not None:
            self._ended.append(loan_id)
        lending = self._lent.pop(loan_id, None)
        if lending is None:
            return  # The ticket of this loan was never made.
        if self._holder is None:
            self.freed.add(lending.request_id)
        was_kept = self._kept.pop(loan_id, None) is not None
        outcome = "expired" if effect.expired else "taken back" if is_given_up else "released"
        self._stats.record_loan(loan_record(lending, outcome, now))
        if effect.expired and not was_kept:
            self._stats.add(num_expired_loans=1)
            logger.warning("loan %d expired: no consumer released it", loan_id.counter)

    def release_ended(self) -> bool:
        """Let the holder release the blocks of ended loans, on the engine's thread. False: there are none."""
        if not self._ended:
            return False
        ended, self._ended = self._ended, []
        for loan_id in ended:
            assert self._holder is not None
            self._holder.release(loan_id)
        return True

    def take_freed(self) -> set[str]:
        freed, self.freed = self.freed, set()
        return freed

    def take_back(self, params: Mapping[str, Any], now: float) -> None:
        """End the loan that these params of an answer lead to, unless a consumer has claimed it.

        A router that has not seen the answer names the transfer alone (`transfer_id`): 128 random bits, which
        no other party knows. It may come before the prefill has ended, which then lends nothing. Raises
        BadTransferParams for a ticket that this engine has not signed.
        """
        if "baton_ticket" not in params and isinstance(name := params.get("transfer_id"), str):
            if not self._take_back_all(name, now) and len(name) <= MAX_TRANSFER_ID_CHARS:
                self._foregone[name] = None
                if len(self._foregone) > FOREGONE_MAX:
                    del self._foregone[next(iter(self._foregone))]
            return
        if not isinstance(text := params.get("baton_ticket"), str):
            raise BadTransferParams("is missing, or no string", field=TICKET_FIELD)
        ticket = open_ticket(text, self._identity.ticket_key)
        if ticket.producer.engine_id != self._identity.engine_id:
            raise BadTransferParams("is of another engine", field=TICKET_FIELD)
        if ticket.producer.epoch == self._machine.epoch:  # Otherwise it is another connector's, or over.
            self._give_up(ticket.loan_id, now)

    def unwanted(self, effect: Unwanted, now: float) -> None:
        """The consumer of a loan will not come."""
        self._take_back_all(effect.transfer_id, now)

    def _take_back_all(self, transfer_id: str, now: float) -> bool:
        """False: nothing is lent under this name."""
        loans = [one for one, lent in self._lent.items() if lent.transfer_id == transfer_id]
        for loan_id in loans:
            self._give_up(loan_id, now)
        return bool(loans)

    def take_back_of(self, request_id: str, now: float) -> None:
        """Take back the blocks that this request has just lent."""
        for loan_id in [loan_id for loan_id, of in self._lent.items() if of.request_id == request_id]:
            self._give_up(loan_id, now)

    def _give_up(self, loan_id: LoanId, now: float) -> bool:
        """False if a consumer has claimed it, or it has ended."""
        effects = self._machine.give_up(loan_id)
        for effect in effects:
            assert isinstance(effect, FreeLoan)
            self.ended(effect, now, is_given_up=True)
        return bool(effects)

    # --- Blocks kept for a next turn -------------------------------------------------------------

    def make_room(self, num_tokens: int, num_computed_tokens: int, now: float) -> None:
        """Give up kept blocks until the pool has enough for the rest of this prompt. With a holder only."""
        if self._holder is None:
            return
        self.release_ended()
        size = self._identity.block_tokens
        last = num_blocks(num_tokens, size)
        num_wanted = sum(
            last - max(num_computed_tokens // size, group.first_kept(num_tokens, size))
            for group in self._identity.groups
        )
        while self._holder.num_free < num_wanted and self.give_up_oldest(now):
            pass

    def give_up_oldest(self, now: float) -> bool:
        """Free the oldest kept blocks that no consumer has claimed. False: there are none."""
        if self._holder is None or not any(self._give_up(loan_id, now) for loan_id in list(self._kept)):
            return False
        return self.release_ended()

    def _bound_kept(self, num_wanted: int, turns: TurnSettings, now: float) -> bool:
        """Give up the oldest until `num_wanted` more blocks can be kept. False: they cannot."""
        if self.num_pool_blocks is None:
            return True
        num_max = int(turns.pool_share_max * self.num_pool_blocks) - num_wanted
        for loan_id in list(self._kept):
            if sum(self._kept.values()) <= num_max:
                break
            self._give_up(loan_id, now)
        return sum(self._kept.values()) <= num_max

    # --- All loans -------------------------------------------------------------------------------

    def drain(self, deadline: float) -> None:
        """Lend nothing more; every loan ends by then."""
        self._machine.drain(deadline)

    def void(self, now: float) -> None:
        """End all loans, claimed or not. Only for memory that no peer can read any more."""
        for loan_id in list(self._lent):
            self.ended(FreeLoan(loan_id, expired=False), now, is_given_up=True)
        self.release_ended()

    @property
    def num_open(self) -> int:
        return self._machine.num_open


def loan_record(lending: Lending, outcome: str, now: float) -> dict[str, Any]:
    """A loan that has ended, for the timeline of its request."""
    return {
        "request_id": lending.request_id,
        "transfer_id": lending.transfer_id,
        "blocks": lending.num_blocks,
        "outcome": outcome,
        "lent_s": lending.lent_at,
        "ended_s": now,
    }


def _name_for_logs(request_id: str) -> RequestId:
    """Escapes half a surrogate pair, which is no valid text outside of Python."""
    shown = request_id[:_REQUEST_ID_CHARS].encode("utf-8", "backslashreplace").decode()
    return RequestId(shown[:_REQUEST_ID_CHARS])
