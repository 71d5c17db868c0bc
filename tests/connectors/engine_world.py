"""Embedded engines with any connector, in the test's own process or with rank processes."""

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from baton.checkpoints.checkpoint import load_model_config
from baton.checkpoints.random_model import write_checkpoint
from baton.connectors.multi import MultiSchedulerHalf, MultiWorkerHalf
from baton.contract.halves import own_scheduler
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
from baton.engine.core.engine_core import EngineCore
from baton.engine.llm import LLM, Completion
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
FACTORY = "baton.assemble:connector_factory"
ModelOf = Callable[[str], ModelConfig]
AnswerOf = Callable[[str, list[int]], list[int]]
Start = Callable[..., LLM]
StartCore = Callable[..., "Stepped"]


WINDOW = 10


# Layers of a family, three of any other. Those of six: some layers have a WINDOW; of `mistral` all have.
LAYERS = {"gemma3": 6, "gpt_oss": 6, "mistral": 6, "mamba2": 5, "granite_hybrid": 5, "qwen3_next": 5}


def small_model(folder: Path, family: str) -> ModelConfig:
    """A model of the family. The dtype of its cache may follow its name."""
    name, *dtype = family.split()
    layers = LAYERS.get(name, 3)
    shape: dict[str, Any] = {"hidden": 32, "heads": 4, "vocab": 512, "max_position": 256}
    write_checkpoint(
        folder, family=name, layers=layers, sliding_window=WINDOW if layers == 6 else None, **shape
    )
    return msgspec.structs.replace(load_model_config(folder), kv_cache_dtype=dtype[0] if dtype else "auto")


