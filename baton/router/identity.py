"""Identity of an engine: the introduction of its connector, its model, and the names that it answers to."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from baton.core.identity import KVIdentity

Kind = Literal["baton", "vllm"]


class Introduction(msgspec.Struct, frozen=True):
    """What an engine reports of its connector and its model."""

    engine_id: str
    introduction: str | None  # Signed, for other engines; None: nothing can be pushed from here.
    max_model_len: int | None = None  # This and the rest are reported by Baton's engines only.
    served_model_name: str | None = None
    kv_identity: KVIdentity | None = None
    secret_ids: tuple[str, ...] | None = None  # Of the secret that it signs with, then of others it accepts.
    lost_links: dict[str, int] = {}  # Data connections that broke, by the engine id of the peer.
    has_states: bool = False  # Some layers have a recurrent state. A vLLM reports it too.
    kv_role: str | None = None
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
    """The model that an engine serves, as far as engines of its kind report it."""

    kind: Kind
    name: str
    checkpoint: tuple[str, str] | None = None  # Digests of architecture and weights.

    def __str__(self) -> str:
        digests = self.checkpoint
        return f"{self.name!r}" + (f" (weights {digests[1][:12]}, {digests[0][:12]})" if digests else "")


class Introduced(NamedTuple):
    """What an engine has turned out to be."""

    kind: Kind | None  # None: not known, or another one.
    introduction: Introduction | None
    max_model_len: int | None
    identity: Identity | None
    cards: tuple[ModelCard, ...] | None  # None: it reports no names.


class Seat(NamedTuple):
    """One engine in the vote on what the fleet serves."""

    identity: Identity
    is_decode: bool


def choose_identity(seats: Sequence[Seat], incumbent: Identity | None) -> Identity | None:
    """What most decode engines serve; among equals most engines, the incumbent, the first seat."""
    identities = list(dict.fromkeys(seat.identity for seat in seats))
    return max(
        identities,
        key=lambda identity: (
            sum(seat.identity == identity and seat.is_decode for seat in seats),
            sum(seat.identity == identity for seat in seats),
            identity == incumbent,
            -identities.index(identity),
        ),
        default=None,
    )
