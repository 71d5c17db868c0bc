"""Hidden states in files equal those of transformers, however the engine computed them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from baton.connectors.hidden_states import BatonHiddenStatesConnector, load_hidden_states
from baton.connectors.hidden_states.halves import (
    HiddenStatesMetadata,
    HiddenStatesWorkerHalf,
    SaveStates,
)
from baton.connectors.hidden_states.settings import HiddenStatesSettings
from baton.core.config import (
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from baton.core.errors import BadTransferParams, ConfigError
from baton.engine.api import SamplingParams
from baton.engine.llm import LLM, Completion
from tests.connectors import engine_world
from tests.connectors.engine_world import FACTORY, ModelOf, prompt_of, start_in, three_layers

SETTLE_S = 30.0  # Reached only on failure.
GREEDY = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
LAYERS = (0, 1, 3)  # Of three layers: the embeddings, the first output, the last.
Start = Callable[..., LLM]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return three_layers(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: ModelConfig) -> Callable[[list[int]], torch.Tensor]:
    """[tokens, layers, hidden size] by transformers."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model.model, dtype=torch.float32)

    def compute(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            out = theirs(torch.tensor([token_ids]), output_hidden_states=True)
        return torch.stack([out.hidden_states[layer][0] for layer in LAYERS], dim=1)

    return compute


def config_of(
    model: ModelConfig,
    folder: Path,
    *,
    tp: int = 1,
    graph_mode: Any = "off",
    max_num_seqs: int = 8,
    caching: bool = True,
    **extra: Any,
) -> EngineConfig:
    transfer = {
        "kv_connector": "BatonHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder), "layer_ids": [*LAYERS], **extra},
    }
    return engine_world.config_of(
        model,
        transfer,
        num_blocks=48,
        tp_size=tp,
        cache={"enable_prefix_caching": caching},
        # Prompts take several steps.
        scheduler_config=SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=max_num_seqs),
        device_config=DeviceConfig(graph_mode=graph_mode),
    )


@pytest.fixture
def start(model: ModelConfig, tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:
        yield lambda **options: start_in(stack, config_of(model, tmp_path, **options))


def saved_of(llm: LLM, completion: Completion) -> dict[str, torch.Tensor]:
    llm.settle(SETTLE_S)
    assert completion.kv_transfer_params is not None
    return load_hidden_states(completion.kv_transfer_params["hidden_states_path"])


def assert_equal(saved: dict[str, torch.Tensor], token_ids: list[int], expected: torch.Tensor) -> None:
    assert saved["token_ids"].tolist() == token_ids
    torch.testing.assert_close(saved["hidden_states"], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("graph_mode", ["off", "full"])
def test_states_equal_those_of_transformers(start: Start, expected: Any, graph_mode: str) -> None:
    llm = start(graph_mode=graph_mode)
    prompts = [prompt_of(37), prompt_of(5, step=3), prompt_of(21, step=11)]
    for prompt, completion in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        assert_equal(saved_of(llm, completion), prompt, expected(prompt))


@pytest.mark.slow
def test_output_tokens_are_included_on_request(start: Start, expected: Any) -> None:
    llm = start()
    prompt = prompt_of(18)
    (completion,) = llm.generate([prompt], GREEDY, kv_transfer_params=[{"include_output_tokens": True}])
    tokens = [*prompt, *completion.token_ids[:-1]]
    assert_equal(saved_of(llm, completion), tokens, expected(tokens))


@pytest.mark.slow
def test_tokens_from_the_prefix_cache_have_their_states(start: Start, expected: Any) -> None:
    llm = start()
    llm.generate([prompt_of(24)], GREEDY)
    again = [*prompt_of(24), 9, 9, 9]
    (completion,) = llm.generate([again], GREEDY)
    assert completion.num_cached_tokens >= 20
    assert_equal(saved_of(llm, completion), again, expected(again))


@pytest.mark.slow
def test_states_are_copied_before_their_blocks_are_reused(start: Start, expected: Any) -> None:
    """The next request gets the blocks of the ended one, and computes in the step that saves them."""
    llm = start(max_num_seqs=1, caching=False)  # So that freed blocks are reused first.
    prompts = [prompt_of(30, step=step) for step in range(3, 9)]
    one = SamplingParams(max_tokens=1, temperature=0)
    for prompt, completion in zip(prompts, llm.generate(prompts, one), strict=True):
        assert_equal(saved_of(llm, completion), prompt, expected(prompt))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "mistral"])
