"""Step overhead benchmark: cost of a decode step besides the model, with a real engine and a null model.

    schedule    the scheduler decides the step
    runner      rows, attention metadata, connector hooks, sampler (greedy, a tiny vocabulary)
    update      tokens into requests, outputs, stats
    transport   outputs encoded and passed to a socket, as in the core's process
    front end   the same bytes decoded in the other process; not part of the step

Medians over the steps of one run. The budget: 0.15 ms at 16 running requests, 1 ms at 256.
"""

import socket
import statistics
import time
from collections.abc import Container
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from baton.contract import KVConnectorHandshakeMetadata
from baton.contract.null import NullWorkerHalf
from baton.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from baton.engine.api import EngineOutputs, EngineRequest, SamplingParams
from baton.engine.core.core_messages import FromCore, Outputs
from baton.engine.core.engine_core import EngineCore
from baton.engine.executor import Executor, done
from baton.engine.forward_context import ForwardContext
from baton.engine.process.channel import Channel
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.step import ModelRunnerOutput, SchedulerOutput

NUM_STEPS = 400
WARM_UP_STEPS = 40
PROMPT_TOKENS = 100
BUDGET_MS = {16: 0.15, 256: 1.0}
VOCAB_SIZE = 8


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one run, in milliseconds."""

    num_running: int
    schedule_ms: float
    runner_ms: float
    update_ms: float
    transport_ms: float
    front_end_ms: float

    @property
    def total_ms(self) -> float:
        return self.schedule_ms + self.runner_ms + self.update_ms + self.transport_ms


class NullModel:
    """Always generates token 1."""

    def __init__(self) -> None:
        self._logits = torch.zeros(1, VOCAB_SIZE)
        self._logits[0, 1] = 1.0

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        return input_ids

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits.expand(len(hidden), VOCAB_SIZE)


class NullModelExecutor(Executor):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(1)
        self._runner = ModelRunner(config, NullModel(), {}, NullWorkerHalf(), device=torch.device("cpu"))

    def submit(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        output = self._runner.execute(scheduler_output, [])
        output.kv_connector_output = self._aggregator.aggregate([output.kv_connector_output])
        return done(output)

    def handshake_metadata(self) -> dict[int, KVConnectorHandshakeMetadata]:
        return {}

    def forget_all_but(self, request_ids: Container[str]) -> None:
        return  # There are no reports of ranks to forget.

    def shutdown(self) -> None:
        return


def null_config(num_running: int) -> EngineConfig:
    max_model_len = 4096
    return EngineConfig(
        model_config=ModelConfig(
            model="",
            served_model_name="null",
            dtype="float32",
            max_model_len=max_model_len,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_kv_heads=1,
            head_dim=2,
            hidden_size=2,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(0,),
            bos_token_id=None,
            architecture_digest="",
            weights_digest="",
            hf_config={},
        ),
        cache_config=CacheConfig(num_gpu_blocks=num_running * 64 + 2),
        scheduler_config=SchedulerConfig(max_num_seqs=num_running, max_num_batched_tokens=8192),
    )


class OutputPipe:
    """Passes outputs from the core's encoder to the front end's decoder through a real socket."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._core_end, self._front_end = Channel(ours), Channel(theirs)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromCore)

    def send(self, outputs: EngineOutputs) -> None:
        self._core_end.send_nowait(self._encoder.encode(Outputs(outputs)))

    def receive(self) -> None:
        for payload in self._front_end.receive_nowait():
            self._decoder.decode(payload)
        self._core_end.flush_nowait()

    def close(self) -> None:
        self._core_end.close()
        self._front_end.close()


def measure(num_running: int, *, num_steps: int = NUM_STEPS) -> Row:
    config = null_config(num_running)
    core = EngineCore(config, None, executor=NullModelExecutor(config))
    pipe = OutputPipe()
    try:
        for index in range(num_running):
            core.add_request(
                EngineRequest(
                    request_id=f"request-{index}",
                    # Different lengths, so that they do not all need a new block in the same step.
                    prompt_token_ids=[2] * (PROMPT_TOKENS + index % 16),
                    sampling_params=SamplingParams(max_tokens=1024, temperature=0, ignore_eos=True),
                    arrival_time_s=0.0,
                )
            )
        samples = [_one_step(core, pipe) for _ in range(WARM_UP_STEPS + num_steps)][WARM_UP_STEPS:]
    finally:
        pipe.close()
        core.shutdown()
    medians = [statistics.median(column) * 1e3 for column in zip(*samples, strict=True)]
    return Row(num_running, *medians)


def _one_step(core: EngineCore, pipe: OutputPipe) -> tuple[float, ...]:
    times = core.times
    before = (times.schedule_s, times.execute_s, times.update_s)
    outputs = core.step()
    after = (times.schedule_s, times.execute_s, times.update_s)
    started = time.perf_counter()
    pipe.send(outputs)
    sent = time.perf_counter()
    pipe.receive()
    received = time.perf_counter()
    parts = [late - early for early, late in zip(before, after, strict=True)]
    return (*parts, sent - started, received - sent)


def run(*, num_steps: int = NUM_STEPS) -> list[Row]:
    return [measure(num_running, num_steps=num_steps) for num_running in BUDGET_MS]


def main() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = run()
    finally:
        torch.set_num_threads(threads)
    table = Table(title="Decode step without the model, ms (median)", title_justify="left")
    for heading in ("running", "schedule", "runner", "update", "transport", "sum", "budget", "front end"):
        table.add_column(heading, justify="right")
    for row in rows:
        parts = (row.schedule_ms, row.runner_ms, row.update_ms, row.transport_ms, row.total_ms)
        table.add_row(
            str(row.num_running),
            *(f"{part:.3f}" for part in parts),
            f"{BUDGET_MS[row.num_running]:.2f}",
            f"{row.front_end_ms:.3f}",
        )
    Console().print(table)
