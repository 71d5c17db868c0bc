"""Ranks of one engine without an executor: they compute with the model what steps tell them to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton.core.config import EngineConfig, ModelConfig
from baton.core.kv_groups import is_hybrid
from baton.engine.step import ModelRunnerOutput, SchedulerOutput
from baton.testing.host.memory import JUNK, RankMemory
from baton.testing.host.model import CONTENT, STATE, Model, Seen, Words, model_of
from baton.testing.host.rows import Row, Rows

Tables = Sequence[Sequence[int]]
"""Block ids of each cache group, from token 0 on."""


class Ranks:
    def __init__(
        self, config: EngineConfig, model: Model | None = None, memories: Sequence[RankMemory] = ()
    ) -> None:
        """Ranks of an engine with this configuration: its groups, windows, states and KV heads.

        `model`, `memories`: those of the ranks, if they exist already.
        """
        self.model = model or _model_of(config.model_config)
        num_ranks = config.parallel_config.tensor_parallel_size
        self.memories = memories or [RankMemory(config, rank) for rank in range(num_ranks)]
        self.groups = config.kv_cache_groups
        self.salts: dict[str, str | None] = {}
        self.weights = 0  # The weights that compute now.
        self._block_tokens = config.cache_config.block_size
        self._has_null_block = is_hybrid(self.groups)
        self.rows = Rows(self.salts)
        self.written: list[
            tuple[NDArray[np.int64], NDArray[np.int64]]
        ] = []  # Blocks and offsets that this step wrote.
        self._hidden: list[tuple[RankMemory, NDArray[np.int64], NDArray[np.int64], Words]] = []
        # One holder of each head; further ones are replicas, which have to agree.
        self._holders: list[RankMemory] = []
        self._replicas: list[RankMemory] = []
        held: set[int] = set()
        for memory in self.memories:
            group = self._replicas if memory.heads.start in held else self._holders
            group.append(memory)
            held.update(memory.heads)

    # --- Step -------------------------------------------------------------------------------------

    def take_over(self, output: SchedulerOutput) -> None:
        self.rows.take_over(output)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run requests as scheduled: one that shares a new block comes after the one that fills it."""
        result = ModelRunnerOutput()
        self.written.clear()
        for request_id, num_new in output.num_scheduled_tokens.items():
            row = self.rows[request_id]
            seen = self._compute(row, num_new)
            sampled: list[int] = []
            if row.num_computed + num_new == len(row.tokens):
                sampled = [self.model.next_token(seen)]
                row.tokens += sampled
            result.req_ids.append(request_id)
            result.sampled_token_ids.append(sampled)
        return result

    def _compute(self, row: Row, num_new: int) -> Seen:
        first, last = row.num_computed, row.num_computed + num_new
        assert last <= len(row.tokens)
        seen = self.model.read(self.read(row.tables, first), row.salt, self.weights)
        parts = []
        for token_id in row.tokens[first:last]:
            kv, seen = self.model.step(seen, token_id)
            parts.append(kv)
        if self._has_null_block:
            self._check_blocks(row.tables, first, last)
        self.write(row.tables, first, self.model.as_words(b"".join(parts)))
        return seen

    def _check_blocks(self, tables: Tables, first: int, last: int) -> None:
        for group, table in zip(self.groups, tables, strict=True):
            first_block, end = first // self._block_tokens, -(-last // self._block_tokens)
            assert 0 not in table[end - 1 if group.is_state else first_block : end], "computed into no block"

    def write(self, tables: Tables, first: int, words: Words) -> None:
        """Write the KV of the tokens from `first` on, `[token, layer, head, K|V]`; a state after the last."""
        last = first + len(words)
        positions = np.arange(first, last)
        offsets = positions % self._block_tokens
        for group, table in zip(self.groups, tables, strict=True):
            if group.is_state:
                for memory in self.memories:
                    memory.write_state(table[(last - 1) // self._block_tokens], words[-1, list(group.layers)])
                continue
            blocks = np.asarray(table, np.int64)[positions // self._block_tokens]
            self.written.append((blocks, offsets))
            for memory in self.memories:
                memory.write(blocks, offsets, words[:, list(group.layers)])

    def hide_later_layers(self) -> None:
        """Hide all that this step has computed except the first layer: the rest is not in memory yet."""
        for blocks, offsets in self.written:
            for memory in self.memories:
                self._hidden.append((memory, blocks, offsets, memory.words[blocks, 1:, :, offsets]))
        for memory, blocks, offsets, _ in self._hidden:
            memory.words[blocks, 1:, :, offsets] = JUNK

    def reveal(self) -> None:
        for memory, blocks, offsets, words in self._hidden:
            memory.words[blocks, 1:, :, offsets] = words
        self._hidden.clear()

    # --- Memory -----------------------------------------------------------------------------------

    def read(self, tables: Tables, num_tokens: int) -> bytes:
        """What lies in the slots of the first tokens, `[token, layer, head, K|V]`; the model knows what of it
        it may look at. Replicas that differ there are something wrong to see."""
        if not num_tokens:
            return b""
        parts = [self._slots(memory, tables, num_tokens) for memory in self._holders]
        for memory in self._replicas:
            index = next(i for i, holder in enumerate(self._holders) if holder.heads == memory.heads)
            differ = self._slots(memory, tables, num_tokens) != parts[index]
            parts[index] = np.where(differ, JUNK, parts[index])
        return (parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)).tobytes()

    def _slots(self, memory: RankMemory, tables: Tables, num_tokens: int) -> Words:
        """`[token, layer, head, K|V]` of this rank's heads."""
        num_blocks = -(-num_tokens // self._block_tokens)
        slots = np.empty((num_tokens, self.model.num_layers, len(memory.heads), CONTENT), np.uint32)
        for group, table in zip(self.groups, tables, strict=True):
            layers = list(group.layers)
            if group.is_state:
                slots[:, layers] = JUNK
                slots[-1, layers] = memory.state(table[num_blocks - 1], len(layers))
                continue
            slots[:, layers] = memory.blocks(table[:num_blocks], len(layers))[:num_tokens]
        return slots

    def holds(self, index: int, block_ids: Sequence[int], kv: Words, first: int) -> bool:
        """Every word of tokens `first` and up, in the layers of group `index`, equals `kv`."""
        last, layers = len(kv), list(self.groups[index].layers)
        if self.groups[index].is_state:
            block_id = block_ids[(last - 1) // self._block_tokens]
            return all(
                np.array_equal(
                    memory.state(block_id, len(layers)),
                    kv[-1, layers, memory.heads.start : memory.heads.stop],
                )
                for memory in self.memories
            )
        needed, wanted = block_ids[: -(-last // self._block_tokens)], kv[first:, layers]
        return all(
            np.array_equal(
                memory.blocks(needed, len(layers))[first:last],
                wanted[:, :, memory.heads.start : memory.heads.stop],
            )
            for memory in self.memories
        )

    def writers(self, index: int, block_ids: Sequence[int], first: int, last: int) -> set[int]:
        """Writers of the words of tokens [first, last) in the layers of group `index`, on all ranks."""
        needed = block_ids[: -(-last // self._block_tokens)]
        num_layers = len(self.groups[index].layers)
        found: set[int] = set()
        if self.groups[index].is_state:
            for memory in self.memories:
                found.update(np.unique(memory.writers_of_state(needed[-1], num_layers)).tolist())
            return found
        for memory in self.memories:
            found.update(np.unique(memory.writers_of(needed, num_layers)[first:last]).tolist())
        return found


def _model_of(config: ModelConfig) -> Model:
    windows = config.windows or (None,) * config.num_hidden_layers
    windows = tuple(STATE if i in config.state_layers else window for i, window in enumerate(windows))
    return model_of(config.num_kv_heads, windows)
