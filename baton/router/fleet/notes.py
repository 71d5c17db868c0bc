"""Notes between the processes of one router, about events that one of them has seen and orders that it got.

A process sends a note after it has applied the note itself. Notes of one process arrive in their order; notes
of different processes may cross. Differences between processes last until the next probe. They can cost a
choice that is not the best, never a wrong answer.
"""

from typing import Any, Literal, TypeAlias

import msgspec

from baton.core.identity import KVIdentity
from baton.router.fleet.breaker import ProbeKind
from baton.router.values.identity import Introduced
from baton.router.values.members import Member
from baton.router.values.settings import EngineKey

Outcome = Literal["handed_over", "computed", "late", "refused", "other_weights"]


class _Note(msgspec.Struct, frozen=True, array_like=True): ...


class Joined(_Note, frozen=True, tag="Joined"):
    """An engine has become a member, has become one again while it drains, or its member has changed."""

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
    """An answer with status 500 or above, which is not a failure of the engine's health."""

    engine: EngineKey
    why: str


class Handoff(_Note, frozen=True, tag="Handoff"):
    """What D did with a prompt that P had lent."""

    producer: EngineKey
    consumer: EngineKey
    outcome: Outcome
    num_loaded: int = 0  # Tokens that D has loaded in `took_s`; 0: there is no sample.
    took_s: float = 0.0


class TurnKept(_Note, frozen=True, tag="TurnKept"):
    session: str
    keeper: EngineKey
    params: dict[str, Any]
    kv_identity: KVIdentity | None = None


class TurnTaken(_Note, frozen=True, tag="TurnTaken"):
    session: str


class Speeds(msgspec.Struct, frozen=True, array_like=True):
    """Speeds of an engine that one process has learned. None: not learned."""

    prefill_tokens_per_s: float | None
    step_s: float | None  # Time of a step with one answer only.
    token_s: float | None  # Time that one more answer adds to each step.


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    engine: EngineKey
    in_flight: int = 0
    num_requests: int = 0  # Requests since the start of the process.
    num_failures: int = 0  # Failures since the start of the process.
    num_heard: int = 0  # Pieces of answers since the start of the process.
    num_queued_tokens: int = 0  # Prompt tokens that the engine has still to compute.
    speeds: Speeds | None = None


class Load(_Note, frozen=True, tag="Load"):
    """Load of one process. A load from the coordinator is the sum of all other processes."""

    num_requests: int  # Clients' requests in flight.
    engines: list[EngineLoad]


Note: TypeAlias = (
    Joined | Drains | Probed | Introduces | LegFailed | Erred | Handoff | TurnKept | TurnTaken | Load
)
