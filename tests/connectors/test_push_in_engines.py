"""Embedded engines hand a prompt over while it is computed, and the answer is that of one engine alone."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest

from baton.core.config import (
    CacheConfig,
    ClusterSecret,
    EngineConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
)
from baton.engine.api import EngineRequest, SamplingParams
from baton.engine.checkpoints.checkpoint import load_model_config
from baton.engine.checkpoints.random_model import write_checkpoint
from baton.engine.core.engine_core import EngineCore
from baton.engine.llm import Completion
from tests.connectors.engine_world import PATIENT, QUICK

PATIENCE_S = 60.0
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=10, temperature=0.8, seed=7, logprobs=2, presence_penalty=0.5)
Start = Callable[..., EngineCore]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, hidden=64, layers=3, heads=4, kv_heads=2, vocab=512)
    return load_model_config(folder, max_model_len=256)


@pytest.fixture
def start(model: ModelConfig) -> Iterator[Start]:
    with ExitStack() as stack:

        def start_engine(
            engine_id: str | None = None,
            *,
            stream: str = "chunk",
            num_blocks: int = 96,
            block_size: int = 4,
            timers: dict[str, float] = PATIENT,
            **scheduler: Any,
        ) -> EngineCore:
            transfer = None
            if engine_id is not None:
                transfer = KVTransferConfig(
                    kv_connector="BatonPushConnector",
                    kv_role="kv_both",
                    engine_id=engine_id,
                    kv_connector_extra_config={"stream": stream, "timers": timers},
                )
            config = EngineConfig(
                model_config=model,
                cache_config=CacheConfig(num_gpu_blocks=num_blocks, block_size=block_size),
                scheduler_config=SchedulerConfig(**scheduler),
                kv_transfer_config=transfer,
                cluster_secret=ClusterSecret(b"sixteen bytes or more"),
            )
            core = EngineCore(config, "baton.assemble:connector_factory")
            stack.callback(core.shutdown)
            return core

        yield start_engine


class Legs:
    """Requests on several engines, all stepped in turn by one thread."""

    def __init__(self, *cores: EngineCore) -> None:
        self.cores = cores
        self.completions: dict[tuple[int, str], Completion] = {}
        self.num_preempted: Counter[int] = Counter()  # By engine.
        self.transfers: list[dict[str, Any]] = []  # Delivered, as their consumers have counted them.
        self._pause = threading.Event()

    def add(
        self,
        core: EngineCore,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        params: dict[str, Any] | None = None,
    ) -> Completion:
        completion = self.completions[id(core), request_id] = Completion(request_id, prompt)
        refusal = core.add_request(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling_params=sampling,
                arrival_time_s=0.0,
                kv_transfer_params=params,
            )
        )
        assert refusal is None
        return completion

    def run(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while any(completion.finish_reason is None for completion in self.completions.values()):
            assert time.monotonic() < deadline, "a request did not end"
            self.step()

    def step(self) -> None:
        for core in self.cores:
            if core.has_requests:
                step = core.step()
                for output in step.outputs:
                    self.completions[id(core), output.request_id].take(output)
                if step.stats is not None:
                    self.num_preempted[id(core)] += step.stats.num_preempted
                    self.transfers += (step.stats.kv_connector_stats or {}).get("transfers", ())
        self._pause.wait(0.0005)  # The control threads need the interpreter too.


def prompt_of(num_tokens: int, step: int = 7) -> list[int]:
    return [(step * i) % 500 + 5 for i in range(num_tokens)]


def legs_of(p: EngineCore, transfer_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    prefill = {"do_remote_decode": True, "transfer_id": transfer_id}
    decode = {
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_engine_id": p.scheduler.config.kv_transfer_config.engine_id,  # type: ignore[union-attr]
        "baton_introduction": p.introduction(),
    }
    return prefill, decode


def one_token(sampling: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(sampling, max_tokens=1)


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["off", "chunk", "layer"])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("comes_first", ["p", "d"])
def test_the_tokens_are_those_of_a_single_engine(
    start: Start, stream: str, sampling: SamplingParams, comes_first: str
) -> None:
    p, d, alone = start("p", stream=stream, max_num_batched_tokens=16), start("d"), start()
    legs = Legs(p, d, alone)
    decoded, expected = [], []
    for index, prompt in enumerate((prompt_of(50), prompt_of(3), prompt_of(32, step=11))):
        for_p, for_d = legs_of(p, f"t{index}")
        if comes_first == "p":
            legs.add(p, f"r{index}", prompt, one_token(sampling), for_p)
            for _ in range(3):
                legs.step()
        decoded.append(legs.add(d, f"r{index}", prompt, sampling, for_d))
        if comes_first == "d":
            for _ in range(3):
                legs.step()
            legs.add(p, f"r{index}", prompt, one_token(sampling), for_p)
        expected.append(legs.add(alone, f"r{index}", prompt, sampling))
    legs.run()
    assert [c.token_ids for c in decoded] == [c.token_ids for c in expected]
    assert [c.finish_reason for c in decoded] == [c.finish_reason for c in expected]
    assert all(c.num_transferred_tokens > 0 for c in decoded)
    for ours, theirs in zip(decoded, expected, strict=True):
        assert [e.chosen.token_id for e in ours.logprobs] == [e.chosen.token_id for e in theirs.logprobs]


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["chunk", "layer"])
def test_a_producer_short_of_blocks_preempts_and_the_answers_are_equal(start: Start, stream: str) -> None:
    """Long prompts compete for P's pool with decodes of its own, so prefills lose their blocks on the way."""
    p = start("p", stream=stream, max_num_batched_tokens=4, num_blocks=22)
    d, alone = start("d"), start()
    legs = Legs(p, d, alone)
    long = msgspec.structs.replace(GREEDY, max_tokens=30)
    others = [legs.add(p, f"own{i}", prompt_of(8, step=3 + i), long) for i in range(2)]
    decoded, expected = [], []
    for index in range(3):
        prompt = prompt_of(40, step=5 + index)
        for_p, for_d = legs_of(p, f"t{index}")
        decoded.append(legs.add(d, f"r{index}", prompt, GREEDY, for_d))
        legs.add(p, f"r{index}", prompt, one_token(GREEDY), for_p)
        expected.append(legs.add(alone, f"r{index}", prompt, GREEDY))
    legs.run()
    assert [c.token_ids for c in decoded] == [c.token_ids for c in expected]
    assert all(c.finish_reason == "length" for c in others)
    assert legs.num_preempted[id(p)] > 0, "the pool was not short"


