"""Calls of a worker half in a step, in order. Its exceptions do not leave the step."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_core_fakes import FakeMetadata, FakeWorkerHalf

from baton.contract import (
    BlockStored,
    KVConnectorOutput,
    KVConnectorTransferResults,
    KVOutputAggregator,
    QuorumKVEvents,
)
from baton.contract.surface import Half, Scope, rows_of
from baton.core.config import EngineConfig
from baton.engine.api import SamplingParams
from baton.engine.forward_context import AttentionMetadata, ForwardContext
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.step import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput

LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")


class HookedModel:
    """A model without arithmetic that calls the hooks as attention layers do."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        for name in LAYERS:
            if (watcher := context.watcher) is not None:
                watcher.wait_for_layer_load(name)
                watcher.save_kv_layer(name, torch.zeros(1), context.attn_metadata)
        if self.error is not None:
            raise self.error
        return torch.zeros(len(input_ids), 4)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[0.0, 1.0]]).repeat(len(hidden), 1)


class World:
    def __init__(self, config: EngineConfig) -> None:
        self.half = FakeWorkerHalf()
        self.model = HookedModel()
        caches = {name: torch.zeros(config.cache_config.num_gpu_blocks, 1, 4, 2) for name in LAYERS}
        self.runner = ModelRunner(config, self.model, caches, self.half, device=torch.device("cpu"))

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        output.kv_connector_metadata = FakeMetadata(1)
        self.half.transcript.clear()
        return self.runner.execute(output, [])


@pytest.fixture
def world(make_config) -> World:
    return World(make_config())


def first_step(*, num_computed: int = 0, sync: bool = False) -> SchedulerOutput:
    """One new request of 6 tokens in blocks of 4."""
    return SchedulerOutput(
        scheduled_new_reqs=[
            NewRequestData("a", [3, 4, 5, 6, 7, 8], SamplingParams(temperature=0), ([11, 12],), num_computed)
        ],
        num_scheduled_tokens={"a": 6 - num_computed},
        total_num_scheduled_tokens=6 - num_computed,
        has_sync_kv_loads=sync,
    )


def second_step() -> SchedulerOutput:
    """The first decode step of this request."""
    return SchedulerOutput(
        scheduled_cached_reqs=CachedRequestData(
            req_ids=["a"], new_block_ids=[None], num_computed_tokens=[6], num_output_tokens=[1]
        ),
        num_scheduled_tokens={"a": 1},
        total_num_scheduled_tokens=1,
    )


REPORT = [
    "get_transfer_results []",
    "get_block_ids_with_load_errors",
    "get_expected_finished_count",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata (unbound)",
]
HOOKS = [
    "wait_for_layer_load model.layers.0.self_attn.attn",
    "save_kv_layer model.layers.0.self_attn.attn",
    "wait_for_layer_load model.layers.1.self_attn.attn",
    "save_kv_layer model.layers.1.self_attn.attn",
]
BEGIN = ["handle_preemptions (unbound)", "bind_connector_metadata (unbound)"]


def test_loads_start_after_the_forward_of_a_step_without_synchronous_ones(world: World) -> None:
    world.run(first_step())
    assert world.half.transcript == [
        *BEGIN,
        *HOOKS,
        "finish_forward",
        "start_load_kv [6 tokens]",
        "wait_for_save",
        *REPORT,
    ]


def test_loads_start_before_the_forward_of_a_step_with_synchronous_ones(world: World) -> None:
    world.run(first_step(num_computed=4, sync=True))
    assert world.half.transcript == [
        *BEGIN,
        "start_load_kv [2 tokens]",
        *HOOKS,
        "finish_forward",
        "wait_for_save",
        *REPORT,
    ]


def test_a_synchronous_load_is_shown_each_layers_cache_and_metadata_before_the_forward(world: World) -> None:
    """vLLM shows both as well: its example connector finds the layers there."""
    shown: list[Any] = []
    world.half.start_load_kv = shown.append  # type: ignore[method-assign,assignment]
    world.run(first_step(num_computed=4, sync=True))
    [context] = shown
    assert list(context.no_compile_layers) == list(context.attn_metadata) == list(LAYERS)
    for name in LAYERS:
        assert context.no_compile_layers[name].kv_cache.shape[1:] == (1, 4, 2)
        assert context.attn_metadata[name].slot_mapping.tolist() == [12 * 4, 12 * 4 + 1]


