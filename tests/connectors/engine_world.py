"""Embedded engines with any connector, in the test's own process or with rank processes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from baton.connectors.multi import MultiSchedulerHalf, MultiWorkerHalf
from baton.core.config import (
    CacheConfig,
    ClusterSecret,
    EngineConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from baton.engine.api import EngineRequest, SamplingParams, SchedulerStats
from baton.engine.checkpoints.checkpoint import load_model_config
from baton.engine.checkpoints.random_model import write_checkpoint
from baton.engine.llm import LLM
from baton.engine.request import Request
from tests.connectors.faulty_store import FaultyStore, StoreSchedulerHalf, StoreWorkerHalf

BLOCK = 4
SECRET = ClusterSecret(b"sixteen bytes or more")
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
SETTLE_S = 30.0  # Reached only on failure.
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0)
NO_STORE = {"store": {"mode": "off"}}
# Timers. A live engine answers in time, however busy the machine ...
PATIENT = {"round_trip_max_s": 5.0, "grant_every_s": 2.0, "silence_s": 20.0, "hold_s": 25.0}
QUICK = {"round_trip_max_s": 0.1}  # ... and an engine that is gone is given up soon.
Start = Callable[..., LLM]


WINDOW = 10


def windowed_model(folder: Path, family: str) -> ModelConfig:
    """A model of six layers. `gemma3`, `gpt_oss`: some layers have a WINDOW. `mistral`: all have."""
    shape: dict[str, Any] = {"hidden": 32, "layers": 6, "heads": 4, "vocab": 512, "max_position": 256}
    write_checkpoint(folder, family=family, sliding_window=WINDOW, **shape)
    return load_model_config(folder)


def three_layers(folder: Path) -> ModelConfig:
    """A dense model of three layers."""
    write_checkpoint(folder, hidden=64, layers=3, heads=4, kv_heads=2, vocab=512)
    return load_model_config(folder, max_model_len=256)


def config_of(
    model: ModelConfig,
    transfer: dict[str, Any] | KVTransferConfig | None = None,
    *,
    num_blocks: int = 64,
    block_size: int = BLOCK,
    tp_size: int = 1,
    budget: int = 256,
    cache: dict[str, Any] | None = None,
    **fields: Any,
) -> EngineConfig:
    """Config of an engine. `transfer`: fields of a KVTransferConfig. `budget`: tokens of a step.

    `cache`: further fields of the CacheConfig. `fields`: further fields of the EngineConfig.
    """
    if isinstance(transfer, dict):
        transfer = KVTransferConfig(**{"kv_role": "kv_both", **transfer})
    executor: Any = "multiprocess" if tp_size > 1 else "inprocess"
    return EngineConfig(
        model_config=model,
        cache_config=CacheConfig(num_gpu_blocks=num_blocks, block_size=block_size, **(cache or {})),
        kv_transfer_config=transfer,
        **{
            "scheduler_config": SchedulerConfig(max_num_batched_tokens=budget),
            "parallel_config": ParallelConfig(tensor_parallel_size=tp_size, executor=executor),
            "cluster_secret": SECRET,
            **fields,
        },
    )


@contextmanager
def engines(model: ModelConfig) -> Iterator[Start]:
    """Function that starts an engine with the arguments of `config_of` after the model."""
    with ExitStack() as stack:
        yield lambda *args, **options: start_in(stack, config_of(model, *args, **options))


def start_in(stack: ExitStack, config: EngineConfig) -> LLM:
    """Start an engine that ends with `stack`."""
    return stack.enter_context(LLM(config, "baton.assemble:connector_factory"))


def hands_over(engine_id: str | None, kind: str = "Pull", **extra: Any) -> dict[str, Any] | None:
    """Fields of the KVTransferConfig of `engine_id`; None without an id: an engine that answers alone."""
    if engine_id is None:
        return None
    connector = f"Baton{kind}Connector"
    return {"kv_connector": connector, "engine_id": engine_id, "kv_connector_extra_config": extra}


def faulty_store(folder: Path, **fields: Any) -> dict[str, Any]:
    return {
        "kv_connector": "FaultyStore",
        "kv_connector_module_path": "tests.connectors.faulty_store",
        "kv_connector_extra_config": {"path": str(folder)},
        **fields,
    }


def multi(*children: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "kv_connector": "BatonMultiConnector",
        "kv_connector_extra_config": {"connectors": list(children)},
        **fields,
    }


def prompt_of(num_tokens: int, step: int = 7) -> list[int]:
    return [(step * i) % 500 + 5 for i in range(num_tokens)]


def store(**told: Any) -> dict[str, Any]:
    return {"store": told}


def forget(llm: LLM) -> None:
    """Clears the engine's own prefix cache, which must be unused."""
    llm.settle(SETTLE_S)
    assert llm.core.scheduler.reset_prefix_cache()
    llm.core.scheduler.kv_cache.assert_empty()


def run_counting(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    params: Sequence[dict[str, Any] | None],
) -> tuple[list[list[int]], list[SchedulerStats]]:
    """As `generate`, with the statistics of each step. Raises AssertionError for an answer with an error."""
    answers: dict[str, list[int]] = {}
    for index, (prompt, of_prompt) in enumerate(zip(prompts, params, strict=True)):
        request_id = f"counted-{index}"
        answers[request_id] = []
        refusal = llm.core.add_request(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=list(prompt),
                sampling_params=sampling,
                arrival_time_s=float(index),
                kv_transfer_params=of_prompt,
            )
        )
        assert refusal is None
    stats = []
    left = set(answers)
    while left:
        outputs = llm.core.step()
        if outputs.stats is not None:
            stats.append(outputs.stats)
        for output in outputs.outputs:
            answers[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                assert output.error is None, output.error
                left.discard(output.request_id)
    return list(answers.values()), stats


def check_findable(llm: LLM, prompt: Sequence[int], half: StoreWorkerHalf) -> int:
    """Checks that the prefix cache's blocks of `prompt` hold its KV. Returns their number."""
    asked = EngineRequest(
        request_id="probe", prompt_token_ids=list(prompt), sampling_params=GREEDY, arrival_time_s=0.0
    )
    probe = Request(asked, block_size=BLOCK)
    hits, _ = llm.core.scheduler.kv_cache.get_computed_blocks(probe)
    for block_id, block_hash in zip(hits.get_block_ids()[0], probe.block_hashes, strict=False):
        for cache, content in zip(half.caches, half.read(block_hash.hex()), strict=True):
            torch.testing.assert_close(cache[block_id], content, atol=1e-4, rtol=1e-4)
    return len(hits)


def store_half(llm: LLM) -> StoreWorkerHalf:
    """Worker half of an engine with one rank that has a FaultyStore, alone or as a child."""
    connector: Any = llm.core.executor.only_half()
    half = connector.worker_half
    if isinstance(half, MultiWorkerHalf):
        (half,) = (child.worker_half for child in half.children if isinstance(child, FaultyStore))
    assert isinstance(half, StoreWorkerHalf)
    return half


def store_scheduler(llm: LLM) -> StoreSchedulerHalf:
    """Scheduler half of such an engine."""
    connector: Any = llm.core.scheduler._connector.half
    half = connector.scheduler_half
    if isinstance(half, MultiSchedulerHalf):
        (half,) = (
            child.half.scheduler_half for child in half._children if isinstance(child.half, FaultyStore)
        )
    assert isinstance(half, StoreSchedulerHalf)
    return half
