"""Structural types of the host's objects that a connector may use.

vLLM's `Request`, `SchedulerOutput`, `KVCacheBlocks` and `VllmConfig` satisfy them unchanged, and so do the
embedded engine's. Members are read-only properties, so that frozen and mutable hosts both fit.
"""

from collections.abc import Sequence
from typing import Any, Protocol


class Request(Protocol):
    """The part of `vllm.v1.request.Request` that connectors use."""

    @property
    def request_id(self) -> str: ...
    @property
    def prompt_token_ids(self) -> Sequence[int] | None: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def kv_transfer_params(self) -> dict[str, Any] | None: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def status(self) -> Any:
        """An enum whose member names are vLLM's: WAITING, RUNNING, FINISHED_LENGTH_CAPPED, ..."""


class KVCacheBlocks(Protocol):
    """`vllm.v1.core.kv_cache_manager.KVCacheBlocks`."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Block ids of the request, one list per KV-cache group."""


class NewRequestData(Protocol):
    @property
    def req_id(self) -> str: ...
    @property
    def prompt_token_ids(self) -> list[int] | None: ...
    @property
    def block_ids(self) -> tuple[list[int], ...]: ...
    @property
    def num_computed_tokens(self) -> int: ...


class CachedRequestData(Protocol):
    @property
    def req_ids(self) -> list[str]: ...
    @property
    def resumed_req_ids(self) -> set[str]: ...
    @property
    def new_block_ids(self) -> Sequence[tuple[list[int], ...] | None]: ...
    @property
    def num_computed_tokens(self) -> list[int]: ...


class KVConnectorBlockState(Protocol):
    """`vllm.v1.core.sched.output.KVConnectorBlockState`."""

    @property
    def boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """Boundary states by request: (group, block id, tokens).

        The block has the group's recurrent state after so many tokens of the request, from the end of this
        step's forward pass to the end of the step. Block tables do not tell, because a host overwrites
        states and moves them.
        """


class SchedulerOutput(Protocol):
    """`vllm.v1.core.sched.output.SchedulerOutput`."""

    @property
    def scheduled_new_reqs(self) -> Sequence[NewRequestData]: ...
    @property
    def scheduled_cached_reqs(self) -> CachedRequestData: ...
    @property
    def num_scheduled_tokens(self) -> dict[str, int]: ...
    @property
    def total_num_scheduled_tokens(self) -> int: ...
    @property
    def finished_req_ids(self) -> set[str]: ...
    @property
    def preempted_req_ids(self) -> set[str] | None: ...
    @property
    def kv_connector_block_state(self) -> KVConnectorBlockState | None:
        """Only while `build_connector_meta` runs. None: the model has no recurrent states."""


class KVTransferConfigLike(Protocol):
    """vLLM's `KVTransferConfig` or ours (`baton.core.config`)."""

    @property
    def kv_connector(self) -> str | None: ...
    @property
    def engine_id(self) -> str | None: ...
    @property
    def is_kv_producer(self) -> bool: ...
    @property
    def is_kv_consumer(self) -> bool: ...
    @property
    def kv_load_failure_policy(self) -> str: ...
    @property
    def kv_connector_extra_config(self) -> dict[str, Any]: ...
    @property
    def kv_connector_module_path(self) -> str | None: ...
    def get_from_extra_config(self, key: str, default: Any) -> Any: ...


class HostConfig(Protocol):
    """`vllm.config.VllmConfig`, or `baton.core.config.EngineConfig`."""

    @property
    def kv_transfer_config(self) -> Any:
        """A KVTransferConfigLike, or None. `Any`, because vLLM's is a pydantic dataclass."""

    @property
    def cache_config(self) -> Any:
        """Has `block_size` (tokens)."""

    @property
    def parallel_config(self) -> Any:
        """Has `tensor_parallel_size`, `world_size`."""

    @property
    def model_config(self) -> Any: ...


class ForwardContext(Protocol):
    """Argument of `start_load_kv`: the part of `vllm.forward_context.ForwardContext` that connectors use."""

    @property
    def attn_metadata(self) -> Any:
        """Metadata by layer name; None in a dummy run and in a step without tokens."""

    @property
    def no_compile_layers(self) -> Any:
        """Layers by name; an attention layer has `kv_cache`."""
