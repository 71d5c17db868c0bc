"""One rank: its slice of the model, KV cache, worker half and runner. Every executor builds it in this way.

worker half -> KV cache (in the half's layout) -> register_kv_caches -> warm-up
"""

import pickle
import socket
import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from baton.checkpoints.checkpoint import files_state
from baton.contract import KVConnectorMetadata
from baton.contract.factory import ConnectorFactory, load_factory
from baton.core.config import EngineConfig
from baton.core.errors import UserError
from baton.engine.api import RequestError
from baton.engine.attention.cuda import require_cuda
from baton.engine.executor import RankStage, RankTake, RankWeights
from baton.engine.executor.rank_messages import (
    RankAssignment,
    RankCapture,
    RankReady,
    RankStep,
    RankStop,
    failure_of,
    packed_answer,
)
from baton.engine.graphs import DecodeGraphs, GraphMode, choose_mode
from baton.engine.models import Decoder, build_model, fill_weights, load_weights
from baton.engine.models.parallel import ProcessGroup, SingleRank, TensorParallelGroup
from baton.engine.process.channel import Channel
from baton.engine.runner.cache_setup import allocate_for, register
from baton.engine.runner.malloc_tuning import keep_freed_memory
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.sampler import Grammar
from baton.engine.step import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from baton.engine.text.grammar import Grammars

SEND_FAILURE_S = 5.0


class Worker:
    """Model slice, KV cache, worker half and runner of one rank, ready for steps once constructed."""

    def __init__(self, config: EngineConfig, factory: ConnectorFactory, group: TensorParallelGroup) -> None:
        model_config, device = config.model_config, device_of(config, group)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(config.device_config.num_threads)
            keep_freed_memory()
        model = build_model(model_config, group, device, kv_cache_groups=config.kv_cache_groups)
        load_weights(model, model_config.model)
        self._config, self._group, self._model = config, group, model
        self._staged: Decoder | None = None
        self._grammars: Grammars | None = None  # Made for the first request that has a grammar.
        self.half = factory.worker_half(config, group.rank)
        try:
            mode = choose_mode(config, self.half) if model.can_be_recorded else GraphMode.OFF
            num_scratch_blocks = 0 if mode is GraphMode.OFF else 1
            kv_caches = allocate_for(self.half, config, group, device, num_scratch_blocks=num_scratch_blocks)
            register(self.half, kv_caches, config.cache_config.num_gpu_blocks)
            graphs = None if mode is GraphMode.OFF else DecodeGraphs(config, model, kv_caches, mode, device)
            is_driver = group.rank == 0
            self._runner = ModelRunner(
                config,
                model,
                kv_caches,
                self.half,
                device=device,
                is_driver=is_driver,
                graphs=graphs,
                begin_grammar=self._begin_grammar if is_driver else None,
            )
            self._runner.warm_up()
            self.awaits_capture = mode is GraphMode.FULL and self.half.graph_capturable
            if not self.awaits_capture:
                self._runner.record_graphs()
        except BaseException:
            self.half.shutdown()
            raise

    def capture(self, metadata: KVConnectorMetadata) -> None:
        """Record the connector's layer hooks: once, before the first step.

        `metadata`: that of an empty step.
        """
        self._runner.record_graphs(metadata)

    def execute(
        self, scheduler_output: SchedulerOutput, told_token_ids: list[list[int]]
    ) -> ModelRunnerOutput:
        return self._runner.execute(scheduler_output, told_token_ids)

    def change_weights(self, message: RankStage | RankTake) -> RankWeights:
        """Read other weights, or compute with those that were read. Called between steps only."""
        match message:
            case RankStage(folder, files):
                try:
                    self._staged = self._read(folder)
                    if files_state(folder) != files:
                        raise UserError("changed while its weights were read", field="folder")
                except (UserError, OSError) as error:
                    self._staged = None
                    return RankWeights(RequestError(f"{folder}: {error}", is_users=True, field="folder"))
                except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError for want of memory.
                    self._staged = None
                    return RankWeights(RequestError(f"cannot read {folder}: {error}"))
            case RankTake(is_wanted):
                staged, self._staged = self._staged, None
                if is_wanted:
                    assert staged is not None, "weights are staged first"
                    self._model.take_weights(staged)
        return RankWeights()

    def _begin_grammar(self, grammar: str) -> Grammar:
        # Imported here: `baton check` runs engines without these libraries.
        from baton.engine.text.grammar import Grammars

        if self._grammars is None:
            self._grammars = Grammars(self._config.model_config)
        return self._grammars.begin(grammar)

    def _read(self, folder: str) -> Decoder:
        """A model in host memory with the weights of the folder. Raises UserError."""
        config = self._config
        staged = build_model(config.model_config, self._group, "cpu", kv_cache_groups=config.kv_cache_groups)
        fill_weights(staged, folder)
        for name, dtype in staged.stored_dtypes.items():
            if dtype != (own := self._model.stored_dtypes[name]):
                raise UserError(
                    f"{name} has dtype {dtype}, that of the loaded weights is {own}", field="model"
                )
        return staged