def bytes_moved(config: EngineConfig, num_tokens: int, *, first_token: int = 0) -> int:
    """Bytes of a prompt's transfer: from `first_token` on, and only within windows."""
    model, last = config.model_config, -(-num_tokens // BLOCK)
    firsts = {None: 0, WINDOW: (num_tokens - WINDOW) // BLOCK}
    blocks_of_layer = {window: last - max(first, first_token // BLOCK) for window, first in firsts.items()}
    num_blocks = sum(len(group.layers) * blocks_of_layer[group.window] for group in config.kv_cache_groups)
    return num_blocks * BLOCK * model.num_kv_heads * 2 * model.head_dim * 4


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
    return stack.enter_context(LLM(config, FACTORY))


@contextmanager
def answering(model_of: ModelOf) -> Iterator[AnswerOf]:
    """Function that returns the answer of an engine without a connector, by family and prompt."""
    with ExitStack() as stack:
        engine = functools.cache(lambda family: start_in(stack, config_of(model_of(family), num_blocks=200)))
        known: dict[tuple[str, tuple[int, ...]], list[int]] = {}

        def answer(family: str, prompt: list[int]) -> list[int]:
            key = (family, tuple(prompt))
            if key not in known:
                known[key] = engine(family).generate([prompt], GREEDY)[0].token_ids
            return known[key]

        yield answer


@contextmanager
def cores(model: ModelConfig) -> Iterator[StartCore]:
    """Engines without the front end, for tests that step several of them by hand; see `engines`."""
    with ExitStack() as stack:
        yield lambda *args, **options: Stepped(core_in(stack, config_of(model, *args, **options)))


def core_in(stack: ExitStack, config: EngineConfig) -> EngineCore:
    core = EngineCore(config, FACTORY)
    stack.callback(core.shutdown)
    return core


def hands_over(engine_id: str | None, kind: str = "Pull", **extra: Any) -> dict[str, Any] | None:
    """Fields of the KVTransferConfig of `engine_id`; None without an id: an engine that answers alone."""
    if engine_id is None:
        return None
    connector = f"Baton{kind}Connector"
    return {"kv_connector": connector, "engine_id": engine_id, "kv_connector_extra_config": extra}


def pair_in(
    stack: ExitStack,
    model: ModelConfig,
    connector: dict[str, Any] | None = None,
    block_sizes: tuple[int, int] = (BLOCK, BLOCK),
    **cache: Any,
) -> tuple[LLM, LLM]:
    """P and D that end with `stack`. `connector`: fields of the KVTransferConfig, of pull without them."""

    def start(name: str, block_size: int) -> LLM:
        transfer = {**(hands_over(name, timers=PATIENT) or {}), **(connector or {})}
        config = config_of(model, transfer, num_blocks=100, block_size=block_size, cache=cache)
        return start_in(stack, config)

    return start("p", block_sizes[0]), start("d", block_sizes[1])


def hand_over(p: LLM, d: LLM, prompt: list[int], sampling: SamplingParams = GREEDY) -> Completion:
    """P prefills the prompt, D fetches it and answers."""
    (prefilled,) = p.generate([prompt], ONE_TOKEN, kv_transfer_params=[{"do_remote_decode": True}])
    assert prefilled.kv_transfer_params is not None
    (decoded,) = d.generate([prompt], sampling, kv_transfer_params=[prefilled.kv_transfer_params])
    return decoded


class Stepped:
    """Requests of one engine, which the test steps."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.completions: dict[str, Completion] = {}
        self.stats: list[SchedulerStats] = []  # Statistics of each step.
        self._pause = threading.Event()

    def add(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams = GREEDY,
        params: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Completion:
        """`fields`: further fields of the EngineRequest."""
        completion = self.completions[request_id] = Completion(request_id, prompt)
        ended = self.core.add_request(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling_params=sampling,
                arrival_time_s=0.0,
                kv_transfer_params=params,
                **fields,
            )
        )
        if ended is not None:
            completion.take(ended)
        return completion

    def step(self) -> None:
        outputs = self.core.step()
        for output in outputs.outputs:
            self.completions[output.request_id].take(output)
        if outputs.stats is not None:
            self.stats.append(outputs.stats)
        if not self.core.num_scheduled_tokens:
            self._pause.wait(0.0005)  # Other threads need the interpreter too.

    def run(self) -> None:
        """Run until all requests and everything that they started have ended."""
        run_until(lambda: not self.core.has_requests, self)

    @property
    def has_open(self) -> bool:
        return any(completion.finish_reason is None for completion in self.completions.values())

    @property
    def num_preempted(self) -> int:
        return sum(stats.num_preempted for stats in self.stats)

    @property
    def transfers(self) -> list[dict[str, Any]]:
        """Records of delivered transfers."""
        return [one for stats in self.stats for one in (stats.kv_connector_stats or {}).get("transfers", ())]


def run_until(is_done: Callable[[], bool], *engines: Stepped) -> None:
    """Step engines that have requests in turn."""
    deadline = time.monotonic() + SETTLE_S
    while not is_done():
        assert time.monotonic() < deadline, "a request did not end"
        step_all(*engines)


def step_all(*engines: Stepped) -> None:
    for engine in engines:
        if engine.core.has_requests:
            engine.step()


def run_all(*engines: Stepped) -> None:
    """Run until all requests have ended."""
    run_until(lambda: not any(engine.has_open for engine in engines), *engines)


def push_all(
    stack: ExitStack,
    model: ModelConfig,
    prompts: Sequence[list[int]],
    *,
    tp_sizes: tuple[int, int] = (1, 1),
    block_of_d: int = BLOCK,
    params: dict[str, Any] | None = None,
    **extra: Any,
) -> tuple[list[Completion], list[dict[str, Any]]]:
    """D's answers and the records of the transfers. `params`: of both legs. `extra`: of the connectors."""

    def start(name: str, tp_size: int, block_size: int) -> Stepped:
        transfer = hands_over(name, "Push", timers=PATIENT, **extra)
        sizes: dict[str, Any] = {"num_blocks": 100, "budget": 16, "block_size": block_size}
        return Stepped(core_in(stack, config_of(model, transfer, tp_size=tp_size, **sizes)))

    p, d = start("p", tp_sizes[0], BLOCK), start("d", tp_sizes[1], block_of_d)
    decoded = [add_pair(p, d, f"r{index}", prompt, **(params or {})) for index, prompt in enumerate(prompts)]
    run_all(p, d)
    return decoded, d.transfers


def add_pair(
    p: Stepped, d: Stepped, name: str, prompt: list[int], on_p: SamplingParams | None = None, **params: Any
) -> Completion:
    """Add both legs of a pushed prompt, D's first. `on_p`: otherwise P samples one token."""
    for_p, for_d = ({**leg, **params} for leg in legs_of(p.core, name))
    decoded = d.add(name, prompt, GREEDY, for_d)
    p.add(name, prompt, on_p or ONE_TOKEN, for_p)
    return decoded


def legs_of(p: EngineCore, transfer_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Params of a pushed prompt for P and for D."""
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
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    params: Sequence[dict[str, Any] | None],
) -> tuple[list[list[int]], list[SchedulerStats]]:
    """`generate` that also returns each step's statistics. Raises AssertionError if an answer fails."""
    engine = Stepped(llm.core)
    answers = [
        engine.add(f"counted-{index}", prompt, sampling, of_prompt)
        for index, (prompt, of_prompt) in enumerate(zip(prompts, params, strict=True))
    ]
    run_all(engine)
    assert not any(answer.error for answer in answers), answers
    return [answer.token_ids for answer in answers], engine.stats


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
    half: Any = own_scheduler(llm.core.scheduler.connector.half)
    if isinstance(half, MultiSchedulerHalf):
        (half,) = (
            child.half.scheduler_half for child in half._children if isinstance(child.half, FaultyStore)
        )
    assert isinstance(half, StoreSchedulerHalf)
    return half
