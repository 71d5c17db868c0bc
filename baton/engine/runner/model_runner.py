"""One rank's step: applies the scheduler output, runs the model, samples, and calls the connector.

    update rows -> [connector: loads] -> forward -> logits of the last tokens -> sample
                -> wait for the device -> [connector: report]

A step has ended when the device has finished it, not when it has been launched. Two users rely on that: a
connector announces blocks to peers as ready, and the scheduler gives freed blocks to loads, which no stream
orders after a step's kernels. Reading the tokens of a step waits for the device, but a partial prefill has no
tokens.

Rank 0 samples for all ranks. The other ranks compute the same step without logits and get its tokens with the
next one, so ranks cannot differ in a token even if their arithmetic differs.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from baton.contract.base import KVConnectorMetadata, KVConnectorWorkerHalf
from baton.contract.halves import own_worker
from baton.core.config import EngineConfig
from baton.engine.api import PromptLogprobs
from baton.engine.attention.kv_memory import attention_layers
from baton.engine.forward_context import ForwardContext
from baton.engine.graphs import DecodeGraphs
from baton.engine.runner.connector_step import ConnectorStep
from baton.engine.runner.input_batch import InputBatch, IntArray, ScoredPrompt, StepInput
from baton.engine.runner.sampler import Grammar, Sampler, SamplingRow, prompt_logprobs
from baton.engine.step import ModelRunnerOutput, SchedulerOutput

WARM_UP_TOKENS = 8
SCORED_ROWS = 64  # Prompt tokens that are scored at once: 64 rows of 150,000 logits are 40 MB.


class Model(Protocol):
    """Interface of a model. T tokens of the step, H hidden size, B sampled rows, V vocabulary."""

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Hidden states [T, H], or only those of `context.wanted_tokens`."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, V], float32."""


