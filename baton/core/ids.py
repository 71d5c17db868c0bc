"""Identifiers. A bare str or int never crosses a module boundary.

The identity of a promise is minted by the one who makes it: a loan is numbered by the producer that
lends, a claim by the consumer that fetches.
"""

from typing import NamedTuple, NewType

TransferId = NewType("TransferId", str)  # 128 random bits, new for every dispatch of the router.
RequestId = NewType("RequestId", str)  # Unique inside one engine; never an identity between engines.
EngineId = NewType("EngineId", str)  # Configured; survives a restart. Never proof of anything.
Epoch = NewType("Epoch", int)  # 64 random bits at process start; does not survive a restart.
BlockId = NewType("BlockId", int)  # Index into one engine's block pool.
PromptHash = NewType("PromptHash", bytes)  # 32 bytes: tokens, salt, adapter, media. See core.hashing.


class Address(NamedTuple):
    """One incarnation of an engine. A restarted engine is somebody else."""

    engine_id: EngineId
    epoch: Epoch

    @property
    def is_named_only(self) -> bool:
        """Whoever is called so now, who has not said which incarnation it is. Nobody's own address."""
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
