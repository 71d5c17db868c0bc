"""A connector that records the engine's calls, and fails on request.

The engine's processes find it by name ("engine_core_fakes:..."). `kv_connector_extra_config` sets its
behaviour there.
"""

import os
import signal
import threading
from dataclasses import dataclass, field
from typing import Any

from baton.contract import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorSchedulerHalf,
    KVConnectorStats,
    KVConnectorTransferResults,
    KVConnectorWorkerHalf,
)
from baton.core.config import EngineConfig
from baton.core.errors import ConfigError


@dataclass
class FakeMetadata(KVConnectorMetadata):
    step: int
    loads: dict[str, list[int]] = field(default_factory=dict)  # Request id to blocks.


@dataclass
class FakeHandshake(KVConnectorHandshakeMetadata):
    tp_rank: int
    num_layers: int


class FakeSchedulerHalf(KVConnectorSchedulerHalf):
    """Matches the `matched` tokens of a request's params, and lends the blocks of a request with `lend`."""

    def __init__(self) -> None:
        self.handshake: dict[tuple[int, int], KVConnectorHandshakeMetadata] = {}
        self.reports: list[KVConnectorOutput] = []
        self.num_steps = 0
        self.is_shut_down = False
        self.hangs_in_shutdown = False
        self.finished_count: int | None = None
        self.ends: set[str] = set()  # Loans that it ends itself, with the next report.
        self._loads: dict[str, list[int]] = {}
        self._asked: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        params = request.kv_transfer_params or {}
        if "matched" not in params or request.request_id in self._asked:
            return 0, False
        matched = max(0, params["matched"] - num_computed_tokens)
        return matched, bool(matched and params.get("is_async"))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._asked.add(request.request_id)
            self._loads[request.request_id] = blocks.get_block_ids()[0]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        self.num_steps += 1
        loads, self._loads = self._loads, {}
        return FakeMetadata(self.num_steps, loads)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if not connector_output.is_empty():
            self.reports.append(connector_output)
        connector_output.finished_sending = (connector_output.finished_sending or set()) | self.ends
        self.ends = set()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return None  # Tests replace it.

    def get_finished_count(self) -> int | None:
        return self.finished_count

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if (request.kv_transfer_params or {}).get("lend"):
            return True, {"blocks": len(block_ids)}
        return False, None

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self.handshake = metadata

    def shutdown(self) -> None:
        self.is_shut_down = True
        if self.hangs_in_shutdown:
            threading.Event().wait()


class FakeWorkerHalf(KVConnectorWorkerHalf):
    """`raises`: names of methods that raise. `results`: what transfers report, one entry per step.

    `is_idle`: it takes part in no step.
    """

    def __init__(self, tp_rank: int = 0) -> None:
        self.transcript: list[str] = []
        self.raises: set[str] = set()
        self.is_idle = False
        self.results: list[KVConnectorTransferResults] = []
        self.kill_on_step: int | None = None
        self.hang_on_step: int | None = None
        self._tp_rank = tp_rank
        self._num_layers = 0

    def _note(self, name: str, detail: str = "") -> None:
        bound = "" if self.has_connector_metadata() else " (unbound)"
        self.transcript.append(f"{name}{detail}{bound}")
        if name in self.raises:
            raise RuntimeError(f"{name} is broken")

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._num_layers = len(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return FakeHandshake(self._tp_rank, self._num_layers)

    def takes_part(self, connector_metadata: KVConnectorMetadata) -> bool:
        if "takes_part" in self.raises:
            raise RuntimeError("takes_part is broken")
        return not self.is_idle

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, FakeMetadata)
        if kv_connector_metadata.step == self.kill_on_step:
            os.kill(os.getpid(), signal.SIGKILL)
        if kv_connector_metadata.step == self.hang_on_step:
            threading.Event().wait()  # Like a deadlock: the process stays alive.
        self._note("handle_preemptions")

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._note("bind_connector_metadata")
        super().bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._note("clear_connector_metadata")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        of_layers = forward_context.attn_metadata
        num_tokens = next(iter(of_layers.values())).num_actual_tokens if of_layers else 0
        self._note("start_load_kv", f" [{num_tokens} tokens]")

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._note("wait_for_layer_load", f" {layer_name}")

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._note("save_kv_layer", f" {layer_name}")

    def finish_forward(self) -> None:
        self._note("finish_forward")

    def wait_for_save(self) -> None:
        self._note("wait_for_save")

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._note("get_transfer_results", f" {sorted(finished_req_ids)}")
        return self.results.pop(0) if self.results else KVConnectorTransferResults()

    def get_block_ids_with_load_errors(self) -> set[int]:
        self._note("get_block_ids_with_load_errors")
        return set()

    def get_expected_finished_count(self) -> int:
        self._note("get_expected_finished_count")
        return 0

    def get_kv_connector_stats(self) -> None:
        self._note("get_kv_connector_stats")

    def get_kv_connector_kv_cache_events(self) -> None:
        self._note("get_kv_connector_kv_cache_events")

    def build_connector_worker_meta(self) -> None:
        self._note("build_connector_worker_meta")

    def shutdown(self) -> None:
        self.transcript.append("shutdown")


def _told(config: EngineConfig) -> dict[str, Any]:
    transfer = config.kv_transfer_config
    return {} if transfer is None else transfer.kv_connector_extra_config


class FakeFactory:
    """Keeps the last halves that it made, for tests in the same process."""

    def __init__(self) -> None:
        self.scheduler: FakeSchedulerHalf | None = None
        self.worker: FakeWorkerHalf | None = None

    def scheduler_half(self, config: EngineConfig) -> KVConnectorSchedulerHalf:
        self.scheduler = FakeSchedulerHalf()
        self.scheduler.hangs_in_shutdown = _told(config).get("hangs_in_shutdown", False)
        self.scheduler.finished_count = _told(config).get("finished_count")
        return self.scheduler

    def worker_half(self, config: EngineConfig, tp_rank: int) -> KVConnectorWorkerHalf:
        told = _told(config)
        if "refuse" in told:
            raise ConfigError(told["refuse"], field="kv_transfer_config")
        self.worker = FakeWorkerHalf(tp_rank)
        self.worker.raises = set(told.get("raises", ()))
        self.worker.hang_on_step = told.get("hang_on_step")
        if told.get("kill_rank") == tp_rank:
            self.worker.kill_on_step = told["kill_on_step"]
        return self.worker


factory = FakeFactory()
FACTORY = "engine_core_fakes:factory"
