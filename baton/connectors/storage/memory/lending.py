"""Loans of slots: other engines read what this one keeps in host memory, by the pull protocol.

    a request with `baton_lend_stored` ends --its slots are pinned, lent--> ticket --> another engine fetches
    the loan ends: released, expired, taken back --> the slots are unpinned, on the engine's thread

The rows of all slots are registered like a cache that has a block for each row. So the lender is a producer
as in pull (docs/protocol.md), with an address, a control channel and transports of its own. A consumer is any
engine with a pull connector; for it nothing differs. A lent slot is pinned: it is neither evicted nor reused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from baton.connectors.host_view import HostPolicy
from baton.connectors.pull import EngineIdentity, PullSchedulerHalf
from baton.connectors.storage.memory.identity import LenderIdentity
from baton.contract import host
from baton.core.hashing import BlockHash
from baton.core.ids import LoanId
from baton.stores.host.slots import Entry, SlotIndex

MakeHalf = Callable[[EngineIdentity], PullSchedulerHalf]


class SlotLender:
    """Called on the engine's thread only.

    Args:
        identity: identity of the producer that the lender is.
        half: makes the producer; a test replaces it.
    """

    def __init__(
        self,
        identity: LenderIdentity,
        index: SlotIndex[BlockHash],
        half: MakeHalf = PullSchedulerHalf,
    ) -> None:
        """Raises ConfigError if the port of the control channel cannot be had."""
        self._index = index
        self.num_slots_max = int(identity.settings.share_max * index.num_slots)
        self._lent: dict[LoanId, list[Entry[BlockHash]]] = {}
        self._offered: list[Entry[BlockHash]] | None = None  # Pinned for a loan that is being made.
        policy = HostPolicy(holder=self, survives_dead_control=True)
        self.half = half(msgspec.structs.replace(identity, policy=policy))

    def lend(
        self,
        request: host.Request,
        keys: Sequence[BlockHash],
        rows_of: Callable[[Entry[BlockHash]], Sequence[int]],
        chunk_tokens: int,
    ) -> tuple[int, dict[str, Any]] | None:
        """Lends the first of these chunks, as far as they are ready and the share of the slots allows it.

        `keys`: keys of the prompt's chunks, from its beginning. Returns the number of tokens and the
        `kv_transfer_params` that lead to them; None: nothing is lent.
        """
        found = self._index.pin(keys[: self._index.num_found(keys)])
        assert found is not None, "they are ready"
        num_lent = self._num_within_share(found)
        self._index.unpin(found[num_lent:])
        entries = self._offered = found[:num_lent]
        try:
            if not entries:
                return None
            rows = [row for entry in entries for row in rows_of(entry)]
            params = self.half.lend_blocks(request, rows, num_lent * chunk_tokens)
        finally:
            if self._offered is not None:
                self._index.unpin(self._offered)
                self._offered = None
        return None if params is None else (num_lent * chunk_tokens, params)

    def _num_within_share(self, entries: Sequence[Entry[BlockHash]]) -> int:
        """Number of entries that may be lent. A slot that several consumers read counts once."""
        lent = {entry for of_loan in self._lent.values() for entry in of_loan}
        for number, entry in enumerate(entries):
            lent.add(entry)
            if len(lent) > self.num_slots_max:
                return number
        return len(entries)

    # --- Of the slots, as BlockHolder ------------------------------------------------------------

    num_free = 0  # Nothing is given up for new loans.

    def bind(self, pool: Any) -> int:
        raise AssertionError("slots belong to no block pool")

    def hold(self, loan_id: LoanId, block_ids: Sequence[int]) -> None:
        """Holds the slots that are being lent; `block_ids` are their rows."""
        assert self._offered is not None
        self._lent[loan_id], self._offered = self._offered, None

    def release(self, loan_id: LoanId) -> None:
        self._index.unpin(self._lent.pop(loan_id, ()))