def test_windows_lose_no_states(
    family: str, model_of: ModelOf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """States are as with one table, also for prompts whose beginning is in the prefix cache."""
    config = config_of(model_of(family), tmp_path)
    prompts = [prompt_of(40), prompt_of(33, step=11), [*prompt_of(40), 9, 9, 9], prompt_of(60, step=3)]
    saved: list[list[torch.Tensor]] = []
    for mode in ("auto", "off"):
        cache = msgspec.structs.replace(config.cache_config, hybrid_kv_cache=mode, num_gpu_blocks=60)
        of_mode = msgspec.structs.replace(config, cache_config=cache)
        caplog.clear()
        with LLM(of_mode, FACTORY) as llm:
            # If all layers have a window, no layer keeps the slots of tokens before it.
            has_groups = mode == "auto" and family != "mistral"
            assert llm.core.scheduler.kv_cache.is_hybrid == has_groups
            assert ("block table" in caplog.text) == (mode == "auto" and family == "mistral")
            completions = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
            assert completions[2].num_cached_tokens
            completions += llm.generate(prompts, GREEDY)
            saved.append([saved_of(llm, completion)["hidden_states"] for completion in completions])
    for with_groups, one_table, prompt in zip(*saved, prompts * 2, strict=True):
        assert len(with_groups) == len(prompt)
        torch.testing.assert_close(with_groups, one_table, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("forked_programs")
def test_two_ranks_save_one_file(start: Start, expected: Any, tmp_path: Path) -> None:
    llm = start(tp=2)
    prompt = prompt_of(21)
    (completion,) = llm.generate([prompt], GREEDY)
    assert_equal(saved_of(llm, completion), prompt, expected(prompt))
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_a_request_may_choose_a_file_if_allowed(start: Start, tmp_path: Path) -> None:
    llm = start(allow_custom_save_path=True)
    asked = {"hidden_states_path": "run/one.safetensors"}
    (completion,) = llm.generate([prompt_of(9)], GREEDY, kv_transfer_params=[asked])
    saved_of(llm, completion)
    assert (tmp_path / "run" / "one.safetensors").exists()
    outside = {"hidden_states_path": "../else.safetensors"}
    (refused,) = llm.generate([prompt_of(9)], GREEDY, kv_transfer_params=[outside])
    assert refused.error is not None
    assert refused.error.is_users


@pytest.mark.slow
def test_an_aborted_request_leaves_no_file(start: Start, tmp_path: Path) -> None:
    from baton.engine.api import EngineRequest

    llm = start()
    llm.core.add_request(
        EngineRequest(
            request_id="a", prompt_token_ids=prompt_of(40), sampling_params=GREEDY, arrival_time_s=0
        )
    )
    llm.core.step()
    llm.core.abort("a")
    llm.settle(SETTLE_S)
    llm.close()
    assert list(tmp_path.iterdir()) == []


def test_without_hidden_states_from_the_host_only_the_file_is_missing(tmp_path: Path) -> None:
    half = HiddenStatesWorkerHalf(
        HiddenStatesSettings(shared_storage_path=str(tmp_path)), (1,), 4, is_first_rank=True
    )
    half.register_kv_caches({"layer": torch.zeros(4, 1, 4, 8)})
    half.handle_preemptions(HiddenStatesMetadata((SaveStates(str(tmp_path / "a"), (1, 2), (0,)),)))
    stats = half.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["lost_files"] == 1
    half.shutdown()
    assert list(tmp_path.iterdir()) == []


# --- Request validation --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "x.txt",
        "",
        7,
        "a\0.safetensors",
        "..",
        "a/../../b.safetensors",
    ],
)
def test_a_forbidden_path_is_refused(model: ModelConfig, tmp_path: Path, path: object) -> None:
    validate = BatonHiddenStatesConnector.make_door(config_of(model, tmp_path, allow_custom_save_path=True))
    with pytest.raises(BadTransferParams, match="hidden_states_path"):
        validate({"hidden_states_path": path})
    validate({"hidden_states_path": "fine/a.safetensors"})
    validate({"include_output_tokens": True})
    with pytest.raises(BadTransferParams, match="include_output_tokens"):
        validate({"include_output_tokens": "yes"})
    closed = BatonHiddenStatesConnector.make_door(config_of(model, tmp_path))
    with pytest.raises(BadTransferParams, match="allow_custom_save_path"):
        closed({"hidden_states_path": "fine/a.safetensors"})


def test_a_request_id_does_not_become_a_path(tmp_path: Path) -> None:
    settings = HiddenStatesSettings(shared_storage_path=str(tmp_path))
    strange = settings.path_for("../../a b", None)
    assert strange.parent == tmp_path
    assert strange != settings.path_for("______a_b", None), "two requests must not share a file"
    assert settings.path_for("cmpl-1", None) == tmp_path / "cmpl-1.safetensors"
    assert len(settings.path_for("x" * 5000, None).name) < 255


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"layer_ids": [4]}, r"layer_ids: must be different numbers in \[0, 3\]"),
        ({"layer_ids": [1, 1]}, r"layer_ids: must be different numbers"),
        ({"layer_ids": []}, r"layer_ids: must name a layer"),
        ({"path": "/x"}, r"path: is not known"),
        ({"shared_storage_path": "x"}, r"shared_storage_path: must be an absolute path"),
    ],
)
def test_a_bad_setting_is_named(
    model: ModelConfig, tmp_path: Path, extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        BatonHiddenStatesConnector.make_door(config_of(model, tmp_path, **extra))
