"""Identity of an engine: the introduction of its connector, its model, and the names that it answers to.

Engines of one name whose weights differ are one model: an update reaches a fleet engine by engine.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from baton.core.identity import KVIdentity, differences, differs_in_weights_only

Kind = Literal["baton", "vllm"]

_DIGITS = re.compile(r"[0-9a-f]{32,}")


class Introduction(msgspec.Struct, frozen=True):
    """What an engine reports of its connector and its model."""

    engine_id: str
    introduction: str | None  # Signed, for other engines; None: nothing can be pushed from here.
    max_model_len: int | None = None  # This and the rest are reported by Baton's engines only.
    served_model_name: str | None = None
    kv_identity: KVIdentity | None = None  # A vLLM reports it too. None: it does not.
    secret_ids: tuple[str, ...] | None = None  # Of the secret that it signs with, then of others it accepts.
    lost_links: dict[str, int] = {}  # Data connections that broke, by the engine id of the peer.
    has_states: bool = False  # Some layers have a recurrent state. A vLLM reports it too.
    kv_role: str | None = None
    text_id: str = ""  # Names tokenizer, chat template and the tokens that end an answer; empty: not known.
    lends: tuple[str, ...] = ()  # Without computing: what it has in "host" memory; all, through its "cache".


class ModelCard(msgspec.Struct, frozen=True):
    """A model in the answer of /v1/models."""

    id: str | None = None
    object: Any = "model"
    created: Any = None
    owned_by: str | None = None
    root: Any = None
    parent: Any = None  # Of an adapter: the name of its model.
    max_model_len: int | None = None


class Identity(NamedTuple):
    """The model that an engine serves, as far as it reports it."""

    kind: Kind
    name: str
    kv: KVIdentity | None = None

    def __str__(self) -> str:
        return f"{self.name!r}" + (
            f" (weights {weights_of(self.kv)}, {self.kv.model[:12]})" if self.kv else ""
        )


def weights_of(kv: KVIdentity) -> str:
    """For operators: the version's name, or the first digits of the digest."""
    return _DIGITS.sub(lambda found: found[0][:12], kv.version or kv.weights)


def is_compatible(ours: KVIdentity | None, theirs: KVIdentity | None) -> bool:
    """Whether one engine may use the KV of the other. Where one is not known, the engines find it out."""
    return ours is None or theirs is None or not differences(ours, theirs)


def has_other_weights(ours: KVIdentity | None, theirs: KVIdentity | None) -> bool:
    """Whether this is all that keeps one engine from the other's KV."""
    return ours is not None and theirs is not None and differs_in_weights_only(ours, theirs)


def is_continued_alike(ours: KVIdentity | None, theirs: KVIdentity | None) -> bool:
    """Whether one engine may continue what the other has begun to answer. One that is not known may not."""
    return ours == theirs or (ours is not None and theirs is not None and not differences(ours, theirs))


class Introduced(NamedTuple):
    """What an engine has turned out to be."""

    kind: Kind | None  # None: not known, or another one.
    introduction: Introduction | None
    max_model_len: int | None
    identity: Identity | None
    cards: tuple[ModelCard, ...] | None  # None: it reports no names.


class Seat(NamedTuple):
    """One engine in the vote on what the fleet serves."""

    model: str  # Digest of the architecture.
    is_decode: bool


def choose_model(seats: Sequence[Seat], incumbent: str | None) -> str | None:
    """What most decode engines serve; among equals most engines, the incumbent, the first seat."""
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