@pytest.mark.slow
def test_a_prefill_that_is_aborted_costs_time_and_no_token(start: Start) -> None:
    p, d, alone = start("p", max_num_batched_tokens=8), start("d"), start()
    legs = Legs(p, d, alone)
    prompt = prompt_of(60)
    for_p, for_d = legs_of(p, "t")
    decoded = legs.add(d, "r", prompt, GREEDY, for_d)
    legs.add(p, "r", prompt, one_token(GREEDY), for_p)
    for _ in range(4):
        legs.step()
    p.abort("r")
    expected = legs.add(alone, "r", prompt, GREEDY)
    legs.run()
    assert decoded.token_ids == expected.token_ids
    assert decoded.num_transferred_tokens == 0


@pytest.mark.slow
def test_a_producer_that_is_gone_costs_time_and_no_token(start: Start) -> None:
    quick = {**QUICK, "grant_every_s": 0.2, "silence_s": 1.0}
    p, d, alone = start("p", max_num_batched_tokens=8), start("d", timers=quick), start()
    prompt = prompt_of(60)
    for_p, for_d = legs_of(p, "t")
    legs = Legs(p, d, alone)
    decoded = legs.add(d, "r", prompt, GREEDY, for_d)
    dying = Legs(p)
    dying.add(p, "r", prompt, one_token(GREEDY), for_p)
    for _ in range(3):
        dying.step()
        legs.step()
    p.shutdown()
    legs.cores = (d, alone)
    expected = legs.add(alone, "r", prompt, GREEDY)
    legs.run()
    assert decoded.token_ids == expected.token_ids


@pytest.mark.slow
@pytest.mark.parametrize(("theirs", "ours"), [(4, 8), (8, 4)])
def test_blocks_of_another_size_change_nothing(start: Start, theirs: int, ours: int) -> None:
    p = start("p", stream="layer", block_size=theirs, max_num_batched_tokens=24)
    d, alone = start("d", block_size=ours), start()
    legs = Legs(p, d, alone)
    prompt = prompt_of(53)
    for_p, for_d = legs_of(p, "t")
    decoded = legs.add(d, "r", prompt, GREEDY, for_d)
    legs.add(p, "r", prompt, one_token(GREEDY), for_p)
    expected = legs.add(alone, "r", prompt, GREEDY)
    legs.run()
    assert decoded.token_ids == expected.token_ids
    assert decoded.num_transferred_tokens > 0
