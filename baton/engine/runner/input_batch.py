"""State of one rank's requests as arrays: one row per request, kept until the request finishes.

    row    tokens                    num_tokens   blocks          num_blocks
     0   | 5 6 7 8 9 . . . |              5     | 3 4 . . |            2          prompt and output so far
     1   |                 |                                                      free
     2   | 7 7 2 . . . . . |              3     | 9 . . . |            1

A step selects its rows by one array index, so its cost hardly depends on the number of requests.
Preempted requests keep their rows, with the sampler's state, because they are resumed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from baton.core.config import EngineConfig
from baton.engine.forward_context import AttentionMetadata, metadata_of_tables
from baton.engine.runner.sampler import Grammar, SamplingRow
from baton.engine.step import NewRequestData, SchedulerOutput

IntArray: TypeAlias = npt.NDArray[np.int64]


@dataclass(slots=True)
class ScoredPrompt:
    """A part of a prompt whose next tokens get log-probabilities from this step's hidden states."""

    req_id: str
    first_row: int  # Index into the step's T tokens of the token before the first scored token.
    first_position: int  # Position of the first scored token in the prompt.
    token_ids: list[int]  # The scored tokens.
    num_top: int


@dataclass(slots=True)
class StepInput:
    """The rows that run in one step, in the order of `num_scheduled_tokens`."""

    req_ids: list[str]
    token_ids: IntArray  # [T]
    attn_metadata: AttentionMetadata
    group_metadata: tuple[AttentionMetadata, ...]  # Per KV-cache group; empty if there is one group.
    sampled_index: IntArray  # Indices of the `req_ids` that get a token.
    sampled_rows: IntArray
    sampled_positions: IntArray  # Positions of those tokens.
    rows: IntArray
    scored_prompts: list[ScoredPrompt]


