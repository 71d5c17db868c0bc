"""P's requests: a finished prefill becomes a loan and a ticket; the end of the loan frees its blocks.

request_finished --lend, sign--> LENT (blocks stay) --FreeLoan--> freed --> finished_sending

With `turns`, D does the same with what it has decoded: *kept* for the prefill of the next turn, if there will
be one. All that is kept is bounded by a share of the pool; beyond it the oldest makes room.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from baton.connectors.pull.control.agent import PullAgent
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.intent import (
    Borrow,
    Follow,
    Lend,
    OpenRequests,
    Seek,
    hash_of_prompt,
    hash_of_tokens,
    num_blocks,
)
from baton.connectors.pull.producer.pairing import transfer_of_request
from baton.connectors.pull.settings import TurnSettings
from baton.connectors.pull.stats import PullStats
from baton.contract import host
from baton.core.errors import BadTransferParams
from baton.core.ids import BlockId, LoanId, PromptHash, RequestId, TransferId
from baton.core.kv_groups import NULL_BLOCK_ID
from baton.core.prefilled import PrefilledTokens
from baton.protocol.effects import FreeLoan
from baton.protocol.ticket import TICKET_FIELD, Ticket, open_ticket, sign_ticket

logger = logging.getLogger(__name__)

_LENDABLE: Final = frozenset({"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"})
"""vLLM's names of the ends after which a prompt's KV is complete."""


_REQUEST_ID_CHARS = 256  # Of a name that only logs will show; a client's may be as long as it likes.


class BlockHolder(Protocol):
    """Keeps lent blocks by references of its own, for a host that forgets a request when it has finished.

    Called on the engine's thread.
    """

    def hold(self, loan_id: LoanId, block_ids: Sequence[int]) -> None: ...

    def release(self, loan_id: LoanId) -> None:
        """A loan that was never held changes nothing."""


class Loans:
    def __init__(
        self,
        agent: PullAgent,
        identity: EngineIdentity,
        control_url: str,
        public_key: bytes,
        requests: OpenRequests,
        stats: PullStats,
        holder: BlockHolder | None = None,
    ) -> None:
        self._agent = agent
        self._identity = identity
        self._control_url = control_url
        self._public_key = public_key
        self._requests = requests
        self._stats = stats
        self._holder = holder
        self._lent: dict[LoanId, str] = {}  # To request ids.
        self._kept: dict[LoanId, int] = {}  # For a next turn; to the number of blocks, oldest first.
        self._freed: set[str] = set()  # Not reported yet.
        self.num_pool_blocks: int | None = None  # As soon as the host has said.

    def finished(
        self, request: host.Request, block_ids: Sequence[Sequence[int]], now: float
    ) -> tuple[bool, dict[str, Any] | None]:
        """(the host has to keep the blocks, kv_transfer_params of the answer). `block_ids`: of each group."""
        try:
            wish = self._requests.params_of(request)
        except BadTransferParams:
            return False, None  # Refused, and said so, when the request came.
        if request.status.name not in _LENDABLE:
            return False, None
        if isinstance(wish, Borrow | Follow | Seek):
            return self._keep(request, block_ids, now)
        if not isinstance(wish, Lend):
            return False, None
        num_tokens = min(request.num_prompt_tokens, request.num_computed_tokens)
        held = self._held(block_ids, num_tokens)
        if not held or request.prompt_token_ids is None:
            return False, None
        loan_id = self._agent.lend(now)
        if loan_id is None:
            return False, None  # Draining: the consumer computes the prompt itself.
        if self._holder is not None:
            self._holder.hold(loan_id, [block_id for group in held for block_id in group])
        ticket = self._ticket(
            request,
            loan_id,
            wish.transfer_id,
            held,
            num_tokens,
            hash_of_prompt(request, num_tokens, self._identity),
            # Only hosts that can take them give them away; vLLM does neither.
            getattr(request, "prefilled_tokens", None),
        )
        params = {"do_remote_prefill": True, "do_remote_decode": False, **self._params(ticket)}
        params["transfer_id"] = ticket.transfer_id
        self._lent[loan_id] = request.request_id
        self._stats.add(num_loans=1)
        return self._holder is None, params

    def _keep(
        self, request: host.Request, block_ids: Sequence[Sequence[int]], now: float
    ) -> tuple[bool, dict[str, Any] | None]:
        """What was decoded here, for the next turn's prefill leg: vLLM's keys of a bidirectional transfer."""
        turns = self._identity.settings.turns
        if turns is None or not self._identity.is_producer:
            return False, None
        token_ids = request.all_token_ids  # The last one has no KV: it was sampled and never computed.
        num_tokens = min(request.num_computed_tokens, len(token_ids))
        held = self._held(block_ids, num_tokens)
        num_held = sum(map(len, held))
        if not held or num_tokens < turns.min_tokens or not self._make_room(num_held, turns, now):
            return False, None
        loan_id = self._agent.keep(now, turns.ttl_s)
        if loan_id is None:
            return False, None
        if self._holder is not None:
            self._holder.hold(loan_id, [block_id for group in held for block_id in group])
        prompt = hash_of_tokens(request, token_ids, num_tokens, self._identity)
        ticket = self._ticket(request, loan_id, None, held, num_tokens, prompt)
        # No transfer id: the next leg is another dispatch, and whoever sends it names it.
        params = {"do_remote_prefill": False, "do_remote_decode": True, **self._params(ticket)}
        self._lent[loan_id] = request.request_id
        self._kept[loan_id] = num_held
        self._stats.add(num_loans=1)
        return self._holder is None, params

    def _held(self, tables: Sequence[Sequence[int]], num_tokens: int) -> tuple[tuple[BlockId, ...], ...]:
        """Of each group, what tokens behind these need. Empty: there is nothing, or a window has moved on."""
        size = self._identity.block_tokens
        last = num_blocks(num_tokens, size)
        held: list[tuple[BlockId, ...]] = []
        for group, table in zip(self._identity.groups, tables, strict=True):
            needed = tuple(BlockId(block_id) for block_id in table[group.first_kept(num_tokens, size) : last])
            if not needed or (group.window is not None and NULL_BLOCK_ID in needed):
                return ()
            assert group.window is not None or len(needed) == last, "computed tokens without a block"
            held.append(needed)
        return tuple(held)

    def _make_room(self, num_wanted: int, turns: TurnSettings, now: float) -> bool:
        if self.num_pool_blocks is None:
            return True
        too_many = sum(self._kept.values()) + num_wanted - int(turns.pool_share_max * self.num_pool_blocks)
        for loan_id, num_kept in list(self._kept.items()):
            if too_many <= 0:
                break
            if self._agent.give_up(loan_id, now):
                del self._kept[loan_id]
                too_many -= num_kept
        return too_many <= 0

    def take_back(self, params: Mapping[str, Any], now: float) -> None:
        """End the loan of this answer, unless somebody has claimed it. Raises BadTransferParams."""
        if not isinstance(text := params.get("baton_ticket"), str):
            raise BadTransferParams("is missing, or no string", field=TICKET_FIELD)
        ticket = open_ticket(text, self._identity.ticket_key)
        if ticket.producer != self._agent.address:
            raise BadTransferParams("is of another engine", field=TICKET_FIELD)
        self._agent.give_up(ticket.loan_id, now)

    def give_up_oldest(self, now: float) -> bool:
        """Of what is kept for a next turn and claimed by nobody; its blocks are needed. False: nothing is."""
        for loan_id in list(self._kept):
            if self._agent.give_up(loan_id, now):
                del self._kept[loan_id]
                return True
        return False

    def absorb(self, effect: FreeLoan) -> None:
        if self._holder is not None:
            self._holder.release(effect.loan_id)
        request_id = self._lent.pop(effect.loan_id, None)
        if request_id is None:
            return  # Its ticket was never made.
        if self._holder is None:
            self._freed.add(request_id)
        was_kept = self._kept.pop(effect.loan_id, None) is not None
        if effect.expired and not was_kept:
            self._stats.add(num_expired_loans=1)
            logger.warning("loan %d expired: nobody released it", effect.loan_id.counter)

    @property
    def has_freed(self) -> bool:
        return bool(self._freed)

    def take_freed(self) -> set[str]:
        """Requests whose blocks are no longer lent, each once."""
        freed, self._freed = self._freed, set()
        return freed

    def _ticket(
        self,
        request: host.Request,
        loan_id: LoanId,
        transfer_id: TransferId | None,
        block_ids: tuple[tuple[BlockId, ...], ...],
        num_tokens: int,
        prompt: PromptHash,
        prefilled: PrefilledTokens | None = None,
    ) -> Ticket:
        identity = self._identity
        return Ticket(
            producer=self._agent.address,
            control_url=self._control_url,
            public_key=self._public_key,
            loan_id=loan_id,
            transfer_id=transfer_id or transfer_of_request(request.request_id),
            request_id=_name_for_logs(request.request_id),
            fingerprint=identity.fingerprint,
            tp_size=identity.tp_size,
            block_tokens=identity.block_tokens,
            block_ids=block_ids,
            windows=identity.windows,
            num_tokens=num_tokens,
            prompt_hash=prompt,
            prefilled=prefilled,
        )

    def _params(self, ticket: Ticket) -> dict[str, Any]:
        """vLLM's keys, so that existing proxies hand them on, and the signed part, alone believed."""
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


def _name_for_logs(request_id: str) -> RequestId:
    """Half a surrogate pair is a str to Python and to nobody else."""
    shown = request_id[:_REQUEST_ID_CHARS].encode("utf-8", "backslashreplace").decode()
    return RequestId(shown[:_REQUEST_ID_CHARS])
