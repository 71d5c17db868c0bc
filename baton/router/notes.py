"""Notes between the processes of one router, about what one of them has seen or has been ordered to do.

A note is told once it has been applied where it comes from. Notes of one process arrive in their order; notes
of different processes may cross. What differs between processes thereby lasts until the next probe, and costs
a choice that is not the best, never a wrong answer.
"""

from typing import Any, Literal, TypeAlias

import msgspec

from baton.core.identity import KVIdentity
from baton.router.health import ProbeKind
from baton.router.identity import Introduced
from baton.router.members import Member
from baton.router.settings import EngineKey

Outcome = Literal["handed_over", "computed", "late", "refused", "other_weights"]


class _Note(msgspec.Struct, frozen=True, array_like=True): ...


class Joined(_Note, frozen=True, tag="Joined"):
    """An engine has become a member, again if it drains, or as a member has changed."""

    member: Member


class Drains(_Note, frozen=True, tag="Drains"):
    engine: EngineKey
    for_s: float
    is_leaving: bool


class Probed(_Note, frozen=True, tag="Probed"):
    engine: EngineKey
    kind: ProbeKind
    why: str
    admin_port: int | None


class Introduces(_Note, frozen=True, tag="Introduces"):
    engine: EngineKey
    found: Introduced | None


class LegFailed(_Note, frozen=True, tag="LegFailed"):
    engine: EngineKey
    why: str
    is_decisive: bool  # One failure is enough to eject the engine.


class Erred(_Note, frozen=True, tag="Erred"):
    """An answer of 500 and above, which is not a failure of the engine's health."""

    engine: EngineKey
    why: str


class Handoff(_Note, frozen=True, tag="Handoff"):
    """What D did with a prompt that P had lent."""

    producer: EngineKey
    consumer: EngineKey
    outcome: Outcome
    num_loaded: int = 0  # Tokens, of a sample of the pair's speed; 0: there is none.
    took_s: float = 0.0


class TurnKept(_Note, frozen=True, tag="TurnKept"):
    session: str
    keeper: EngineKey
    params: dict[str, Any]
    kv_identity: KVIdentity | None = None


class TurnTaken(_Note, frozen=True, tag="TurnTaken"):
    session: str


class Speeds(msgspec.Struct, frozen=True, array_like=True):
    """Of an engine, as one process has learned them. None: it has not."""

    prefill_tokens_per_s: float | None
    step_s: float | None  # Of an answer that runs alone.
    token_s: float | None  # That one more answer adds to each step.


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    engine: EngineKey
    in_flight: int
    num_requests: int  # This and the rest: since the process has started.
    num_failures: int
    num_heard: int  # Pieces of answers.
    num_queued_tokens: int  # Of prompts that the engine has still to compute.
    speeds: Speeds | None = None


class Load(_Note, frozen=True, tag="Load"):
    """Of one process; or of all others together, when it comes from the coordinator."""

    num_requests: int  # Of clients, in flight.
    engines: list[EngineLoad]


Note: TypeAlias = (
    Joined | Drains | Probed | Introduces | LegFailed | Erred | Handoff | TurnKept | TurnTaken | Load
)
