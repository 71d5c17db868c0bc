"""Engines of halves, without a model, over a real control channel, real transports and real threads."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from baton.assemble import connector_factory
from baton.contract import (
    KVConnectorOutput,
    KVConnectorSchedulerHalf,
    KVConnectorWorkerHalf,
    KVOutputAggregator,
)
from baton.core.config import EngineConfig
from baton.engine.request import RequestStatus
from baton.engine.step import SchedulerOutput
from baton.testing.host.model import HEAD_DIM
from baton.testing.host.workers import WorkerSteps
from tests.connectors.pull_world import (
    BLOCK,
    HEADS,
    LAYERS,
    FakeBlocks,
    FakeRequest,
    engine_config,
)

PATIENCE_S = 60.0
TOKENS = list(range(30))
OURS = [1, 2, 3, 8, 7, 6, 5, 4]  # Blocks of the consumer that a prompt of these goes to.


class Engine:
    """One rank, with the halves that a real engine would get."""

    def __init__(self, config: EngineConfig) -> None:
        self.cache = torch.zeros(LAYERS, 16, HEADS, BLOCK, 2 * HEAD_DIM)
        self.scheduler: KVConnectorSchedulerHalf = connector_factory.scheduler_half(config)
        self.worker: KVConnectorWorkerHalf = connector_factory.worker_half(config, 0)
        self.worker.register_kv_caches({f"layer.{i}": self.cache[i] for i in range(LAYERS)})
        self._worker_steps = WorkerSteps([self.worker], KVOutputAggregator(1))
        handshake = self.worker.get_handshake_metadata()
        assert handshake is not None
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})

    def step(self) -> KVConnectorOutput:
        return self._worker_steps.step(self.scheduler, SchedulerOutput()) or KVConnectorOutput()

    def step_until(self, done: Callable[[KVConnectorOutput], bool]) -> KVConnectorOutput:
        deadline = time.monotonic() + PATIENCE_S
        pause = threading.Event()
        while time.monotonic() < deadline:
            output = self.step()
            if done(output):
                return output
            # An engine pauses between steps without tokens, too: other threads need the interpreter.
            pause.wait(0.001)
        raise AssertionError("nothing was reported in time")

    def handed_over(self, request_id: str = "r") -> set[int]:
        """Steps until the request has its load. Returns the invalid blocks."""
        output = self.step_until(lambda output: bool(output.finished_recving))
        assert output.finished_recving == {request_id}
        return output.invalid_block_ids

    def shutdown(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


E = TypeVar("E", bound=Engine)


@contextmanager
def engines_of(kind: Callable[[EngineConfig], E]) -> Iterator[Callable[[EngineConfig], E]]:
    """Alive until the end; then no thread of theirs is left."""
    engines: list[E] = []

    def start_engine(config: EngineConfig) -> E:
        engines.append(kind(config))
        return engines[-1]

    yield start_engine
    for engine in engines:
        engine.shutdown()
        engine.shutdown()  # Twice is as good as once.
    left = [t.name for t in threading.enumerate() if t.name.startswith("baton")]
    assert not left


def lend(p: Engine, request_id: str) -> tuple[dict[str, object], list[int]]:
    request = FakeRequest(request_id, TOKENS, {"do_remote_decode": True})
    request.num_computed_tokens, request.status = len(TOKENS), RequestStatus.FINISHED_LENGTH_CAPPED
    blocks = [9, 3, 4, 5, 0, 11, 12, 7]
    p.cache.copy_(torch.rand_like(p.cache))
    lent, params = p.scheduler.request_finished(request, blocks)
    assert lent
    assert params is not None
    return params, blocks


def ask(d: Engine, params: dict[str, object], request_id: str = "r") -> FakeRequest:
    """The request that `lend` was for: it waits for its blocks."""
    request = FakeRequest(request_id, TOKENS, params)
    d.scheduler.on_new_request(request)
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (len(TOKENS), True)
    d.scheduler.update_state_after_alloc(request, FakeBlocks(OURS), len(TOKENS))
    return request


def two(start: Callable[[EngineConfig], E], transport: str = "local", **extra: object) -> tuple[E, E]:
    p, d = (start(engine_config(name, extra={"transports": [transport], **extra})) for name in ("p", "d"))
    return p, d