def device_of(config: EngineConfig, group: TensorParallelGroup) -> torch.device:
    """The rank's device; each rank has its own GPU. Raises UserError if there are too few."""
    if config.device_config.device != "cuda":
        return torch.device(config.device_config.device)
    require_cuda()
    if (found := torch.cuda.device_count()) < group.size:
        raise UserError(
            f"{group.size} ranks need {group.size} GPUs, and this host has {found}",
            field="parallel_config.tensor_parallel_size",
        )
    return torch.device("cuda", group.rank)


# --- In another process ---------------------------------------------------------------------------


class Rank:
    """One rank's worker, driven by messages. It owns the process group of its process."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def answer(
        self, message: RankAssignment | RankCapture | RankStep | RankStage | RankTake
    ) -> RankReady | RankWeights | ModelRunnerOutput:
        match message:
            case RankAssignment():
                worker = self._worker = _start(message)
                return RankReady(worker.half.get_handshake_metadata(), worker.awaits_capture)
            case RankCapture(metadata):
                self._started.capture(metadata)
                return RankReady(None)
            case RankStep(scheduler_output, told_token_ids):
                return self._started.execute(scheduler_output, told_token_ids)
            case RankStage() | RankTake():
                return self._started.change_weights(message)

    @property
    def _started(self) -> Worker:
        assert self._worker is not None, "the first message is the assignment"
        return self._worker

    def close(self) -> None:
        """Idempotent."""
        worker, self._worker = self._worker, None
        try:
            if worker is not None:
                worker.half.shutdown()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def worker_main(end: socket.socket) -> None:
    """Entry point of a rank's process; see `multiprocess`. Messages are pickled: Baton started both ends."""
    channel = Channel(end)
    rank = Rank()
    try:
        while True:
            channel.wait_readable()
            for payload in channel.receive_nowait():
                message = pickle.loads(payload)
                if isinstance(message, RankStop):
                    return
                channel.send_nowait(packed_answer(rank.answer(message)))
    except ConnectionError:
        return  # The parent has ended or closed the connection.
    except Exception as error:  # The error ends this process, after the core has got the reason.
        channel.send_nowait(packed_answer(failure_of(error)))
        channel.flush(SEND_FAILURE_S)
        if isinstance(error, UserError):
            sys.exit(1)  # The text is sufficient; a traceback would not help the user.
        raise
    finally:
        rank.close()


def _start(assignment: RankAssignment) -> Worker:
    config = assignment.config
    size = config.parallel_config.tensor_parallel_size
    group: TensorParallelGroup = SingleRank()
    if size > 1:
        backend = "nccl" if config.device_config.device == "cuda" else "gloo"
        # Public, but torch does not re-export it by name.
        store = dist.FileStore(assignment.store_path, size)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=assignment.rank, world_size=size)
        group = ProcessGroup()
    return Worker(config, load_factory(assignment.connector_factory), group)
