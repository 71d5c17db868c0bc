"""Messages of one step between scheduler and ranks, with the names and meaning of vLLM v1.

No torch: block ids and token ids are ints. The messages are pickled between the processes of one engine,
which the engine started itself; they never cross hosts.
"""

from dataclasses import dataclass, field
from typing import Any

from baton.contract import KVConnectorMetadata, KVConnectorOutput
from baton.engine.api import PromptLogprobs, RequestError, SamplingParams, TokenLogprobs


@dataclass(slots=True)
class NewRequestData:
    """A request that is new to the ranks."""

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: tuple[list[int], ...]  # Per KV-cache group; the embedded engine has one.
    num_computed_tokens: int
    output_token_ids: list[int] = field(default_factory=list)  # Given by another engine.
    # vLLM's, for connectors that read them. This engine has no multimodal inputs and no adapters.
    mm_features: tuple[Any, ...] = ()
    lora_request: None = None
    prompt_embeds: None = None


@dataclass(slots=True)
class CachedRequestData:
    """Requests that the ranks already know, as parallel lists.

    An id in `resumed_req_ids` was preempted, or rolled back after a failed load: its `new_block_ids` is the
    whole block table, and its `all_token_ids` the prompt and output so far. The `new_block_ids` of another id
    are appended (None: no new blocks).
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


@dataclass(frozen=True, slots=True)
class KVConnectorBlockState:
    """Recurrent states at ends of blocks; see `baton.contract.host`."""

    boundary_state_offloads: dict[str, list[tuple[int, int, int]]]


@dataclass(slots=True)
class SchedulerOutput:
    """One step. Only the requests in `num_scheduled_tokens` run in it.

    A rank samples a token for a request exactly if this step's chunk completes all its known tokens
    (prompt plus output so far).
    """

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    finished_req_ids: set[str] = field(default_factory=set)  # Ended since the last step; ranks forget them.
    preempted_req_ids: set[str] = field(default_factory=set)
    has_sync_kv_loads: bool = False
    # States for the connector's scheduler half. It sees them before the ranks get the step without them.
    kv_connector_block_state: KVConnectorBlockState | None = None
    # None: the connector failed to build it, or is retired. No worker half takes part in this step then.
    kv_connector_metadata: KVConnectorMetadata | None = None


@dataclass(slots=True)
class ModelRunnerOutput:
    """The result of one rank, or the aggregated result of all ranks.

    `sampled_token_ids[i]` belongs to `req_ids[i]` and is empty for a partial prefill.
    """

    req_ids: list[str] = field(default_factory=list)
    sampled_token_ids: list[list[int]] = field(default_factory=list)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    # Logprobs of prompt tokens: the position of the first one in the prompt, and a row for each.
    prompt_logprobs: dict[str, tuple[int, PromptLogprobs]] = field(default_factory=dict)
    # Requests that cannot go on, whose token means nothing.
    errors: dict[str, RequestError] = field(default_factory=dict)
    kv_connector_output: KVConnectorOutput | None = None
    connector_error: str | None = None  # The error that a worker half raised; contained and already logged.
    # True: the error came before this step's loads began, so they are never reported.
    loads_failed: bool = False