class ModelRunner:
    """Runs steps on one rank: `warm_up`, `record_graphs`, then `execute` for each step."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        kv_caches: dict[str, torch.Tensor],
        half: KVConnectorWorkerHalf,
        *,
        device: torch.device,
        is_driver: bool = True,
        graphs: DecodeGraphs | None = None,
        begin_grammar: Callable[[str], Grammar] | None = None,
        wait_for_device: Callable[[], None] | None = None,
    ) -> None:
        """`begin_grammar` makes the state of a constrained answer, on the driver.

        `wait_for_device` returns when all launched work has ended. Default: torch's synchronisation."""
        self._model = model
        self._kv_caches = kv_caches
        self._layers = attention_layers(kv_caches, config.cache_config.num_gpu_blocks, config.kv_cache_groups)
        self._half = own_worker(half)
        self._device = device
        self._wait_for_device = wait_for_device or (lambda: _wait_for(device))
        self._is_driver = is_driver
        self._graphs = graphs
        self._block_size = config.cache_config.block_size
        self._batch = InputBatch(config, begin_grammar)
        self._sampler = Sampler()
        self._awaited_rows: deque[IntArray] = deque()  # Per step: rows whose tokens rank 0 has not sent yet.

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Make a dummy run, which touches no cache and calls no connector."""
        positions = torch.arange(WARM_UP_TOKENS, device=self._device)
        context = ForwardContext(kv_caches=self._kv_caches)
        hidden = self._model.forward(torch.zeros_like(positions), positions, context)
        self._model.compute_logits(hidden[-1:])
        self._wait_for_device()  # Includes the zeros of the new cache: no load may come before them.

    @torch.inference_mode()
    def record_graphs(self, metadata: KVConnectorMetadata | None = None) -> None:
        """Record graphs, after `warm_up`.

        The layer hooks are recorded too if there is metadata (of an empty step).
        """
        if self._graphs is not None:
            self._graphs.record(*((self._half, metadata) if metadata is not None else ()))
            self._wait_for_device()

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput, told_token_ids: list[list[int]]) -> ModelRunnerOutput:
        """Run a step.

        `told_token_ids`: the tokens of earlier steps that rank 0 sampled and this rank has not got yet, step
        by step. Rank 0 ignores it.
        """
        if not self._is_driver:
            for token_ids in told_token_ids:
                self._learn(token_ids)
        self._batch.update(output)
        context = ForwardContext(kv_caches=self._kv_caches, layers=self._layers)
        result = ModelRunnerOutput()
        step_input: StepInput | None = None
        if output.num_scheduled_tokens:
            # The input is built before the connector's hooks run: synchronous loads start before the forward
            # pass and read the metadata.
            step_input = self._batch.step_input(output.num_scheduled_tokens)
            context.attn_metadata = step_input.attn_metadata
            context.group_metadata = step_input.group_metadata
        with ConnectorStep(self._half, output, context, self._block_size) as step:
            if step_input is not None:
                self._compute(output, step_input, context, result)
                self._wait_for_device()
            elif not self._is_driver:
                self._awaited_rows.append(np.zeros(0, np.int64))
        result.connector_error = step.error
        result.loads_failed = step.loads_failed
        result.kv_connector_output = step.report
        return result

    def _compute(
        self,
        output: SchedulerOutput,
        step_input: StepInput,
        context: ForwardContext,
        result: ModelRunnerOutput,
    ) -> None:
        metadata = step_input.attn_metadata
        num_tokens = metadata.num_actual_tokens
        wanted = last_tokens = metadata.query_start_loc_np[:0]
        # Otherwise every token is the last one of its request.
        if len(step_input.sampled_index) < num_tokens:
            wanted = last_tokens = metadata.query_start_loc_np[1:][step_input.sampled_index] - 1
            if step_input.scored_prompts:
                wanted = _with_scored(last_tokens, step_input.scored_prompts)
            if len(wanted) < num_tokens:
                context.wanted_tokens = torch.from_numpy(wanted).to(self._device)
        # A replay does not call the connector's hooks, which prompts and loads need.
        if (
            self._graphs is not None
            and not output.has_sync_kv_loads
            and self._batch.only_decodes(step_input)
            and self._graphs.can_run(metadata)
        ):
            hidden = self._graphs.run(step_input.token_ids, context)
        else:
            input_ids = torch.from_numpy(step_input.token_ids).to(self._device)
            hidden = self._model.forward(input_ids, metadata.positions.to(self._device), context)
        if context.wanted_tokens is not None and len(hidden) > len(wanted):
            hidden = hidden[context.wanted_tokens]
        if self._is_driver:
            if step_input.scored_prompts:
                self._score_prompts(hidden, wanted, step_input.scored_prompts, result)
                hidden = hidden[torch.from_numpy(np.searchsorted(wanted, last_tokens)).to(self._device)]
            self._sample(hidden, step_input, result)
        else:
            self._awaited_rows.append(step_input.sampled_rows)

    def _sample(self, hidden_BH: torch.Tensor, step_input: StepInput, result: ModelRunnerOutput) -> None:
        result.req_ids = step_input.req_ids
        index = step_input.sampled_index
        if not len(index):
            result.sampled_token_ids = [[] for _ in step_input.req_ids]
            return
        logits_BV = self._model.compute_logits(hidden_BH)
        rows: list[SamplingRow] = self._batch.sampling_rows(step_input.sampled_rows)
        sampled = self._sampler.sample(logits_BV, rows, step_input.sampled_positions)
        self._batch.append(step_input.sampled_rows, sampled.token_ids)
        if len(index) == len(step_input.req_ids):
            result.sampled_token_ids = [[token_id] for token_id in sampled.token_ids]
        else:
            result.sampled_token_ids = [[] for _ in step_input.req_ids]
            for place, token_id in zip(index.tolist(), sampled.token_ids, strict=True):
                result.sampled_token_ids[place] = [token_id]
        result.errors = {step_input.req_ids[index[row]]: error for row, error in sampled.errors.items()}
        for row, logprobs in sampled.logprobs.items():
            result.logprobs[step_input.req_ids[index[row]]] = [logprobs]

    def _score_prompts(
        self,
        hidden: torch.Tensor,
        wanted: IntArray,
        scored_prompts: list[ScoredPrompt],
        result: ModelRunnerOutput,
    ) -> None:
        """Score prompt tokens, a few rows at a time, because a whole chunk's logits are gigabytes.

        `hidden`: hidden states of the tokens `wanted`.
        """
        for scored in scored_prompts:
            first = int(np.searchsorted(wanted, scored.first_row))
            parts: list[PromptLogprobs] = []
            for start in range(0, len(scored.token_ids), SCORED_ROWS):
                token_ids = scored.token_ids[start : start + SCORED_ROWS]
                rows = hidden[first + start : first + start + len(token_ids)]
                parts.append(prompt_logprobs(self._model.compute_logits(rows), token_ids, scored.num_top))
            joined = PromptLogprobs.joined(parts, width=parts[0].width)
            result.prompt_logprobs[scored.req_id] = (scored.first_position, joined)

    def _learn(self, token_ids: list[int]) -> None:
        rows = self._awaited_rows.popleft()
        assert len(token_ids) == len(rows), "rank 0 sent one token per sampled row"
        if token_ids:
            self._batch.append(rows, token_ids)


def _with_scored(last_tokens: IntArray, scored_prompts: list[ScoredPrompt]) -> IntArray:
    """Tokens of the step whose hidden states are needed, ascending. The same on every rank."""
    scored = [np.arange(part.first_row, part.first_row + len(part.token_ids)) for part in scored_prompts]
    return np.union1d(last_tokens, np.concatenate(scored))


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