class InputBatch:
    """Rows of one rank's requests; `update` applies a step, `step_input` builds its input."""

    def __init__(self, config: EngineConfig, begin_grammar: Callable[[str], Grammar] | None = None) -> None:
        """`begin_grammar`: makes the state of an answer; None: this rank does not sample."""
        self._begin_grammar = begin_grammar
        self._block_size = config.cache_config.block_size
        self._eos_token_ids = config.model_config.eos_token_ids
        self._seed = config.seed
        self._row_of: dict[str, int] = {}
        max_len = config.model_config.max_model_len
        capacity = min(16, config.scheduler_config.max_num_seqs)
        self._free = list(range(capacity - 1, -1, -1))
        self._sampling: list[SamplingRow | None] = [None] * capacity
        # Pages of zeros take no memory until they are written, so rows can have the length of the longest
        # request.
        self._tokens = np.zeros((capacity, max_len + 1), np.int32)
        self._num_tokens = np.zeros(capacity, np.int64)
        self._num_prompt_tokens = np.zeros(capacity, np.int64)
        self._scored: set[str] = set()  # Requests with `prompt_logprobs`.
        # One table per KV-cache group, all of one length. Blocks outside of a window are never read.
        width = -(-max_len // self._block_size) + 1
        self._blocks = [np.zeros((capacity, width), np.int32) for _ in config.kv_cache_groups]
        self._num_blocks = np.zeros(capacity, np.int64)
        self._num_computed = np.zeros(capacity, np.int64)
        # Rows of the last step. Most steps run the same requests as the step before.
        self._last_req_ids: list[str] = []
        self._last_rows = np.zeros(0, np.int64)
        self._last_sampling: tuple[IntArray, list[SamplingRow]] = (self._last_rows, [])
        self._every_index = np.arange(config.scheduler_config.max_num_seqs)
        self._ones = np.ones_like(self._every_index)

    def __len__(self) -> int:
        return len(self._row_of)

    def update(self, output: SchedulerOutput) -> None:
        """Apply a scheduler output. Ignores finished ids that were never scheduled."""
        for req_id in output.finished_req_ids:
            if (row := self._row_of.pop(req_id, None)) is not None:
                self._sampling[row] = None
                self._scored.discard(req_id)
                self._free.append(row)
                self._last_req_ids = []
        for new in output.scheduled_new_reqs:
            self._add(new)
        self._update_cached(output)

    def _add(self, new: NewRequestData) -> None:
        assert new.req_id not in self._row_of, "a request is new once"
        if not self._free:
            self._grow()
        row = self._row_of[new.req_id] = self._free.pop()
        token_ids = [*new.prompt_token_ids, *new.output_token_ids]
        self._tokens[row, : len(token_ids)] = token_ids
        self._num_tokens[row] = len(token_ids)
        self._num_prompt_tokens[row] = len(new.prompt_token_ids)
        if new.sampling_params.prompt_logprobs is not None:
            self._scored.add(new.req_id)
        self._num_computed[row] = new.num_computed_tokens
        self._set_blocks(row, new.block_ids)
        params, begin = new.sampling_params, self._begin_grammar
        self._sampling[row] = SamplingRow.of(
            new.req_id,
            params,
            prompt=new.prompt_token_ids,
            output=new.output_token_ids,
            eos_token_ids=self._eos_token_ids,
            engine_seed=self._seed,
            grammar=begin(params.grammar) if params.grammar is not None and begin is not None else None,
        )

    def _update_cached(self, output: SchedulerOutput) -> None:
        cached = output.scheduled_cached_reqs
        if not cached.req_ids:
            return
        rows = self._rows_of(cached.req_ids)
        self._num_computed[rows] = cached.num_computed_tokens
        for index, new_blocks in enumerate(cached.new_block_ids):
            if new_blocks is None:
                continue
            row, req_id = rows[index], cached.req_ids[index]
            if req_id in cached.resumed_req_ids:
                self._set_blocks(row, new_blocks)
                self._set_tokens(row, cached.all_token_ids[req_id])
            else:
                start = self._num_blocks[row]
                for table, block_ids in zip(self._blocks, new_blocks, strict=True):
                    table[row, start : start + len(block_ids)] = block_ids
                self._num_blocks[row] = start + len(new_blocks[0])
        self._drop_void_tokens(rows, cached.num_output_tokens)

    def _rows_of(self, req_ids: list[str]) -> IntArray:
        if req_ids != self._last_req_ids:
            self._last_rows = np.array([self._row_of[req_id] for req_id in req_ids])
            self._last_req_ids = req_ids
        return self._last_rows

    def _set_tokens(self, row: int, token_ids: list[int]) -> None:
        self._tokens[row, : len(token_ids)] = token_ids
        if len(token_ids) > self._num_tokens[row]:  # Tokens that the prefill engine sampled.
            self._num_tokens[row] = len(token_ids)
            self._recount(row)

    def _set_blocks(self, row: int, groups: tuple[list[int], ...]) -> None:
        for table, block_ids in zip(self._blocks, groups, strict=True):
            table[row, : len(block_ids)] = block_ids
        self._num_blocks[row] = len(groups[0])

    def _drop_void_tokens(self, rows: IntArray, num_output_tokens: list[int]) -> None:
        """Drop tokens that the scheduler has dropped, because loads of their step failed."""
        before, num_prompt = self._num_tokens[rows], self._num_prompt_tokens[rows]
        if (before - num_prompt).tolist() == num_output_tokens:
            return
        known = num_prompt + np.array(num_output_tokens, np.int64)
        changed = known != before
        assert (known <= before).all(), "the scheduler has tokens that were never sampled"
        self._num_tokens[rows] = known
        for row in rows[changed].tolist():
            self._recount(row)

    def _recount(self, row: int) -> None:
        sampling = self._sampling[row]
        assert sampling is not None
        sampling.recount(self._tokens[row, : self._num_tokens[row]].tolist())

    def step_input(self, num_scheduled_tokens: dict[str, int]) -> StepInput:
        """Build the input of a step. `num_scheduled_tokens` is not empty, and its requests have rows."""
        req_ids = list(num_scheduled_tokens)
        rows = self._rows_of(req_ids)
        num_tokens = sum(num_scheduled_tokens.values())
        if num_tokens == len(req_ids):
            scheduled = self._ones[:num_tokens]
        else:
            scheduled = np.fromiter(num_scheduled_tokens.values(), np.int64, len(req_ids))
        computed = self._num_computed[rows]
        of_groups = self._attention_metadata(rows, computed, scheduled, num_tokens)
        metadata = of_groups[0]
        seq_lens = metadata.seq_lens_np
        if metadata.max_query_len == 1:
            token_ids = self._tokens[rows, computed]
        else:
            token_ids = self._tokens[np.repeat(rows, scheduled), metadata.positions_np]
        num_known = self._num_tokens[rows]
        sampled = self._every_index[: len(rows)]
        sampled_rows, sampled_positions = rows, num_known
        if seq_lens.tobytes() != num_known.tobytes():
            sampled = (seq_lens == num_known).nonzero()[0]
            assert (seq_lens <= num_known).all(), "only known tokens can be computed"
            sampled_rows, sampled_positions = rows[sampled], num_known[sampled]
        return StepInput(
            req_ids=req_ids,
            token_ids=token_ids.astype(np.int64),
            attn_metadata=metadata,
            group_metadata=of_groups if len(of_groups) > 1 else (),
            sampled_index=sampled,
            sampled_rows=sampled_rows,
            sampled_positions=sampled_positions,
            rows=rows,
            scored_prompts=self._scored_prompts(req_ids, rows, computed, metadata.query_start_loc_np)
            if self._scored
            else [],
        )

    def only_decodes(self, step_input: StepInput) -> bool:
        """Whether every request has one token in this step, and no prompt token."""
        metadata, num_prompt = step_input.attn_metadata, self._num_prompt_tokens[step_input.rows]
        return metadata.max_query_len == 1 and bool((metadata.positions_np >= num_prompt).all())

    def _scored_prompts(
        self, req_ids: list[str], rows: IntArray, computed: IntArray, query_start: IntArray
    ) -> list[ScoredPrompt]:
        """Prompts of this step that need log-probabilities: the row of a token scores the next token."""
        is_scored = np.array([req_id in self._scored for req_id in req_ids])
        scored = []
        for index in (is_scored & (self._num_prompt_tokens[rows] - 1 > computed)).nonzero()[0]:
            row, first = rows[index], int(computed[index]) + 1
            end = min(first + int(query_start[index + 1] - query_start[index]), self._num_prompt_tokens[row])
            sampling = self._sampling[row]
            assert sampling is not None
            scored.append(
                ScoredPrompt(
                    req_ids[index],
                    int(query_start[index]),
                    first,
                    self._tokens[row, first:end].tolist(),
                    sampling.params.prompt_logprobs or 0,
                )
            )
        return scored

    def _attention_metadata(
        self, rows: IntArray, computed: IntArray, scheduled: IntArray, num_tokens: int
    ) -> tuple[AttentionMetadata, ...]:
        seq_lens = computed + scheduled
        is_beyond = seq_lens > self._num_blocks[rows] * self._block_size
        assert not np.count_nonzero(is_beyond), "a request has tokens beyond its blocks"
        width = -(-int(seq_lens[seq_lens.argmax()]) // self._block_size)  # `max` takes three times as long.
        return tuple(
            metadata_of_tables(
                computed, scheduled, table[:, :width][rows].astype(np.int64), self._block_size, num_tokens
            )
            for table in self._blocks
        )

    def sampling_rows(self, rows: IntArray) -> list[SamplingRow]:
        """Sampler state of `rows`. The same list as for the last step, if the same array is given."""
        if self._last_sampling[0] is not rows:
            states = [self._sampling[row] for row in rows.tolist()]
            self._last_sampling = (rows, [state for state in states if state is not None])
        return self._last_sampling[1]

    def append(self, rows: IntArray, token_ids: list[int]) -> None:
        """Append the tokens that were sampled for `rows`."""
        num_tokens = self._num_tokens[rows]
        self._tokens[rows, num_tokens] = token_ids
        self._num_tokens[rows] = num_tokens + 1

    def _grow(self) -> None:
        capacity = len(self._sampling)
        self._free.extend(range(2 * capacity - 1, capacity - 1, -1))
        self._sampling += [None] * capacity
        self._tokens = self._doubled(self._tokens, self._num_tokens)
        self._blocks = [self._doubled(table, self._num_blocks) for table in self._blocks]
        more = np.zeros(capacity, np.int64)
        self._num_tokens = np.concatenate([self._num_tokens, more])
        self._num_prompt_tokens = np.concatenate([self._num_prompt_tokens, more])
        self._num_blocks = np.concatenate([self._num_blocks, more])
        self._num_computed = np.concatenate([self._num_computed, more])

    @staticmethod
    def _doubled(table: npt.NDArray[np.int32], used: IntArray) -> npt.NDArray[np.int32]:
        """A table of twice the width. Copies only used entries, so unused pages take no memory."""
        doubled = np.zeros((2 * len(table), table.shape[1]), table.dtype)
        for row, length in enumerate(used.tolist()):
            doubled[row, :length] = table[row, :length]
        return doubled
