"""Identity of an engine: the introduction of its connector, its model, and the names that it answers to.

Engines of one name whose weights differ are one model: an update reaches a fleet engine by engine.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from baton.core.engine_card import EngineCard
from baton.core.identity import KVIdentity, differences, differs_in_weights_only

Kind = Literal["baton", "vllm"]

_DIGITS = re.compile(r"[0-9a-f]{32,}")


class ModelCard(msgspec.Struct, frozen=True):
    """A model in the answer of /v1/models."""

    id: str | None = None
    object: Any = "model"
    created: Any = None
    owned_by: str | None = None
    root: Any = None
    parent: Any = None  # Name of the model of an adapter.
    max_model_len: int | None = None


class Identity(NamedTuple):
    """The model that an engine serves, as far as the engine reports it."""

    kind: Kind
    name: str
    kv: KVIdentity | None = None

    def __str__(self) -> str:
        return f"{self.name!r}" + (
            f" (weights {weights_of(self.kv)}, {self.kv.model[:12]})" if self.kv else ""
        )


def weights_of(kv: KVIdentity) -> str:
    """Name of the weights for operators: their version, or the first digits of their digest."""
    return _DIGITS.sub(lambda found: found[0][:12], kv.version or kv.weights)


def is_compatible(ours: KVIdentity | None, theirs: KVIdentity | None) -> bool:
    """Whether one engine may use the KV of the other. If an identity is not known, the engines compare."""
    return ours is None or theirs is None or not differences(ours, theirs)


def has_other_weights(ours: KVIdentity | None, theirs: KVIdentity | None) -> bool:
    """Whether one engine cannot use the other's KV only because of its weights."""
    return ours is not None and theirs is not None and differs_in_weights_only(ours, theirs)


def is_continued_alike(ours: KVIdentity | None, theirs: KVIdentity | None) -> bool:
    """Whether one engine may continue an answer of the other. An engine that is not known may not."""
    return ours == theirs or (ours is not None and theirs is not None and not differences(ours, theirs))


class Introduced(NamedTuple):
    """Result of the questions to an engine."""

    kind: Kind | None  # None: not known, or another kind.
    introduction: EngineCard | None
    max_model_len: int | None
    identity: Identity | None
    cards: tuple[ModelCard, ...] | None  # None: it reports no names.


class Seat(NamedTuple):
    """One engine in the vote on what the fleet serves."""

    model: str  # Digest of the architecture.
    is_decode: bool


def choose_model(seats: Sequence[Seat], incumbent: str | None) -> str | None:
    """The model that most decode engines serve.

    Among equals it is the one that most engines serve, then the incumbent, then that of the first seat.
    """
    models = list(dict.fromkeys(seat.model for seat in seats))
    return max(
        models,
        key=lambda model: (
            sum(seat.model == model and seat.is_decode for seat in seats),
            sum(seat.model == model for seat in seats),
            model == incumbent,
            -models.index(model),
        ),
        default=None,
    )
