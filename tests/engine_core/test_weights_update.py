"""Updates of the weights while the engine runs: tokens are those of the version that computed them."""

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engine_core_fakes import FACTORY, FakeSchedulerHalf
from safetensors.torch import load_file, save_file

from baton.checkpoints.checkpoint import load_model_config
from baton.checkpoints.random_model import write_checkpoint
from baton.core.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    KVEventsConfig,
    KVTransferConfig,
    ParallelConfig,
)
from baton.core.errors import UserError
from baton.core.kv_events import AllBlocksCleared, BlockStored
from baton.engine.api import EngineRequest, SamplingParams
from baton.engine.core.client import EngineClient
from baton.engine.core.weights_update import UpdateFailed, UpdateUnderWay, prepare_update
from baton.engine.executor import ExecutorDied
from baton.engine.executor.multiprocess import MultiprocessExecutor
from baton.engine.llm import LLM, Completion
from tests.connectors.engine_world import Stepped
from tests.engine_models.conftest import FAMILIES, SMALL

PROMPTS = [list(range(20, 47)), [3, 4, 5], list(range(100, 131)), [7] * 9]
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
pytestmark = pytest.mark.usefixtures("forked_programs")
APART = [pytest.mark.slow, pytest.mark.processes]
IN_FLIGHT = ParallelConfig(executor="multiprocess", max_concurrent_batches=2)
PARALLEL = [
    pytest.param(ParallelConfig(), id="one step"),
    pytest.param(IN_FLIGHT, id="two steps in flight", marks=APART),
]
TWO_RANKS = ParallelConfig(tensor_parallel_size=2, executor="multiprocess")
SHAPE = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "vocab": 512}
Folders = dict[str, Path]
Answers = dict[str, list[list[int]]]  # Tokens of each prompt, by version.
Spoil = Callable[[Path], Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("versions")
    return {
        name: write_checkpoint(root / name, seed=seed, **SHAPE) for name, seed in (("one", 1), ("two", 2))
    }


def config_of(folder: Path, **fields: Any) -> EngineConfig:
    fields.setdefault("cache_config", CacheConfig(num_gpu_blocks=128, block_size=4))
    return EngineConfig(model_config=load_model_config(folder, max_model_len=256), **fields)


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    completions = llm.generate(prompts, GREEDY)
    assert all(completion.error is None for completion in completions)
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def fresh(folders: Folders) -> dict[str, Callable[[list[int], int], list[int]]]:
    """Functions that return the tokens of an engine that never had other weights, by version."""
    llms = {name: LLM(config_of(folder)) for name, folder in folders.items()}

    def ask(name: str) -> Callable[[list[int], int], list[int]]:
        def generate(prompt: list[int], max_tokens: int) -> list[int]:
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            return llms[name].generate([prompt], params)[0].token_ids

        return generate

    yield {name: ask(name) for name in folders}
    for llm in llms.values():
        llm.close()


@pytest.fixture(scope="module")
def alone(fresh: dict[str, Callable[[list[int], int], list[int]]]) -> Answers:
    wanted = {name: [ask(prompt, NUM_TOKENS) for prompt in PROMPTS] for name, ask in fresh.items()}
    assert all(a != b for a, b in zip(wanted["one"], wanted["two"], strict=True))
    return wanted


def request_of(request_id: str, prompt: list[int]) -> EngineRequest:
    return EngineRequest(
        request_id=request_id, prompt_token_ids=prompt, sampling_params=GREEDY, arrival_time_s=0.0
    )


class Run(Stepped):
    """Requests of one engine, stepped by hand."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm.core)
        self.llm = llm

    def ask(self, *prompts: list[int]) -> list[Completion]:
        return [self.add(f"run-{len(self.completions)}", prompt, GREEDY) for prompt in prompts]

    def step_until(self, is_done: Callable[[], bool]) -> None:
        for _ in range(1000):
            if is_done():
                return
            self.step()
        raise AssertionError("it never happens")

    def update(self, folder: Path, *, mode: str, timeout_s: float = 600.0) -> None:
        self.core.begin_update(prepare_update(self.core.config.model_config, folder, None, mode, timeout_s))

    def end_update(self) -> None:
        """Step to the end of the update. Raises its error."""
        ends = []
        self.step_until(lambda: ends.append(self.core.take_update_end()) or ends[-1] is not None)
        ends[-1].check()

    def updated(self, folder: Path, *, mode: str) -> None:
        self.update(folder, mode=mode)
        self.end_update()

    def end(self) -> None:
        self.step_until(lambda: all(c.finish_reason for c in self.completions.values()))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"device_config": DeviceConfig(num_threads=2)},
        {"device_config": DeviceConfig(graph_mode="full")},
        {"cache_config": CacheConfig(num_gpu_blocks=128, block_size=4, enable_prefix_caching=False)},
    ],
    ids=["compiled", "python layers", "recorded", "no prefix cache"],
)
def test_answers_are_those_of_the_version_and_a_rollback_works(
    folders: Folders, alone: Answers, fields: dict[str, Any]
) -> None:
    num_threads = torch.get_num_threads()
    try:
        with LLM(config_of(folders["one"], **fields)) as llm:
            for name in ("one", "two", "one"):
                if name != "one" or llm.core.config.model_config.model != str(folders["one"]):
                    llm.update_weights(folders[name])
                assert tokens(llm) == alone[name]
                assert tokens(llm) == alone[name]  # The hits in the cache have these weights.
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "deepseek_v3", "mamba2", "nemotron_h", "qwen3_next"])
def test_all_that_is_derived_from_weights_is_derived_again(tmp_path: Path, family: str) -> None:
    fields: dict[str, Any] = {**SMALL, **FAMILIES[family]}
    folders = [write_checkpoint(tmp_path / str(seed), seed=seed, **fields) for seed in (1, 2)]
    with LLM(config_of(folders[1], cache_config=CacheConfig(num_gpu_blocks=128, block_size=16))) as llm:
        wanted = tokens(llm, PROMPTS[:2])
    with LLM(config_of(folders[0], cache_config=CacheConfig(num_gpu_blocks=128, block_size=16))) as llm:
        assert tokens(llm, PROMPTS[:2]) != wanted
        llm.update_weights(folders[1])
        assert tokens(llm, PROMPTS[:2]) == wanted


@pytest.fixture(params=PARALLEL)
def run(request: pytest.FixtureRequest, folders: Folders) -> Iterator[Run]:
    with LLM(config_of(folders["one"], parallel_config=request.param)) as llm:
        yield Run(llm)


def test_wait_ends_requests_with_the_old_weights_and_begins_later_ones_with_the_new(
    run: Run, folders: Folders, alone: Answers
) -> None:
    before = run.ask(*PROMPTS)
    run.step_until(lambda: bool(before[0].token_ids))
    run.update(folders["two"], mode="wait")
    meanwhile = run.ask(*PROMPTS)
    (dropped,) = run.ask(PROMPTS[0])
    run.core.abort(dropped.request_id)
    run.end_update()
    assert [c.token_ids for c in before] == alone["one"]
    run.end()
    assert [c.token_ids for c in meanwhile] == alone["two"]
    assert (dropped.finish_reason, dropped.token_ids) == ("abort", [])


def test_abort_ends_requests_with_what_they_have(run: Run, folders: Folders, alone: Answers) -> None:
    before = run.ask(*PROMPTS)
    run.step_until(lambda: len(before[0].token_ids) == 3)
    run.update(folders["two"], mode="abort")
    run.end_update()
    run.end()
    assert {c.finish_reason for c in before} == {"abort"}
    for completion, wanted in zip(before, alone["one"], strict=True):
        assert completion.token_ids == wanted[: len(completion.token_ids)]
    assert tokens(run.llm) == alone["two"]


def test_keep_goes_on_as_the_new_weights_continue_the_tokens_so_far(
    run: Run, folders: Folders, alone: Answers, fresh: Any
) -> None:
    kept = run.ask(*PROMPTS)
    run.step_until(lambda: len(kept[0].token_ids) == 3)
    run.update(folders["two"], mode="keep")
    run.step_until(lambda: run.core.config.model_config.model == str(folders["two"]))
    so_far = [list(c.token_ids) for c in kept]
    run.end_update()
    run.end()
    for completion, old, wanted in zip(kept, so_far, alone["one"], strict=True):
        num_old = len(completion.token_ids) and next(
            n for n in range(len(old), -1, -1) if completion.token_ids[:n] == wanted[:n]
        )
        assert 0 < num_old < NUM_TOKENS
        rest = fresh["two"](completion.prompt_token_ids + wanted[:num_old], NUM_TOKENS - num_old)
        assert completion.token_ids == wanted[:num_old] + rest
    assert tokens(run.llm) == alone["two"]  # Also with what the kept requests have left in the cache.


def test_the_connector_gets_digest_and_name(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str | None, str | None]] = []

    def note(half: FakeSchedulerHalf, weights: str | None, version: str | None) -> bool:
        calls.append((weights, version))
        return True

    monkeypatch.setattr(FakeSchedulerHalf, "set_weights", note, raising=False)
    transfer = KVTransferConfig(kv_connector="Fake", kv_role="kv_both")
    config = config_of(folders["one"], kv_transfer_config=transfer)
    with LLM(config, FACTORY) as llm:
        llm.update_weights(folders["two"], "step-2")
        updated = llm.core.config.model_config
        llm.update_weights(folders["one"])
        assert llm.core.config.model_config == config.model_config
    first, second = (load_model_config(folders[name]).weights_digest for name in ("one", "two"))
    assert calls == [(second, "step-2"), (first, None)]
    assert updated.kv_identity("s") == config.model_config.kv_identity("s").updated(second, "step-2")


def test_an_idle_engine_publishes_that_its_blocks_are_gone(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(
        folders["one"],
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:*"),
    )
    published: list[Any] = []
    with LLM(config) as llm:
        publisher = llm.core._event_publisher
        assert publisher is not None
        monkeypatch.setattr(publisher, "publish", published.extend)
        tokens(llm)
        assert BlockStored in map(type, published)
        published.clear()
        llm.update_weights(folders["two"])
        assert [*map(type, published)] == [AllBlocksCleared]
        tokens(llm)
        assert {*map(type, published[1:])} == {BlockStored}


# --- Refusals -------------------------------------------------------------------------------------


@pytest.fixture
def llm(folders: Folders) -> Iterator[LLM]:
    with LLM(config_of(folders["one"])) as llm:
        yield llm


def _with_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _other_dtype(folder: Path) -> None:
    _with_tensors(folder, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}))


def _changed(name: str, value: torch.Tensor | None) -> Spoil:
    """Sets a tensor, or removes it."""
    return lambda folder: _with_tensors(
        folder, lambda tensors: tensors.pop(name) if value is None else tensors.update({name: value})
    )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_other_dtype, "has dtype BF16, that of the loaded weights is F32"),
        (_changed("model.norm.weight", torch.ones(65)), "has shape"),
        (_changed("model.norm.weight", None), "lacks model.norm.weight"),
        (_changed("model.norm.bias", torch.ones(64)), "model.norm.bias"),
        (
            lambda folder: os.truncate(file := folder / "model.safetensors", file.stat().st_size - 10),
            "damaged",
        ),
        (lambda folder: write_checkpoint(folder, seed=2, **{**SHAPE, "layers": 3}), "another architecture"),
        (shutil.rmtree, "neither"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    ],
    ids=["dtype", "shape", "missing", "more", "damaged", "architecture", "no folder", "no weights"],
)
def test_a_folder_that_does_not_fit_changes_nothing(
    llm: LLM, folders: Folders, alone: Answers, tmp_path: Path, spoil: Spoil, message: str
) -> None:
    folder = shutil.copytree(folders["two"], tmp_path / "bad")
    spoil(folder)
    before = llm.core.config
    run = Run(llm)
    running = run.ask(PROMPTS[0])
    run.step()
    with pytest.raises(UserError, match=message):
        run.updated(folder, mode="abort")
    run.end()
    assert running[0].token_ids == alone["one"][0]
    assert llm.core.config == before
    assert tokens(llm) == alone["one"]
    llm.update_weights(folders["two"])
    assert tokens(llm) == alone["two"]


@pytest.mark.parametrize("spoil", [shutil.rmtree, lambda folder: write_checkpoint(folder, seed=3, **SHAPE)])
def test_a_folder_that_changes_after_its_digest_changes_nothing(
    llm: LLM, folders: Folders, alone: Answers, tmp_path: Path, spoil: Spoil
) -> None:
    folder = shutil.copytree(folders["two"], tmp_path / "changing")
    run = Run(llm)
    run.update(folder, mode="wait")
    spoil(folder)
    with pytest.raises(UserError):
        run.end_update()
    assert tokens(llm) == alone["one"]


def test_an_update_during_an_update_is_refused_and_a_wait_has_an_end(
    llm: LLM, folders: Folders, alone: Answers
) -> None:
    run = Run(llm)
    before = run.ask(*PROMPTS)
    run.step()
    run.update(folders["two"], mode="wait", timeout_s=0.0)
    with pytest.raises(UpdateUnderWay):
        run.update(folders["two"], mode="abort")
    meanwhile = run.ask(*PROMPTS)
    with pytest.raises(UpdateFailed, match="the old weights go on serving"):
        run.end_update()
    run.end()
    assert [c.token_ids for c in before] == [c.token_ids for c in meanwhile] == alone["one"]


@pytest.mark.parametrize(
    "arguments",
    [{"mode": "now"}, {"version": ""}, {"version": "a\nb"}, {"version": "x" * 129}, {"timeout_s": -1.0}],
)
def test_arguments_are_checked(llm: LLM, folders: Folders, arguments: dict[str, Any]) -> None:
    (field,) = arguments
    with pytest.raises(UserError) as caught:
        llm.update_weights(folders["two"], **arguments)
    assert caught.value.field == field


# --- Ranks ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.processes
def test_a_rank_that_dies_between_reading_and_use_ends_the_engine(folders: Folders) -> None:
    with LLM(config_of(folders["one"], parallel_config=TWO_RANKS)) as llm:
        executor = llm.core.executor
        assert isinstance(executor, MultiprocessExecutor)
        stage = executor.stage_weights

        def stage_and_die(*arguments: Any) -> None:
            assert stage(*arguments) is None
            executor._ranks[1].process.kill()

        executor.stage_weights = stage_and_die  # type: ignore[method-assign]
        with pytest.raises(ExecutorDied, match="rank 1"):
            llm.update_weights(folders["two"])
        with pytest.raises(ExecutorDied):
            tokens(llm)


@pytest.mark.slow
@pytest.mark.processes
def test_what_one_of_two_ranks_refuses_none_takes(folders: Folders, alone: Answers, tmp_path: Path) -> None:
    folder = shutil.copytree(folders["two"], tmp_path / "bad")
    _other_dtype(folder)
    with LLM(config_of(folders["one"], parallel_config=TWO_RANKS)) as llm:
        with pytest.raises(UserError, match="dtype"):
            llm.update_weights(folder)
        assert tokens(llm) == alone["one"]
        llm.update_weights(folders["two"])
        assert tokens(llm) == alone["two"]


# --- The engine in its own process ------------------------------------------------------------------


async def answer(client: EngineClient, request_id: str, prompt: list[int] = PROMPTS[0]) -> list[int]:
    outputs = client.generate(request_of(request_id, prompt))
    return [token async for output in outputs for token in output.new_token_ids]


@pytest.mark.slow
@pytest.mark.processes
async def test_one_update_at_a_time_and_a_restart_has_the_updated_weights(
    folders: Folders, alone: Answers
) -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, executor="multiprocess", on_rank_death="restart")
    client = await EngineClient.start(config_of(folders["one"], parallel_config=parallel))
    try:
        seen: list[str] = []
        client.on_weights = lambda model_config: seen.append(model_config.weights_version)
        assert await answer(client, "before") == alone["one"][0]
        first = asyncio.create_task(client.update_weights(str(folders["two"]), "v2"))
        await asyncio.sleep(0)
        with pytest.raises(UpdateUnderWay):
            await client.update_weights(str(folders["two"]))
        await first
        with pytest.raises(UserError, match="neither"):
            await client.update_weights(str(folders["two"] / "nowhere"))
        assert (client.model_config.weights_version, seen) == ("v2", ["v2"])
        assert await answer(client, "after") == alone["two"][0]

        *_, rank = psutil.Process(client.pid).children()
        os.kill(rank.pid, signal.SIGKILL)
        async with asyncio.timeout(120):
            for is_ready in (False, True):
                while (client.unready_reason is None) != is_ready:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert await answer(client, "again") == alone["two"][0]
    finally:
        await client.close()
