"""Halves of the hidden-states connector.

    forward      layer i's states of the step's tokens --> a row for each slot of the KV cache, on the CPU
    a request    ends --> its slots' rows, copied before the next step starts --> a file, on a thread

A slot's states live as long as its KV. So a prompt whose beginning is in the prefix cache finds its states
there as well, from the request that computed them. The rows of freed blocks are overwritten in the forward
pass of the next step at the earliest, so blocks need not be held. All ranks have equal states; only the first
one keeps them. With several block tables the slots are those of the first group, which has full attention.

It must be the only connector: KV that another one loads comes without its states.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from baton.connectors.counted import Count, CountedStats, LabelledCount
from baton.connectors.hidden_states.settings import PATH_KEY, HiddenStatesSettings, includes_output
from baton.connectors.jobs import Jobs
from baton.contract import (
    KVConnectorMetadata,
    host,
)
from baton.contract.base import hidden_states_name
from baton.contract.defaults import FinishesByFirstGroup, NoLayerHooks
from baton.tiers.whole_file import write_whole

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class SaveStates:
    path: str
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HiddenStatesMetadata(KVConnectorMetadata):
    saves: tuple[SaveStates, ...] = ()


@dataclass
class HiddenStatesStats(CountedStats):
    """Statistics of saved hidden states: baton:hidden_states_files, _tokens and _lost_files."""

    counts: ClassVar[Mapping[str, Count]] = {
        "saved_files": Count("baton:hidden_states_files", "Requests whose hidden states were saved."),
        "saved_tokens": Count("baton:hidden_states_tokens", "Tokens whose hidden states were saved."),
        "lost_files": Count(
            "baton:hidden_states_lost_files", "Requests whose hidden states could not be saved."
        ),
    }
    labelled: ClassVar[Mapping[str, LabelledCount]] = {  # Counted by the host.
        "failures": LabelledCount("baton:hidden_states_failures", "reason", "Errors that were contained."),
    }

    def reduce(self) -> dict[str, int | float | str]:
        return {name.replace("_", " "): self.data[name] for name in self.counts}


class HiddenStatesSchedulerHalf(FinishesByFirstGroup):
    def __init__(self, settings: HiddenStatesSettings) -> None:
        self._settings = settings
        self._paths: dict[str, Path] = {}  # By request.
        self._saves: list[SaveStates] = []

    def on_new_request(self, request: host.Request) -> None:
        """Raises BadTransferParams for a wrong option."""
        includes_output(request.kv_transfer_params)
        self._paths[request.request_id] = self._settings.path_for(
            request.request_id, request.kv_transfer_params
        )

    def get_num_new_matched_tokens(
        self, request: host.Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        assert num_external_tokens == 0, "this connector never offers tokens"

    def build_connector_meta(self, scheduler_output: host.SchedulerOutput) -> KVConnectorMetadata:
        saves, self._saves = self._saves, []
        return HiddenStatesMetadata(tuple(saves))

    def has_pending_push_work(self) -> bool:
        return bool(self._saves)

    def reset_cache(self) -> bool:
        return True  # No KV is kept; states are found with the host's own blocks.

    def request_finished(
        self, request: host.Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        path = self._paths.pop(request.request_id, None)
        if path is None or request.status.name not in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"):
            return False, None
        if includes_output(request.kv_transfer_params):
            token_ids = list(request.all_token_ids)[:-1]  # The last one had no forward pass.
        else:
            token_ids = list(request.prompt_token_ids or ())
        assert len(token_ids) <= request.num_computed_tokens
        self._saves.append(SaveStates(str(path), tuple(token_ids), tuple(block_ids)))
        return False, {PATH_KEY: str(path)}


class HiddenStatesWorkerHalf(NoLayerHooks):
    def __init__(
        self,
        settings: HiddenStatesSettings,
        layers: tuple[int, ...],
        block_tokens: int,
        *,
        is_first_rank: bool,
    ) -> None:
        self._settings = settings
        self._layers = layers
        self._columns: Mapping[str, int] = {hidden_states_name(layer): i for i, layer in enumerate(layers)}
        self._block_tokens = block_tokens
        self._is_first_rank = is_first_rank
        self._num_slots = 0
        self._states: torch.Tensor | None = None  # [slots, layers, hidden size]; set on first use.
        self._writer = Jobs("hidden-states")
        self._lock = threading.Lock()
        self._backlog_bytes = 0
        self._stats = HiddenStatesStats()

    @property
    def hidden_states_wanted(self) -> tuple[int, ...]:
        return self._layers

    @property
    def final_norm(self) -> str:
        """For the last layer's states: "applied", as in transformers, or "not applied"."""
        return "applied"

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._num_slots = next(iter(kv_caches.values())).shape[0] * self._block_tokens

    # --- Step ----------------------------------------------------------------------------------

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Copies the states of ended requests first, because vLLM may clear the blocks that a step takes."""
        assert isinstance(kv_connector_metadata, HiddenStatesMetadata)
        self._writer.raise_if_dead()
        if self._is_first_rank:
            for save in kv_connector_metadata.saves:
                self._take(save)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """`kv_layer`: [tokens of the step, hidden size] for one of our names; otherwise a layer's KV."""
        column = self._columns.get(layer_name)
        if column is None or not self._is_first_rank:
            return
        if self._states is None:
            self._states = kv_layer.new_zeros(
                (self._num_slots, len(self._layers), kv_layer.shape[-1]), device="cpu"
            )
        self._states[attn_metadata.slot_mapping.to("cpu"), column] = kv_layer.to("cpu")

    def get_kv_connector_stats(self) -> HiddenStatesStats | None:
        with self._lock:
            return self._stats.take()

    def shutdown(self) -> None:
        self._writer.close(self._settings.shutdown_timeout_s)

    # --- Files ---------------------------------------------------------------------------------

    def states_of(self, block_ids: tuple[int, ...], num_tokens: int) -> torch.Tensor | None:
        """States of the first tokens in these blocks, copied: [tokens, layers, hidden size], on the CPU.

        None if the host has not passed any.
        """
        import torch

        if self._states is None:
            return None
        slots = torch.tensor(block_ids).unsqueeze(1) * self._block_tokens + torch.arange(self._block_tokens)
        return self._states[slots.flatten()[:num_tokens]]

    def _take(self, save: SaveStates) -> None:
        states = self.states_of(save.block_ids, len(save.token_ids))
        if states is None:
            logger.warning("this host passes no hidden states: %s will not be written", save.path)
            with self._lock:
                self._stats.add(lost_files=1)
            return
        with self._lock:
            if self._backlog_bytes + states.nbytes > self._settings.backlog_max_mib * MIB:
                self._stats.add(lost_files=1)
                logger.warning("backlog_max_mib is exceeded: %s will not be written", save.path)
                return
            self._backlog_bytes += states.nbytes
        self._writer.put(partial(self._write, save, states))

    def _write(self, save: SaveStates, states: torch.Tensor) -> None:
        """Runs on the writer's thread."""
        import safetensors.torch
        import torch

        tensors = {"hidden_states": states, "token_ids": torch.tensor(save.token_ids, dtype=torch.int64)}
        metadata = {
            "layer_ids": ",".join(str(layer) for layer in self._layers),
            "final_norm": self.final_norm,
        }
        try:
            write_whole([safetensors.torch.save(tensors, metadata)], Path(save.path), fsync=False)
        except OSError as error:
            logger.warning("could not write %s: %s", save.path, error)
            counts = {"lost_files": 1}
        else:
            counts = {"saved_files": 1, "saved_tokens": len(save.token_ids)}
        with self._lock:
            self._backlog_bytes -= states.nbytes
            self._stats.add(**counts)
