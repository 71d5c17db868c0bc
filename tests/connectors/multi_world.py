"""A Multi connector with scripted children, on several ranks, one step at a time."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from baton.connectors.multi import MultiSchedulerHalf, MultiWorkerHalf
from baton.contract import (
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorSchedulerHalf,
    KVConnectorTransferResults,
    KVConnectorWorkerHalf,
    KVConnectorWorkerMetadata,
    KVOutputAggregator,
)
from baton.engine.step import SchedulerOutput
from baton.testing.host.workers import WorkerSteps
from tests.connectors.pull_world import FakeRequest

BLOCK = 4


def request_of(request_id: str, num_tokens: int = 17) -> FakeRequest:
    return FakeRequest(request_id, list(range(num_tokens)))


@dataclass
class OwnMetadata(KVConnectorMetadata):
    child: str
    step: int


@dataclass
class OwnReport(KVConnectorWorkerMetadata):
    child: str
    ranks: tuple[int, ...]

    def aggregate(self, other: OwnReport) -> OwnReport:
        assert other.child == self.child, "parts of different children were mixed"
        return OwnReport(self.child, tuple(sorted({*self.ranks, *other.ranks})))


class ScriptedScheduler(KVConnectorSchedulerHalf):
    def __init__(self, name: str) -> None:
        self.name = name
        self.answers: dict[str, Any] = {}  # (count, is_async) or an exception, by request.
        self.at_alloc: dict[str, Exception] = {}
        self.at_end: dict[str, Any] = {}  # (delay_free, params) or an exception, by request.
        self.raises: dict[str, Exception] = {}  # Exceptions that methods about a step raise once, by method.
        self.adds: tuple[set[str], set[str]] = (set(), set())  # (sent, received), added to the next report.
        self.allocated: list[tuple[str, int]] = []
        self.taken_back: list[dict[str, Any]] = []
        self.outputs: list[KVConnectorOutput] = []
        self.num_steps = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return _raised_or_returned(self.answers.get(request.request_id, (0, False)))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.allocated.append((request.request_id, num_external_tokens))
        if error := self.at_alloc.get(request.request_id):
            raise error

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        self.num_steps += 1
        self._raise("build_connector_meta")
        return OwnMetadata(self.name, self.num_steps)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        assert report is None or (isinstance(report, OwnReport) and report.child == self.name)
        self.outputs.append(
            KVConnectorOutput(
                finished_sending=set(connector_output.finished_sending or ()),
                finished_recving=set(connector_output.finished_recving or ()),
                expected_finished_count=connector_output.expected_finished_count,
            )
        )
        self._raise("update_connector_output")
        sent, received = self.adds
        self.adds = (set(), set())
        connector_output.finished_sending = (connector_output.finished_sending or set()) | sent
        connector_output.finished_recving = (connector_output.finished_recving or set()) | received

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return _raised_or_returned(self.at_end.get(request.request_id, (False, None)))

    def take_back(self, kv_transfer_params: Any) -> None:
        self.taken_back.append(dict(kv_transfer_params))

    def _raise(self, method: str) -> None:
        if error := self.raises.pop(method, None):
            raise error


class ScriptedWorker(KVConnectorWorkerHalf):
    def __init__(self, name: str, rank: int) -> None:
        self.name = name
        self.rank = rank
        self.raises: set[str] = set()  # Methods that raise in this step.
        self.results = KVConnectorTransferResults()  # The results of this step.
        self.invalid: set[int] = set()
        self.expected = 0  # Number of reports of an id, to be reported once.
        self.calls: list[str] = []

    def _note(self, method: str) -> None:
        self.calls.append(method)
        if method in self.raises:
            raise RuntimeError(f"{method} is broken")

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, OwnMetadata)
        assert kv_connector_metadata.child == self.name
        self._note("handle_preemptions")

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, OwnMetadata)
        assert connector_metadata.child == self.name
        assert not self.has_connector_metadata(), "bound twice"
        self._note("bind_connector_metadata")
        super().bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._note("clear_connector_metadata")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self.has_connector_metadata()
        self._note("start_load_kv")

    def wait_for_layer_load(self, layer_name: str) -> None:
        assert self.has_connector_metadata()
        self._note("wait_for_layer_load")

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        assert self.has_connector_metadata()
        self._note("save_kv_layer")

    def wait_for_save(self) -> None:
        assert self.has_connector_metadata()
        self._note("wait_for_save")

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._note("get_transfer_results")
        results, self.results = self.results, KVConnectorTransferResults()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        self._note("get_block_ids_with_load_errors")
        invalid, self.invalid = self.invalid, set()
        return invalid

    def get_expected_finished_count(self) -> int:
        self._note("get_expected_finished_count")
        expected, self.expected = self.expected, 0
        return expected

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        self._note("build_connector_worker_meta")
        return OwnReport(self.name, (self.rank,))


@dataclass
class Step:
    """What a step reports to the host."""

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    sent: set[str] = field(default_factory=set)
    abandoned: set[str] = field(default_factory=set)
    invalid: set[int] = field(default_factory=set)


class MultiWorld:
    def __init__(
        self,
        names: tuple[str, ...] = ("a", "b"),
        num_ranks: int = 2,
        kinds: Mapping[str, type[ScriptedScheduler]] | None = None,
    ) -> None:
        self.schedulers = {name: (kinds or {}).get(name, ScriptedScheduler)(name) for name in names}
        self.workers = [{name: ScriptedWorker(name, rank) for name in names} for rank in range(num_ranks)]
        self.half = MultiSchedulerHalf(list(self.schedulers.items()), block_tokens=BLOCK, num_ranks=num_ranks)
        self.ranks = [
            MultiWorkerHalf(list(workers.items()), rank=rank) for rank, workers in enumerate(self.workers)
        ]
        aggregator = KVOutputAggregator(self.half.get_finished_count() or num_ranks, num_ranks)
        caches = [{"layer": torch.empty(0)}] * num_ranks
        self._worker_steps = WorkerSteps(self.ranks, aggregator, caches=caches)

    def step(self) -> Step:
        output = SchedulerOutput(
            num_scheduled_tokens={"r": 1}, total_num_scheduled_tokens=1, has_sync_kv_loads=True
        )
        output.kv_connector_metadata = pickle.loads(pickle.dumps(self.half.build_connector_meta(output)))
        whole = pickle.loads(pickle.dumps(self._worker_steps.run(output))) or KVConnectorOutput()
        step = Step(invalid=set(whole.invalid_block_ids))
        self.half.update_connector_output(whole)
        step.failed = set(whole.failed_recving or ())
        step.received = set(whole.finished_recving or ())
        step.sent = set(whole.finished_sending or ())
        step.abandoned = set(whole.abandoned_recving)
        for workers in self.workers:
            for worker in workers.values():
                assert not worker.has_connector_metadata(), "bind and clear are paired"
                worker.raises = set()
        return step


def _raised_or_returned(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer
