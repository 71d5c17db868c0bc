"""The host of a shared storage, and from it the namespace of its files in a folder.

Two engines share files exactly if everything is equal on which the bytes of a block depend:

    namespace = digest(model kv_identity, tokens of a chunk, each rank's layout, the key that signs files,
                       the windows of layers, if they have their own block tables)

Only the ranks know the layout, because they have the tensors. Only the scheduler half knows the weights'
digest, because a host's ranks need not compute it. So ranks report their layout, and get the namespace with
their orders.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from baton.connectors.extra_config import FIELD, parse_extra
from baton.connectors.host_view import HostView
from baton.connectors.storage.stores.layer_kinds import LayerKind, kinds_of
from baton.connectors.storage.stores.settings import StorageSettings
from baton.core.config import ClusterSecret
from baton.core.errors import ConfigError
from baton.core.kv_groups import has_states, is_hybrid
from baton.core.layout import SLOT
from baton.stores.base.chunk_name import STATE, ChunkName, namespace_digest
from baton.stores.chunks.chunk import FORMAT

if TYPE_CHECKING:
    import torch

KEY_PURPOSE = "baton.storage.1"


class StorageIdentity(HostView, frozen=True, kw_only=True):
    title: ClassVar[str] = "shared storage"

    settings: StorageSettings

    @classmethod
    def parse(cls, extra: Mapping[str, Any], secret: ClusterSecret | None) -> StorageSettings:
        return parse_extra(StorageSettings, extra)

    def __post_init__(self) -> None:
        if has_states(self.groups) and self.settings.chunk_tokens not in (None, self.block_tokens):
            raise ConfigError(
                f"must be the block size, {self.block_tokens}, for a model with recurrent states: a state is "
                "stored at the end of a block",
                field=f"{FIELD}.chunk_tokens",
            )
        self.settings.chunk_tokens_of(self.block_tokens)
        if self.settings.layerwise and not self.takes_back_tokens:
            raise ConfigError(
                "is not for vLLM, which does not take back every token of a load that fails while it is in "
                "use; docs/tiers.md says more",
                field=f"{FIELD}.layerwise",
            )
        if self.settings.layerwise and self.settings.layer_wait_s > self.step_timeout_s / 2:
            raise ConfigError(
                f"must be at most half of step_timeout_s, {self.step_timeout_s:g}: a slow store would make "
                "a step so long that the engine ends; lower it, or raise step_timeout_s",
                field=f"{FIELD}.layer_wait_s",
            )
        if self.settings.layerwise and self.has_block_tables:
            raise ConfigError(
                "needs one block table; this model has several, for windows or recurrent states",
                field=f"{FIELD}.layerwise",
            )
        self.settings.check_encryption(has_secret=self.secret is not None)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk. With recurrent states a chunk is one block, since steps end with blocks."""
        if has_states(self.groups):
            return self.block_tokens
        return self.settings.chunk_tokens_of(self.block_tokens)

    @property
    def chunk_blocks(self) -> int:
        return self.chunk_tokens // self.block_tokens

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of layers; a chunk has a file for each."""
        return kinds_of(self.groups, chunk_blocks=self.chunk_blocks, block_tokens=self.block_tokens)

    @property
    def signing_keys(self) -> tuple[bytes, ...]:
        """Keys of the files' checksums. The first one signs; that of the previous secret is accepted too.

        A checksum with such a key is a signature. With `insecure_no_secret` the key is empty, and a checksum
        detects accidents only.
        """
        return (b"",) if self.secret is None else self.secret.derive_all(KEY_PURPOSE)

    def values_of(self, namespace: str, key: bytes) -> list[str]:
        """Names of all values of a chunk: of every kind of layers, every rank's."""
        windows = [kind.window_of_files for kind in self.layer_kinds]
        ranks = range(self.num_ranks)
        return [str(ChunkName(namespace, key, rank, window)) for window in windows for rank in ranks]

    def namespaces(self, layouts: Mapping[int, str]) -> tuple[str, ...]:
        """Name of the folder for each of `signing_keys`. `layouts`: each rank's `layout_digest`."""
        return tuple(self._namespace(layouts, key) for key in self.signing_keys)

    def _namespace(self, layouts: Mapping[int, str], signing_key: bytes) -> str:
        assert len(layouts) == self.num_ranks
        # Contains the key's digest, or engines with another key would remove our files as corrupted.
        parts = [FORMAT, self.kv_identity.digest, self.chunk_tokens, namespace_digest(b"", signing_key)]
        if is_hybrid(self.groups):
            # The window of each layer. Files do not show how the layers of one window are split into groups.
            parts.append(
                sorted(
                    (layer, STATE if group.is_state else group.window)
                    for group in self.groups
                    for layer in group.layers
                )
            )
        return namespace_digest(msgspec.json.encode([*parts, [layouts[rank] for rank in sorted(layouts)]]))


def layout_digest(kv_caches: Mapping[str, torch.Tensor], block_tokens: int, packing: str = SLOT) -> str:
    """Digest of the form of one rank's chunk in a file. Raises ConfigError for caches of another shape.

    The first dimension is blocks; the tokens of a block are the third, or the second if there are no heads. A
    cache of recurrent states is `[num_blocks, bytes]`.
    The number of blocks and the strides may differ between engines and are left out.
    """
    if not kv_caches:
        raise ConfigError("has no layers", field="kv_caches")
    described = []
    for name, cache in kv_caches.items():
        is_state = cache.dim() == 2 and cache.dtype.itemsize == 1
        if not is_state and (cache.dim() not in (3, 4) or cache.shape[-2] != block_tokens):
            raise ConfigError(
                f"has shape {tuple(cache.shape)}, expected [num_blocks, (kv_heads,) {block_tokens}, content]",
                field=f"kv_caches.{name}",
            )
        described.append((name, list(cache.shape[1:]), str(cache.dtype)))
    return namespace_digest(msgspec.json.encode((packing, described)))