def test_a_step_without_tokens_runs_the_same_sequence(world: World) -> None:
    result = world.run(SchedulerOutput(finished_req_ids={"gone"}))
    assert world.half.transcript == [
        *BEGIN,
        "start_load_kv [0 tokens]",
        "wait_for_save",
        "get_transfer_results ['gone']",
        *REPORT[1:],
    ]
    assert result == ModelRunnerOutput()


def test_a_failing_model_ends_the_step_with_clear_and_nothing_else(world: World) -> None:
    world.model.error = ZeroDivisionError("the model is broken")
    with pytest.raises(ZeroDivisionError):
        world.run(first_step())
    assert world.half.transcript == [*BEGIN, *HOOKS, "clear_connector_metadata (unbound)"]


def test_a_half_that_takes_no_part_in_a_step_gets_no_other_call_in_it(world: World) -> None:
    world.half.is_idle = True
    assert world.run(first_step()).kv_connector_output is None
    assert world.half.transcript == []
    world.half.is_idle = False
    world.run(second_step())
    assert world.half.transcript[:2] == BEGIN


def test_a_dummy_run_shows_the_connector_nothing(world: World) -> None:
    world.runner.warm_up()
    assert world.half.transcript == []


# `get_transfer_results` wraps `get_finished`; for `has_connector_metadata` see below.
CALLED = {row.name for row in rows_of(Half.WORKER) if row.scope is Scope.STEP}
CALLED -= {"get_finished", "has_connector_metadata"}


@pytest.mark.parametrize("method", sorted(CALLED))
@pytest.mark.parametrize("sync", [True, False])
def test_with_any_hook_that_raises_the_step_samples_and_ends_with_clear(
    world: World, method: str, sync: bool
) -> None:
    world.half.raises = {method}
    result = world.run(first_step(num_computed=4 if sync else 0, sync=sync))
    assert result.sampled_token_ids == [[1]]
    assert result.connector_error == f"{method}: RuntimeError: {method} is broken"
    assert world.half.transcript[-1] == "clear_connector_metadata (unbound)"
    assert world.half.transcript.count("clear_connector_metadata (unbound)") == 1
    world.half.raises = set()
    result = world.run(second_step())
    assert (result.connector_error, result.loads_failed) == (None, False), "the next step is not affected"


LOADS = ["handle_preemptions", "bind_connector_metadata", "start_load_kv"]


@pytest.mark.parametrize("method", [*LOADS, "wait_for_layer_load", "get_block_ids_with_load_errors"])
def test_synchronous_loads_of_a_broken_half_count_as_invalid(world: World, method: str) -> None:
    world.half.raises = {method}
    result = world.run(first_step(num_computed=4, sync=True))
    assert result.kv_connector_output is not None
    assert result.kv_connector_output.invalid_block_ids == {11}, "block 12 is computed here"


@pytest.mark.parametrize("method", LOADS)
def test_loads_in_the_background_that_never_began_are_told(world: World, method: str) -> None:
    world.half.raises = {method}
    result = world.run(first_step())
    assert result.loads_failed
    assert result.kv_connector_output is None, "no end is reported that the connector may report later"


@pytest.mark.parametrize("method", ["wait_for_save", "save_kv_layer", "wait_for_layer_load"])
def test_a_failing_save_fails_no_load(world: World, method: str) -> None:
    world.half.raises = {method}
    assert not world.run(first_step()).loads_failed


def test_arrived_loads_do_not_count_while_their_errors_are_unknown(world: World) -> None:
    world.half.raises = {"get_block_ids_with_load_errors"}
    world.half.results = [KVConnectorTransferResults({"s"}, {"r1", "r2"}, {"r2"})]
    report = world.run(SchedulerOutput()).kv_connector_output
    assert report is not None
    assert report.finished_sending == {"s"}
    assert report.finished_recving == report.failed_recving == {"r1", "r2"}


