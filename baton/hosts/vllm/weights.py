"""Tells our connectors inside vLLM when the weights of their engine change, or may have changed.

vLLM tells a connector to reset its cache, and no more. Weights change by other calls to the engine's
core, in the scheduler's process, between two steps:

    collective_rpc(method)       every method that `READS` does not list may change the weights
    set_weight_version(name)     names the weights from now on
    reset_prefix_cache()         fails while blocks are lent; a paused engine takes no step that ends loans
    sleep(1) ... wake_up()       brings back the weights from before, unless a call has changed them meanwhile

So these methods of vLLM's `EngineCore` are wrapped. Weights without a name get a version that no other
engine has, before the call and after it: what a step computes in between belongs to neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, Final

from baton.core.errors import ConfigError

READS: Final = {
    "check_health": "reads nothing",
    "checkpoint_prepare": "suspends the communication of ranks",
    "checkpoint_restore": "resumes the communication of ranks",
    "compute_weight_checksums": "reads weights",
    "get_compilation_match_table": "describes compiled graphs",
    "get_encoder_timing_stats": "reads times",
    "get_model_inspection": "describes the model",
    "get_supported_tasks": "describes the model",
    "init_weight_transfer_engine": "connects to the trainer; its later calls change the weights",
    "list_loras": "lists adapters, which requests name",
    "profile": "switches a profiler",
    "reset_encoder_cache": "drops what encoders have computed",
    "reset_mm_cache": "drops inputs of encoders",
    "shutdown_weight_transfer_engine": "disconnects from the trainer",
    "supports_draft_weight_updates": "describes the worker",
    "synchronize_device": "waits for the device",
    "update_max_model_len": "belongs to the start, before an identity is made",
}
"""Methods of vLLM's workers that leave the weights as they are, and why."""

FIRST_VERSION: Final = "default"
"""vLLM's name of the weights that an engine has started with."""

_WRAPPED: Final = "_baton_follows_weights"


def follow_weights(core: type[Any]) -> None:
    """Wrap the methods of vLLM's EngineCore, once. Raises ConfigError if it changes weights by other ways."""
    if _WRAPPED in vars(core):
        return
    if not hasattr(core, "collective_rpc"):
        raise ConfigError(
            "has no collective_rpc, by which connectors learn of other weights",
            field="vllm.EngineCore",
        )
    wrappers = {
        "collective_rpc": _rpc,
        "set_weight_version": _named,
        "sleep": _sleep,
        "wake_up": _wake_up,
        "reset_prefix_cache": _reset,
    }
    for name, wrapper in wrappers.items():
        if (method := getattr(core, name, None)) is not None:
            setattr(core, name, wraps(method)(wrapper(method)))
    setattr(core, _WRAPPED, True)


def set_weights(connectors: Iterable[Any], version: str | None) -> None:
    """Raises RuntimeError, as vLLM's own resets do, if a connector could still use KV of the old weights."""
    # A list, or a connector would not be told after one that fails.
    if not all([connector.set_weights(None, version) for connector in connectors]):
        raise RuntimeError("a KV connector cannot forget the KV of the old weights; restart this engine")


def connectors_of(core: Any) -> Iterator[Any]:
    """Our connectors of this engine, also below vLLM's MultiConnector. None before there is a scheduler."""
    waiting = [getattr(getattr(core, "scheduler", None), "connector", None)]
    while waiting:
        connector = waiting.pop()
        if hasattr(connector, "set_weights"):
            yield connector
        waiting += getattr(connector, "_connectors", ())


def _rpc(method: Callable[..., Any]) -> Callable[..., Any]:
    def collective_rpc(self: Any, called: Any, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(called, str) and called in READS:
            return method(self, called, *arguments, **keywords)
        self._baton_version_asleep = None
        ours = list(connectors_of(self))
        set_weights(ours, None)
        try:
            return method(self, called, *arguments, **keywords)
        finally:
            set_weights(ours, None)

    return collective_rpc


def _named(method: Callable[..., Any]) -> Callable[..., Any]:
    def set_weight_version(self: Any, weight_version: str) -> Any:
        answer = method(self, weight_version)
        self._baton_version_asleep = None
        set_weights(connectors_of(self), "" if weight_version == FIRST_VERSION else weight_version)
        return answer

    return set_weight_version


def _sleep(method: Callable[..., Any]) -> Callable[..., Any]:
    def sleep(self: Any, level: int = 1, *arguments: Any, **keywords: Any) -> Any:
        versions = [connector.weights_version for connector in connectors_of(self)]
        answer = method(self, level, *arguments, **keywords)
        # Level 2 discards the weights. Level 0 keeps all memory.
        self._baton_version_asleep = versions[0] if level == 1 and versions else None
        return answer

    return sleep


def _wake_up(method: Callable[..., Any]) -> Callable[..., Any]:
    def wake_up(self: Any, *arguments: Any, **keywords: Any) -> Any:
        is_awake = method(self, *arguments, **keywords)
        version = getattr(self, "_baton_version_asleep", None)
        if version is not None and not self.model_executor.is_sleeping:
            self._baton_version_asleep = None
            set_weights(connectors_of(self), version)
        return is_awake

    return wake_up


def _reset(method: Callable[..., Any]) -> Callable[..., Any]:
    def reset_prefix_cache(self: Any, *arguments: Any, **keywords: Any) -> Any:
        for connector in connectors_of(self):
            connector.has_pending_block_frees()  # Frees the blocks of loans that have ended.
        return method(self, *arguments, **keywords)

    return reset_prefix_cache
