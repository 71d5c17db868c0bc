"""Identifiers. Module boundaries pass these types, never a bare str or int.

The side that makes a promise mints its identity: the producer that lends numbers the loan, the consumer that
fetches numbers the claim.
"""

from typing import NamedTuple, NewType

TransferId = NewType("TransferId", str)  # 128 random bits, new for every dispatch of the router.
RequestId = NewType("RequestId", str)  # Unique inside one engine; never an identity between engines.
EngineId = NewType("EngineId", str)  # Configured; survives a restart. Proves nothing by itself.
Epoch = NewType("Epoch", int)  # 64 random bits at process start; does not survive a restart.
BlockId = NewType("BlockId", int)  # Index into one engine's block pool.
# 32 bytes: tokens and all else that their KV depends on. See core.hashing.
PromptHash = NewType("PromptHash", bytes)


class Address(NamedTuple):
    """One incarnation of an engine. A restarted engine has another address."""

    engine_id: EngineId
    epoch: Epoch

    @property
    def is_named_only(self) -> bool:
        """Whether only the engine id is known, not the incarnation. No engine has such an address itself."""
        return self.epoch == NO_EPOCH


NO_EPOCH = Epoch(0)


class LoanId(NamedTuple):
    """One loan of one producer incarnation: its epoch and a counter. Never reused."""

    epoch: Epoch
    counter: int


class Pair(NamedTuple):
    """One edge of the plan: these two ranks have bytes to move."""

    producer_rank: int
    consumer_rank: int