ANSWERS = {
    "get_transfer_results": (
        None,
        7,
        "abc",
        np.array([1, 2]),
        [object()],
        ({7}, None, None),
        ("r1", None, None),
    ),
    "get_block_ids_with_load_errors": (None, 7, "abc", {"7"}, np.array([1.5, 2.5])),
    "get_expected_finished_count": (None, "abc", object()),
    "get_kv_connector_stats": (7, {"num_loans": 1}),
    "get_kv_connector_kv_cache_events": (7, []),
    "build_connector_worker_meta": (7, {"r1"}),
}


@pytest.mark.parametrize(
    ("method", "answer"), [(method, answer) for method, answers in ANSWERS.items() for answer in answers]
)
def test_a_result_of_a_wrong_type_counts_as_an_exception(world: World, method: str, answer: Any) -> None:
    setattr(world.half, method, lambda *given: answer)
    result = world.run(first_step())
    assert result.sampled_token_ids == [[1]]
    assert result.connector_error is not None
    assert result.connector_error.startswith(f"{method}: TypeError")
    assert world.half.transcript[-1] == "clear_connector_metadata (unbound)"


def test_a_half_whose_has_connector_metadata_raises_gets_no_layer_hooks(world: World) -> None:
    def breaks() -> bool:
        raise RuntimeError("broken")

    world.half._note = lambda name, detail="": world.half.transcript.append(name)  # type: ignore[method-assign]
    world.half.has_connector_metadata = breaks  # type: ignore[method-assign]
    result = world.run(first_step())
    assert result.sampled_token_ids == [[1]]
    assert result.connector_error == "has_connector_metadata: RuntimeError: broken"
    assert "save_kv_layer" not in world.half.transcript


def test_events_count_only_if_every_rank_reports_them(world: World) -> None:
    """An event counts only if all ranks report it, including a rank that raised."""
    world.half.raises = {"get_kv_connector_kv_cache_events"}
    silenced = world.run(first_step()).kv_connector_output
    of_other = QuorumKVEvents()
    of_other.add_events(
        [BlockStored(block_hashes=[1], parent_block_hash=None, token_ids=[1, 2], block_size=2)]
    )
    other = KVConnectorOutput(kv_cache_events=of_other)
    output = KVOutputAggregator(2).aggregate([silenced, other])
    assert output is not None
    assert output.kv_cache_events is not None
    assert output.kv_cache_events.aggregate().get_all_events() == []


class GraphsOfAnything:
    """Accepts every step, and counts replays."""

    def __init__(self) -> None:
        self.num_replays = 0

    def can_run(self, metadata: AttentionMetadata) -> bool:
        return True

    def run(self, token_ids: Any, step: ForwardContext) -> torch.Tensor:
        self.num_replays += 1
        return torch.zeros(len(token_ids), 4)


@pytest.mark.parametrize("sync", [True, False])
def test_a_step_with_loads_to_wait_for_is_not_replayed_although_it_computes_no_prompt(
    make_config, sync: bool
) -> None:
    """A preempted request is resumed, and all but its last output token is loaded."""
    world, graphs = World(make_config()), GraphsOfAnything()
    world.runner = ModelRunner(
        make_config(), world.model, {}, world.half, device=torch.device("cpu"), graphs=graphs
    )  # type: ignore[arg-type]
    world.run(first_step())
    assert graphs.num_replays == 0, "a prompt"
    world.run(
        SchedulerOutput(
            scheduled_cached_reqs=CachedRequestData(
                req_ids=["a"],
                resumed_req_ids={"a"},
                all_token_ids={"a": [3, 4, 5, 6, 7, 8, 1]},
                new_block_ids=[([21, 22],)],
                num_computed_tokens=[6],
                num_output_tokens=[1],
            ),
            num_scheduled_tokens={"a": 1},
            total_num_scheduled_tokens=1,
            has_sync_kv_loads=sync,
        )
    )
    assert graphs.num_replays == (0 if sync else 1)
    waits = [line for line in world.half.transcript if line.startswith("wait_for_layer_load")]
    assert len(waits) == (len(LAYERS) if sync else 0)


