"""P's requests: a finished prefill becomes a loan and a ticket; the end of the loan frees its blocks.

request_finished --lend, sign--> LENT (blocks stay) --FreeLoan--> freed --> finished_sending
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from baton.connectors.pull.agent import PullAgent
from baton.connectors.pull.door import Lend, hash_of_prompt, num_blocks, read_params
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.pairing import transfer_of_request
from baton.connectors.pull.stats import PullStats
from baton.contract import host
from baton.core.errors import BadTransferParams
from baton.core.ids import BlockId, LoanId, RequestId, TransferId
from baton.protocol.effects import FreeLoan
from baton.protocol.ticket import Ticket, sign_ticket

logger = logging.getLogger(__name__)

_LENDABLE: Final = frozenset({"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"})
"""vLLM's names of the ends after which a prompt's KV is complete."""


class PullLender:
    def __init__(
        self, agent: PullAgent, identity: EngineIdentity, control_url: str, stats: PullStats
    ) -> None:
        self._agent = agent
        self._identity = identity
        self._control_url = control_url
        self._stats = stats
        self._lent: dict[LoanId, str] = {}  # To request ids.
        self._freed: set[str] = set()  # Not reported yet.

    def finished(
        self, request: host.Request, block_ids: Sequence[int], now: float
    ) -> tuple[bool, dict[str, Any] | None]:
        """(blocks are lent, kv_transfer_params of the answer)."""
        try:
            wish = read_params(request.kv_transfer_params, self._identity)
        except BadTransferParams:
            return False, None  # Refused, and said so, when the request came.
        if not isinstance(wish, Lend) or request.status.name not in _LENDABLE:
            return False, None
        num_tokens = min(request.num_prompt_tokens, request.num_computed_tokens)
        held = block_ids[: num_blocks(num_tokens, self._identity.block_tokens)]
        if not held or request.prompt_token_ids is None:
            return False, None
        assert len(held) == num_blocks(num_tokens, self._identity.block_tokens), (
            "computed tokens without a block"
        )
        loan_id = self._agent.lend(now)
        if loan_id is None:
            return False, None  # Draining: the consumer computes the prompt itself.
        params = self._params(self._ticket(request, loan_id, wish.transfer_id, held, num_tokens))
        self._lent[loan_id] = request.request_id
        self._stats.count("num_loans")
        return True, params

    def absorb(self, effect: FreeLoan) -> None:
        request_id = self._lent.pop(effect.loan_id, None)
        if request_id is None:
            return  # Its ticket was never made.
        self._freed.add(request_id)
        if effect.expired:
            self._stats.count("num_expired_loans")
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
        block_ids: Sequence[int],
        num_tokens: int,
    ) -> Ticket:
        identity = self._identity
        return Ticket(
            producer=self._agent.address,
            control_url=self._control_url,
            loan_id=loan_id,
            transfer_id=transfer_id or transfer_of_request(request.request_id),
            request_id=RequestId(request.request_id),
            fingerprint=identity.fingerprint,
            tp_size=identity.tp_size,
            block_tokens=identity.block_tokens,
            block_ids=(tuple(BlockId(block_id) for block_id in block_ids),),
            num_tokens=num_tokens,
            prompt_hash=hash_of_prompt(request, num_tokens, identity),
            # Only hosts that can take them give them away; vLLM does neither.
            prefilled=getattr(request, "prefilled_tokens", None),
        )

    def _params(self, ticket: Ticket) -> dict[str, Any]:
        """vLLM's keys, so that existing proxies hand them on, and the signed part, alone believed."""
        url = urlsplit(ticket.control_url)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": ticket.producer.engine_id,
            "remote_host": url.hostname,
            "remote_port": url.port,
            "remote_block_ids": [list(group) for group in ticket.block_ids],
            "remote_request_id": ticket.request_id,
            "remote_num_tokens": ticket.num_tokens,
            "tp_size": ticket.tp_size,
            "transfer_id": ticket.transfer_id,
            "baton_ticket": sign_ticket(ticket, self._identity.ticket_key),
        }
