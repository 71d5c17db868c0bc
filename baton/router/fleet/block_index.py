"""The prefixes that engines have in their caches, learned from their KV events.

    prompt --prefix_keys--> one key for each CHUNK_TOKENS tokens
    engine's events --BlockIndex--> for each key the engines and tiers that have this prefix
    match: for each engine, how many tokens of the prompt it has from the beginning

Engines hash their blocks in ways of their own (vLLM's depend on PYTHONHASHSEED). The index therefore hashes
the token ids of the events itself, in a chain over blocks of the engine's size; engines with blocks of one
size share keys. Adapter and salt begin the chain, so prompts of two tenants never match.

A match is a prediction: an engine that lacks a block computes it.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from baton.core.kv_events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ExternalBlockHash,
    KVCacheEvent,
)

CHUNK_TOKENS = 256  # A chunk counts when its last block is there.
HOME_TOKENS = 2048  # More tokens than most system prompts have: else all prompts would have one home.
ENGINES_MAX = 512
_KEY_BYTES = 8
# An entry is one integer: key, the number of the block in its prompt, and the tiers that have it.
_NUM_TIERS = 3  # GPU, host memory, stores: the fastest first.
_POSITION_BITS = 24
_KEY_SHIFT = _POSITION_BITS + _NUM_TIERS
_TIERS_MASK = (1 << _NUM_TIERS) - 1
_POSITION_MASK = (1 << _POSITION_BITS) - 1


class Match(NamedTuple):
    """Tokens of a prompt, from its beginning, that an engine has."""

    num_gpu_tokens: int  # Tokens in the GPU cache.
    num_host_tokens: int  # Tokens in the GPU cache or in host memory.
    num_tokens: int  # Tokens in any tier.

    @classmethod
    def in_cache(cls, num_tokens: int) -> "Match":
        """A match whose tokens are all in the GPU cache."""
        return cls(num_tokens, num_tokens, num_tokens)

    @property
    def by_tier(self) -> tuple[int, int, int]:
        """Tokens to take from the GPU cache, from host memory, and from a store."""
        return (
            self.num_gpu_tokens,
            self.num_host_tokens - self.num_gpu_tokens,
            self.num_tokens - self.num_host_tokens,
        )


NO_MATCH = Match(0, 0, 0)


def root_key(adapter: str | None, salt: str | None) -> int:
    """The beginning of a chain: prompts with another adapter or salt share no block."""
    return _hash(repr((adapter, salt or None)).encode("utf-8", "surrogatepass"))


def prefix_keys(token_ids: Sequence[int], block_size: int, root: int) -> list[int]:
    """One key for each whole chunk of the prompt. `block_size`: tokens in an engine's block.

    Raises OverflowError for ids that have no 32 bits.
    """
    ids = array("I", token_ids).tobytes()
    num_bytes, per_chunk = 4 * block_size, blocks_per_chunk(block_size)
    key, keys = root, []
    num_blocks = len(token_ids) // block_size // per_chunk * per_chunk
    for number in range(num_blocks):
        key = _hash(key.to_bytes(_KEY_BYTES), ids[number * num_bytes : (number + 1) * num_bytes])
        if (number + 1) % per_chunk == 0:
            keys.append(key)
    return keys


def home_key(keys: Sequence[int], block_size: int) -> int:
    """A key that is equal for prompts whose first HOME_TOKENS are equal. 0: the prompt has no whole chunk."""
    num_chunks = max(1, HOME_TOKENS // (blocks_per_chunk(block_size) * block_size))
    return keys[min(num_chunks, len(keys)) - 1] if keys else 0


def blocks_per_chunk(block_size: int) -> int:
    return max(1, CHUNK_TOKENS // block_size)


def _hash(*parts: bytes) -> int:
    return int.from_bytes(blake2b(b"".join(parts), digest_size=_KEY_BYTES).digest())


class _Engine:
    def __init__(self, bit: int) -> None:
        self.bit = bit
        # Bits of a block, by its fastest tier: in the plane of that tier and in the plane of each slower one.
        self.bits_of = [
            sum(1 << bit + plane * ENGINES_MAX for plane in range(fastest, _NUM_TIERS))
            for fastest in range(_NUM_TIERS)
        ]
        self.bits = self.bits_of[0]
        self.block_size: int | None = None
        self.group: int | None = None  # The KV-cache group whose blocks are counted.
        self.entries: dict[ExternalBlockHash, int] = {}
        self.was_cleared = False  # The engine has cleared its cache since its weights changed last.


class BlockIndex:
    """Index of the blocks of all engines. Not thread-safe. Engines have names, such as their URLs."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._free_bits = list(range(ENGINES_MAX - 1, -1, -1))
        # Holders of each key: a plane of bits for each tier. A bit stands for an engine that has the prefix
        # in that tier or in a faster one.
        self._holders: dict[int, int] = {}
        self._all_bits = 0  # Bits of all engines, in all planes.

    def num_blocks(self, name: str) -> int:
        """Blocks of an engine, in all tiers together."""
        engine = self._engines.get(name)
        return 0 if engine is None else len(engine.entries)

    def block_sizes(self) -> Mapping[str, int]:
        """Block sizes of the engines that have reported blocks."""
        return {
            name: engine.block_size for name, engine in self._engines.items() if engine.block_size is not None
        }

    # --- Events

    def apply(self, name: str, events: Iterable[KVCacheEvent]) -> None:
        """Apply an engine's events. Senseless ones, such as a block after an unknown one, change nothing."""
        engine = self._engines.get(name)
        if engine is None:
            if not self._free_bits:
                return
            engine = self._engines[name] = _Engine(self._free_bits.pop())
            self._all_bits |= engine.bits
        for event in events:
            match event:
                case BlockStored():
                    self._store(engine, event)
                case BlockRemoved():
                    if event.group_idx == engine.group:
                        self._remove(engine, event.block_hashes, _tier_of(event.medium))
                case AllBlocksCleared():
                    self._clear(engine)
                    engine.was_cleared = True

    def forget(self, name: str) -> None:
        """Forget an engine that is gone, or whose events were lost."""
        engine = self._engines.pop(name, None)
        if engine is not None:
            self._clear(engine)
            self._all_bits &= ~engine.bits
            self._free_bits.append(engine.bit)

    def forget_old(self, name: str) -> None:
        """Forget the blocks of an engine's old weights.

        The blocks that it has stored since it cleared its cache are of the new weights, and stay.
        """
        if (engine := self._engines.get(name)) is not None:
            if not engine.was_cleared:
                self._clear(engine)
            engine.was_cleared = False

    def _store(self, engine: _Engine, event: BlockStored) -> None:
        size, hashes = event.block_size, event.block_hashes
        if size <= 0 or len(event.token_ids) != size * len(hashes):
            return  # vLLM's events of offloaded chunks may name a chunk without its tokens.
        if event.kv_cache_spec_kind not in (None, "full_attention", "mla_attention"):
            return  # A window's blocks leave the cache early.
        if engine.block_size is None:
            engine.block_size, engine.group = size, event.group_idx
        if (size, event.group_idx) != (engine.block_size, engine.group):
            return
        position, extra = 0, event.extra_keys or [None] * len(hashes)
        if event.parent_block_hash is None:
            key = root_key(event.lora_name, _salt_in(extra[0], event.lora_name))
        else:
            parent = engine.entries.get(event.parent_block_hash)
            if parent is None:
                return
            key, position = parent >> _KEY_SHIFT, (parent >> _NUM_TIERS & _POSITION_MASK) + 1
        try:
            ids = array("I", event.token_ids).tobytes()
        except (OverflowError, TypeError):
            return
        tier, num_bytes = 1 << _tier_of(event.medium), 4 * size
        for number, (block_hash, one) in enumerate(zip(hashes, extra, strict=False)):
            begin = number * num_bytes
            parts = [key.to_bytes(_KEY_BYTES), ids[begin : begin + num_bytes]]
            if one and any(isinstance(part, list | tuple) for part in one):
                parts.append(repr(one).encode())  # Images and the like.
            key = _hash(*parts)
            entry = engine.entries.get(block_hash)
            if entry is None:
                entry = key << _KEY_SHIFT | (position + number) << _NUM_TIERS
            # A block of another tier may be reported without its salt.
            key = entry >> _KEY_SHIFT
            engine.entries[block_hash] = entry | tier
            self._note(engine, key, position + number, entry & _TIERS_MASK | tier)

    def _remove(self, engine: _Engine, hashes: Iterable[ExternalBlockHash], tier: int) -> None:
        for block_hash in hashes:
            entry = engine.entries.get(block_hash)
            if entry is None:
                continue
            entry &= ~(1 << tier)
            if entry & _TIERS_MASK:
                engine.entries[block_hash] = entry
            else:
                del engine.entries[block_hash]
            self._note(engine, entry >> _KEY_SHIFT, entry >> _NUM_TIERS & _POSITION_MASK, entry & _TIERS_MASK)

    def _clear(self, engine: _Engine) -> None:
        entries, engine.entries = engine.entries, {}
        for entry in entries.values():
            self._note(engine, entry >> _KEY_SHIFT, entry >> _NUM_TIERS & _POSITION_MASK, 0)

    def _note(self, engine: _Engine, key: int, position: int, tiers: int) -> None:
        """Note that a block of the engine is in these tiers now."""
        assert engine.block_size is not None
        if (position + 1) % blocks_per_chunk(engine.block_size):
            return
        holders = self._holders.get(key, 0) & ~engine.bits
        if tiers:
            holders |= engine.bits_of[(tiers & -tiers).bit_length() - 1]
        if holders:
            self._holders[key] = holders
        else:
            self._holders.pop(key, None)

    def match(self, keys: Sequence[int], block_size: int) -> dict[str, Match]:
        """The match of each engine with blocks of this size that has the beginning of the prompt.

        `keys`: the result of `prefix_keys`. Takes 100 ns for each key.
        """
        holders, alive = self._holders.get, self._all_bits
        lengths: dict[int, int] = {}  # Chunks of the prompt that each bit's engine has in a row.
        for number, key in enumerate(keys):
            left = alive & holders(key, 0)
            if left != alive:
                if number:
                    lengths |= dict.fromkeys(_bits_of(alive ^ left), number)
                alive = left
                if not alive:
                    break
        lengths |= dict.fromkeys(_bits_of(alive), len(keys))
        per_chunk = blocks_per_chunk(block_size) * block_size
        found: dict[str, Match] = {}
        for name, engine in self._engines.items():
            gpu, host, any_tier = (
                lengths.get(engine.bit + plane * ENGINES_MAX, 0) * per_chunk for plane in range(_NUM_TIERS)
            )
            if any_tier:
                found[name] = Match(gpu, host, any_tier)
        return found


def _bits_of(mask: int) -> Iterable[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _tier_of(medium: str | None) -> int:
    return {MEDIUM_GPU: 0, None: 0, MEDIUM_CPU: 1}.get(medium, 2)


def _salt_in(extra: tuple[Any, ...] | None, adapter: str | None) -> str | None:
    """The salt in the extra keys of a first block.

    vLLM orders them: the adapter, (id, offset) of media, the salt, digests of embeddings.
    """
    texts = [part for part in extra or () if isinstance(part, str)]
    if adapter is not None and texts[:1] == [adapter]:
        texts = texts[1:]
    return texts[0] if texts else None
