"""Step overhead benchmark: cost of a decode step besides the model, with a real engine and a null model.

    schedule    the scheduler decides the step
    runner      rows, attention metadata, connector hooks, sampler (greedy, a tiny vocabulary)
    update      tokens into requests, outputs, stats
    transport   outputs encoded and passed to a socket, as in the core's process
    front end   the same bytes decoded in the other process; not part of the step

Medians over the steps of one run, in which engines without a connector, with pull and with push step in
turns. The budget: 0.15 ms at 16 running requests, 1 ms at 256; with a connector at most 10 % more.
"""

import contextlib
import socket
import statistics
import sys
import time
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from baton.assemble import connector_factory
from baton.contract import KVConnectorHandshakeMetadata
from baton.core.config import CacheConfig, EngineConfig, KVTransferConfig, SchedulerConfig
from baton.engine.api import EngineOutputs, EngineRequest, SamplingParams
from baton.engine.core.core_messages import FromCore, Outputs
from baton.engine.core.engine_core import EngineCore
from baton.engine.executor import Executor, done
from baton.engine.forward_context import ForwardContext
from baton.engine.models.parallel import SingleRank
from baton.engine.process.channel import Channel
from baton.engine.runner.cache_setup import allocate_for, register
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.step import ModelRunnerOutput, SchedulerOutput
from baton.testing.host.config import model_config

NUM_STEPS = 400
WARM_UP_STEPS = 40
PROMPT_TOKENS = 100
BUDGET_MS = {16: 0.15, 256: 1.0}
CONNECTORS = ("", "BatonPullConnector", "BatonPushConnector")
CONNECTOR_SHARE = 0.1
VOCAB_SIZE = 8


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one run, in milliseconds."""

    num_running: int
    connector: str  # Empty: none.
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
    """One rank, with the configured connector and a cache for it, but without the layers' forward."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(1)
        group, device = SingleRank(), torch.device("cpu")
        self._half = connector_factory.worker_half(config, 0)
        kv_caches = allocate_for(self._half, config, group, device)
        register(self._half, kv_caches, config.cache_config.num_gpu_blocks)
        self._runner = ModelRunner(config, NullModel(), kv_caches, self._half, device=device)

    def submit(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        output = self._runner.execute(scheduler_output, [])
        output.kv_connector_output = self._aggregator.aggregate([output.kv_connector_output])
        return done(output)

    def handshake_metadata(self) -> dict[int, KVConnectorHandshakeMetadata]:
        metadata = self._half.get_handshake_metadata()
        return {} if metadata is None else {0: metadata}

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        return self._half.bind_wake(wake)

    def forget_all_but(self, request_ids: Container[str]) -> None:
        return  # There are no reports of ranks to forget.

    def shutdown(self) -> None:
        self._half.shutdown()


def null_config(num_running: int, connector: str = "") -> EngineConfig:
    max_model_len = 4096
    transfer = KVTransferConfig(kv_connector=connector, kv_role="kv_both") if connector else None
    return EngineConfig(
        model_config=model_config(
            max_model_len=max_model_len,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_kv_heads=1,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(0,),
        ),
        cache_config=CacheConfig(num_gpu_blocks=num_running * 64 + 2),
        scheduler_config=SchedulerConfig(max_num_seqs=num_running, max_num_batched_tokens=8192),
        kv_transfer_config=transfer,
        insecure_no_secret=True,  # No other engine exists.
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


def measure(num_running: int, *, num_steps: int = NUM_STEPS) -> list[Row]:
    with contextlib.ExitStack() as opened:
        cores = {name: opened.enter_context(_running(num_running, name)) for name in CONNECTORS}
        samples: dict[str, list[tuple[float, ...]]] = {name: [] for name in cores}
        for _ in range(WARM_UP_STEPS + num_steps):
            for name, (core, pipe) in cores.items():
                samples[name].append(_one_step(core, pipe))
    return [
        Row(
            num_running,
            name,
            *(statistics.median(part) * 1e3 for part in zip(*steps[WARM_UP_STEPS:], strict=True)),
        )
        for name, steps in samples.items()
    ]


@contextlib.contextmanager
def _running(num_running: int, connector: str) -> Iterator[tuple[EngineCore, OutputPipe]]:
    config = null_config(num_running, connector)
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
        yield core, pipe
    finally:
        pipe.close()
        core.shutdown()


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
    return [row for num_running in BUDGET_MS for row in measure(num_running, num_steps=num_steps)]


def _budget_ms(row: Row, alone_ms: float) -> float:
    """`alone_ms`: the engine's without a connector."""
    return alone_ms * (1 + CONNECTOR_SHARE) if row.connector else BUDGET_MS[row.num_running]


def main() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = run()
    finally:
        torch.set_num_threads(threads)
    table = Table(title="Decode step without the model, ms (median)", title_justify="left")
    headings = ("connector", "schedule", "runner", "update", "transport", "sum", "budget", "front end")
    for heading in ("running", *headings):
        table.add_column(heading, justify="right", no_wrap=True)
    alone_ms = {row.num_running: row.total_ms for row in rows if not row.connector}
    for row in rows:
        parts = (row.schedule_ms, row.runner_ms, row.update_ms, row.transport_ms, row.total_ms)
        table.add_row(
            str(row.num_running),
            row.connector.removeprefix("Baton").removesuffix("Connector").lower(),
            *(f"{part:.3f}" for part in parts),
            f"{_budget_ms(row, alone_ms[row.num_running]):.3f}",
            f"{row.front_end_ms:.3f}",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
