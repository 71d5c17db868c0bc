"""Connector that saves the hidden states of prompts to files, to train draft models and probes.

    PYTHONPATH=examples baton serve MODEL --kv-transfer-config '{"kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "hidden_states", "kv_role": "kv_producer",
        "kv_connector_extra_config": {"path": "/data/states", "layer_ids": [2, 14, 28]}}'

Each answer names its file, `hidden_states_path` in `kv_transfer_params`, which appears a little later.
Layer 0 is the embeddings, i the output of layer i, and the last one is taken after the final norm.

A slot's states are kept as long as its KV, so a prompt whose beginning is in the prefix cache has its states
there. A request's rows are copied before the next step can overwrite them, so its blocks are not held.
vLLM has a connector for its own models: `ExampleHiddenStatesConnector`.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors.torch import save_file

from baton.contract import KVConnectorMetadata, NullSchedulerHalf, NullWorkerHalf, TwoHalves
from baton.contract.base import hidden_states_name


@dataclass
class Metadata(KVConnectorMetadata):
    saves: list[tuple[str, list[int], list[int]]]  # File, token ids, blocks.


class SchedulerHalf(NullSchedulerHalf):
    def __init__(self, config: Any) -> None:
        self._folder = Path(config.kv_transfer_config.kv_connector_extra_config["path"])
        self._saves: list[tuple[str, list[int], list[int]]] = []

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        metadata, self._saves = Metadata(self._saves), []
        return metadata

    def has_pending_push_work(self) -> bool:
        return bool(self._saves)  # Run another step even if no request waits for one.

    def reset_cache(self) -> bool:
        return True  # No KV is kept.

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if request.status.name not in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"):
            return False, None
        name = hashlib.sha256(request.request_id.encode()).hexdigest()  # A client may choose the id.
        path = str(self._folder / f"{name}.safetensors")
        self._saves.append((path, list(request.prompt_token_ids), block_ids))
        return False, {"hidden_states_path": path}


class WorkerHalf(NullWorkerHalf):
    def __init__(self, config: Any) -> None:
        self._layers = tuple(config.kv_transfer_config.kv_connector_extra_config["layer_ids"])
        self._block_size = config.cache_config.block_size
        self._is_first_rank = config.parallel_config.rank == 0  # All ranks have equal states.
        self._states: torch.Tensor | None = None  # [slots, layers, hidden size].

    @property
    def hidden_states_wanted(self) -> tuple[int, ...]:
        return self._layers

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._num_slots = next(iter(kv_caches.values())).shape[0] * self._block_size

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        for path, token_ids, block_ids in connector_metadata.saves if self._is_first_rank else ():
            assert self._states is not None
            slots = torch.tensor(block_ids)[:, None] * self._block_size + torch.arange(self._block_size)
            states = self._states[slots.flatten()[: len(token_ids)]]
            temp = Path(path).with_name(uuid4().hex)
            save_file({"hidden_states": states, "token_ids": torch.tensor(token_ids)}, temp)
            temp.rename(path)  # Atomic: readers see a whole file or none.

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **_: Any) -> None:
        """Called for each layer's KV, and with the name of each wanted state."""
        names = [hidden_states_name(layer) for layer in self._layers]
        if layer_name in names and self._is_first_rank:
            if self._states is None:
                shape = (self._num_slots, len(names), kv_layer.shape[-1])
                self._states = torch.zeros(shape, dtype=kv_layer.dtype)
            self._states[attn_metadata.slot_mapping.cpu(), names.index(layer_name)] = kv_layer.cpu()


class HiddenStatesConnector(TwoHalves):
    stands_alone = True  # KV that another connector loads comes without its states.
    answered_params = frozenset({"hidden_states_path"})
    make_scheduler_half = classmethod(lambda cls, config, kv_cache_config: SchedulerHalf(config))
    make_worker_half = classmethod(lambda cls, config, kv_cache_config: WorkerHalf(config))