def test_ranks_other_than_the_first_learn_their_tokens_with_the_next_step(make_config) -> None:
    follower = World(make_config())
    follower.runner = ModelRunner(
        make_config(), follower.model, {}, follower.half, device=torch.device("cpu"), is_driver=False
    )
    assert follower.run(first_step()).sampled_token_ids == []
    step = second_step()
    step.kv_connector_metadata = FakeMetadata(2)
    seen: list[int] = []
    forward = follower.model.forward

    def watch(input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        seen.extend(input_ids.tolist())
        return forward(input_ids, positions, context)

    follower.model.forward = watch  # type: ignore[method-assign]
    follower.runner.execute(step, [[77]])
    assert np.array(seen).tolist() == [77]


class LateDevice:
    """Executes launched work only when it is waited for."""

    def __init__(self) -> None:
        self._launched: list[Callable[[], None]] = []

    def launch(self, kernel: Callable[[], None]) -> None:
        self._launched.append(kernel)

    def wait(self) -> None:
        while self._launched:
            self._launched.pop(0)()


@pytest.mark.parametrize("is_driver", [True, False])
def test_a_step_ends_when_the_device_has_finished_it(make_config, is_driver: bool) -> None:
    """Also a step without sampled tokens: a partial prefill, which peers get when the step ends."""
    device, world, written = LateDevice(), World(make_config()), []
    launch_forward, build_meta = world.model.forward, world.half.build_connector_worker_meta

    def forward(*arguments: Any) -> torch.Tensor:
        device.launch(lambda: written.append("the chunk's KV"))
        return launch_forward(*arguments)

    def report() -> Any:
        assert written == ["the chunk's KV"], "reported before it was computed"
        return build_meta()

    world.model.forward = forward  # type: ignore[method-assign]
    world.half.build_connector_worker_meta = report  # type: ignore[method-assign]
    world.runner = ModelRunner(
        make_config(),
        world.model,
        {},
        world.half,
        device=torch.device("cpu"),
        is_driver=is_driver,
        wait_for_device=device.wait,
    )
    chunk = first_step()
    chunk.num_scheduled_tokens["a"] = chunk.total_num_scheduled_tokens = 4  # 4 of 6: nothing is sampled.
    result = world.run(chunk)
    assert result.connector_error is None
    assert written
    assert not any(result.sampled_token_ids)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_on_a_gpu_a_reader_on_another_stream_sees_the_whole_step(make_config) -> None:
    device, world = torch.device("cuda", 0), World(make_config())
    cache = torch.zeros(1 << 20, device=device)
    launch_forward = world.model.forward
    build_meta = world.half.build_connector_worker_meta
    readers = torch.cuda.Stream(device)

    def forward(*arguments: Any) -> torch.Tensor:
        torch.cuda._sleep(int(5e8))  # About a quarter of a second, in which the step seems to have ended.
        cache.fill_(1.0)
        return launch_forward(*arguments).to(device)

    def report() -> Any:
        with torch.cuda.stream(readers):
            assert cache.cpu().eq(1.0).all(), "reported before it was computed"
        return build_meta()

    world.model.forward = forward  # type: ignore[method-assign]
    world.half.build_connector_worker_meta = report  # type: ignore[method-assign]
    world.runner = ModelRunner(make_config(), world.model, {}, world.half, device=device)
    chunk = first_step()
    chunk.num_scheduled_tokens["a"] = chunk.total_num_scheduled_tokens = 4
    assert world.run(chunk).connector_error is None


def test_ends_may_be_of_another_hosts_class(world: World) -> None:
    """vLLM's `KVConnectorTransferResults` has the same attributes and is another class."""
    ends = SimpleNamespace(finished_sending={"s"}, finished_recving={"r"}, failed_recving={"r"})
    world.half.results = [ends]
    report = world.run(SchedulerOutput()).kv_connector_output
    assert report is not None
    assert (report.finished_sending, report.finished_recving, report.failed_recving) == ({"s"}, {"r"}, {"r"})
