"""Halves with defaults for hooks that many connectors do not need; names of a half's other hooks."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from baton.contract.base import KVConnectorSchedulerHalf, KVConnectorWorkerHalf, SupportsHMA

if TYPE_CHECKING:
    import torch

    from baton.contract import host


class FinishesByFirstGroup(KVConnectorSchedulerHalf, SupportsHMA):
    """Supports several KV-cache groups. Of a finished request it needs at most the first group's blocks."""

    def request_finished_all_groups(
        self, request: host.Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])


class NoLayerHooks(KVConnectorWorkerHalf):
    """The hooks around the forward pass and its layers do nothing, unless a subclass defines them."""

    def start_load_kv(self, forward_context: host.ForwardContext, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return

    def wait_for_save(self) -> None:
        return


@cache
def defined_by(kind: type[KVConnectorSchedulerHalf | KVConnectorWorkerHalf]) -> frozenset[str]:
    """Names of the methods and properties of a half that differ from the contract's defaults.

    The default of a method that a host calls in each step returns a constant, so the host need not call it.
    Exceptions are the defaults that bind and clear a step's metadata.
    """
    bases = (KVConnectorSchedulerHalf, KVConnectorWorkerHalf, NoLayerHooks)
    names = {name for base in bases for name in vars(base) if name[0] != "_" and hasattr(kind, name)}
    return frozenset(
        name for name in names if getattr(kind, name) not in [getattr(base, name, None) for base in bases]
    )
