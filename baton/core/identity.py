"""Identity of KV: everything that determines the bytes of a block, besides the request's own prompt.

KV is used only where the identities are equal. A host puts into it all that can change what it computes;
what it leaves out, it leaves out by name and for a reason (docs/identity.md).

    KVIdentity     the engine: weights and their version, configuration, format of the cache
    extra_key      the request: salt, adapter, media, embeddings (`baton.core.hashing`)

The identity changes while an engine runs, when its weights do. `CurrentIdentity` is the one place that
holds it: tickets, handshakes, introductions and names of chunks read it when they are made, and keep no copy.
"""

import hashlib
import secrets

import msgspec

from baton.core.errors import UserError
from baton.core.layout import can_convert

VERSION_CHARS_MAX = 128
WEIGHTS_ID_DIGITS = 32  # Enough to tell weights apart; nothing is stored by it.


class KVIdentity(msgspec.Struct, frozen=True):
    """Identity of an engine's KV. Blocks of equal identities are compatible; a `dtype` may convert.

    Compared field by field, so that a refusal can name each field that differs.
    """

    model: str  # Content digest of the architecture (config), not a path.
    weights: str  # Content digest of the weights, or the name that the operator gave them.
    dtype: str  # The dtype of keys, values and latents. A cache with scales has a name of its own.
    num_layers: int  # Layers that have a cache. A layer with an index has two.
    num_kv_heads: int  # Heads of the whole model, over all ranks.
    head_dim: int  # Numbers in a head's key; in a latent, with latent attention.
    hash_seed: str  # The seed of the hashes of blocks and prompts.
    host: str = ""  # Digest of what the host's configuration changes; empty: nothing beside `model`.
    # The host's name for weights that changed while the engine ran, or one drawn at random, which no other
    # engine has. Empty: `weights` identifies them.
    version: str = ""

    @property
    def digest(self) -> str:
        """One digest of all fields, in hex: for names of stored chunks and for display."""
        return hashlib.sha256(msgspec.json.encode(msgspec.structs.astuple(self))).hexdigest()

    @property
    def weights_id(self) -> str:
        """Digest of weights and version, in hex: equal where engines answer with the same weights."""
        named = msgspec.json.encode([self.weights, self.version])
        return hashlib.sha256(named).hexdigest()[:WEIGHTS_ID_DIGITS]

    def updated(self, weights: str | None, version: str | None) -> "KVIdentity":
        """Identity after an update of the weights.

        Args:
            weights: their content digest; None: the host does not know it.
            version: the host's name for them; None: it has given none.
        """
        if version is None:
            version = "" if weights is not None else unnamed_version()
        return msgspec.structs.replace(
            self, weights=self.weights if weights is None else weights, version=version
        )


def unnamed_version() -> str:
    """A version for weights that nothing identifies: no other engine has it, and no later update."""
    return f"unnamed {secrets.token_hex(16)}"


def check_version(version: str, *, field: str) -> None:
    """Raises UserError for what cannot be a host's name of weights."""
    if not 0 < len(version) <= VERSION_CHARS_MAX or not version.isprintable():
        raise UserError(f"must have 1 to {VERSION_CHARS_MAX} printable characters", field=field)


class CurrentIdentity:
    """The identity of an engine's KV as it is now. Set it with the lock that its readers hold."""

    def __init__(self, value: KVIdentity) -> None:
        self.value = value

    def update(self, weights: str | None, version: str | None) -> bool:
        """See `KVIdentity.updated`. Returns whether the identity has changed."""
        before, self.value = self.value, self.value.updated(weights, version)
        return self.value != before


def differences(ours: KVIdentity, theirs: KVIdentity, *, converts_dtype: bool = True) -> list[str]:
    """One line for each field that differs; empty when the two are compatible.

    A dtype that can be converted on receive is not a difference, unless `converts_dtype` is false.
    """
    if ours == theirs:
        return []
    return [
        f"{name}: ours {getattr(ours, name)!r}, theirs {getattr(theirs, name)!r}"
        for name in KVIdentity.__struct_fields__
        if getattr(ours, name) != getattr(theirs, name)
        and not (name == "dtype" and converts_dtype and can_convert(theirs.dtype, ours.dtype))
    ]


def differs_in_weights_only(ours: KVIdentity, theirs: KVIdentity, *, converts_dtype: bool = True) -> bool:
    """Whether the engines compute alike but for their weights.

    This is no fault of either: an update reaches a fleet engine by engine.
    """
    if (ours.weights, ours.version) == (theirs.weights, theirs.version):
        return False
    ours = msgspec.structs.replace(ours, weights=theirs.weights, version=theirs.version)
    return not differences(ours, theirs, converts_dtype=converts_dtype)
