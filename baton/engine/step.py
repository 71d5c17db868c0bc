"""What the scheduler tells the ranks in one step, and what they answer. vLLM v1's names and meaning.

No torch: block ids and token ids are ints. Both directions cross process boundaries (pickled between the
processes of one engine, which we started ourselves; never between hosts).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from baton.engine.api import PromptLogprobs, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from baton.contract import KVConnectorMetadata, KVConnectorOutput


@dataclass(slots=True)
class NewRequestData:
    """A request that this step's ranks see for the first time."""

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: tuple[list[int], ...]  # Per KV-cache group; the embedded engine has one.
    num_computed_tokens: int
    output_token_ids: list[int] = field(default_factory=list)  # Handed over by the engine that prefilled.
    # vLLM's, for connectors that read them. This engine has no multimodal inputs and no adapters.
    mm_features: tuple[Any, ...] = ()
    lora_request: None = None
    prompt_embeds: None = None


@dataclass(slots=True)
class CachedRequestData:
    """Requests that the ranks know already; parallel lists.

    For an id in `resumed_req_ids` (preempted, or rolled back after a failed load) `new_block_ids` is the
    whole block table and `all_token_ids` its prompt and output so far; for all others `new_block_ids` is
    appended (None: nothing new).
    """

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)


@dataclass(slots=True)
class SchedulerOutput:
    """One step. A request absent from `num_scheduled_tokens` does not run in it.

    A rank samples a token for a request exactly when its computed tokens reach all its known tokens
    (prompt plus output so far) with this step's chunk.
    """

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    finished_req_ids: set[str] = field(default_factory=set)  # Since the previous step; ranks forget them.
    preempted_req_ids: set[str] = field(default_factory=set)
    has_sync_kv_loads: bool = False
    # None: the connector could not say anything, or is retired; no worker half takes part in this step.
    kv_connector_metadata: KVConnectorMetadata | None = None


@dataclass(slots=True)
class ModelRunnerOutput:
    """The answer of one rank, or of all of them once aggregated.

    `sampled_token_ids[i]` belongs to `req_ids[i]` and is empty for a partial prefill.
    """

    req_ids: list[str] = field(default_factory=list)
    sampled_token_ids: list[list[int]] = field(default_factory=list)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    # Of the prompts' tokens: where the first of them stands in the prompt, and a row for each.
    prompt_logprobs: dict[str, tuple[int, PromptLogprobs]] = field(default_factory=dict)
    kv_connector_output: KVConnectorOutput | None = None
    connector_error: str | None = None  # What a worker half raised; contained, and already logged.
    loads_failed: bool = False  # It did so before this step's loads had begun: they will not be reported.
