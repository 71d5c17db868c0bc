"""Compiled layers of decode steps, compared bit by bit with the layers of `Decoder`."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from baton.checkpoints.checkpoint import load_model_config
from baton.checkpoints.random_model import write_checkpoint
from baton.contract.null import NullWorkerHalf
from baton.core.kv_groups import layer_name
from baton.engine.attention import compiled
from baton.engine.attention.compiled import LEVELS, LIBRARY
from baton.engine.forward_context import ForwardContext
from baton.engine.models import compiled_layers, compiled_rows
from baton.engine.models.compiled_layers import CompiledLayers
from baton.engine.models.decoder import Decoder
from tests.engine_models.paged import SHUFFLED_BLOCKS, PagedModel, prompt_of
from tests.struct_layouts import layout_of, layouts_in

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="no C compiler on this machine")

SMALL = {"hidden": 64, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocab": 768}
PROMPTS = [prompt_of(seed, length) for seed, length in enumerate((3, 19, 8, 11, 30, 2))]

ModelOf = Callable[..., PagedModel]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    def make(family: str, dtype: str = "float32", **fields: Any) -> PagedModel:
        folder = tmp_path_factory.mktemp("checkpoint")
        write_checkpoint(folder, family=family, max_position=64, **{**SMALL, **fields})
        return PagedModel(load_model_config(folder, dtype=dtype))

    return make


def test_the_structs_of_the_library_have_the_layouts_of_their_mirrors() -> None:
    library, of_layers = compiled.load_library(), compiled_layers
    assert library is not None
    of_step: list[type[ctypes.Structure]] = [compiled._Step, compiled_rows._Heads]
    mirrors = [*of_step, of_layers._Product, of_layers._Layer, of_layers._Kind, of_layers._Layers]
    assert layouts_in(library, len(mirrors)) == [layout_of(mirror) for mirror in mirrors]


@pytest.fixture
def num_compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of requests of each compiled step."""
    made: list[int] = []
    run = CompiledLayers.run

    def counted(self: CompiledLayers, hidden: torch.Tensor, *arguments: Any) -> torch.Tensor | None:
        if (normed := run(self, hidden, *arguments)) is not None:
            made.append(len(hidden))
        return normed

    monkeypatch.setattr(CompiledLayers, "run", counted)
    return made


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def decode(model: PagedModel, num_requests: int, num_steps: int = 2) -> list[torch.Tensor]:
    """Logits of each decode step, and the caches after all."""
    tables = [SHUFFLED_BLOCKS[5 * request : 5 * request + 5] for request in range(num_requests)]
    prompts = PROMPTS[:num_requests]
    model.step([(prompt, 0, table) for prompt, table in zip(prompts, tables, strict=True)])
    results = [
        model.step(
            [([7 + step], len(prompt) + step, table) for prompt, table in zip(prompts, tables, strict=True)]
        )
        for step in range(num_steps)
    ]
    return [*results, *(cache.clone() for cache in model.kv_caches.values())]


def check(model: PagedModel, num_compiled: list[int], numbers: tuple[int, ...] = (1, 6)) -> None:
    for num_requests in numbers:
        found = decode(model, num_requests)
        assert num_compiled == [num_requests] * 2
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Decoder, "compiled_for", lambda *_: None)
            wanted = decode(model, num_requests)
        assert num_compiled == [num_requests] * 2
        num_compiled.clear()
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)


needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no packed products in bfloat16"
)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen2", "float32"),
        pytest.param("qwen2", "bfloat16", marks=needs_bfloat16),
        ("qwen3", "float32"),
        pytest.param("qwen3", "bfloat16", marks=needs_bfloat16),
    ],
)
def test_results_are_those_of_the_layers_in_python(
    family: str, dtype: str, model_of: ModelOf, num_compiled: list[int]
) -> None:
    window = {"sliding_window": 8} if family == "qwen2" else {}
    check(model_of(family, dtype, **window), num_compiled)


@pytest.mark.parametrize("level", range(len(LEVELS) - 1), ids=LEVELS[:-1])
def test_any_set_of_instructions_has_these_results(
    level: int, monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, num_compiled: list[int]
) -> None:
    monkeypatch.setattr(compiled_rows, "_LEVEL", level)
    monkeypatch.setattr(compiled_layers, "_LEVEL", level)
    check(model_of("llama"), num_compiled, (3,))


@pytest.mark.parametrize(("family", "fields"), [("gemma3", {}), ("qwen3", {"head_dim": 48})])
def test_other_layers_are_computed_in_python(
    family: str, fields: dict[str, Any], model_of: ModelOf, num_compiled: list[int]
) -> None:
    decode(model_of(family, **fields), 2)
    assert not num_compiled


def test_another_release_of_torch_is_not_called(
    monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, num_compiled: list[int]
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.14.0+cpu")
    decode(model_of("llama"), 2)
    assert not num_compiled


class Watcher(NullWorkerHalf):
    """Changes the cache of each layer before the step reads it, and sees that it was written before."""

    def __init__(self, caches: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []
        self._caches = caches
        self._before: torch.Tensor | None = None

    def has_connector_metadata(self) -> bool:
        return True

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.calls.append(("wait", layer_name))
        self._caches[layer_name].mul_(1.5)
        self._before = self._caches[layer_name].clone()

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        self.calls.append(("save", layer_name))
        assert kv_layer is self._caches[layer_name]
        assert self._before is not None
        assert not torch.equal(kv_layer, self._before)


def test_hooks_are_called_around_the_attention_of_each_layer(
    monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, num_compiled: list[int]
) -> None:
    model = model_of("llama")
    watcher = Watcher(model.kv_caches)
    context_of = model.context

    def watched(metadata: Any) -> ForwardContext:
        context = context_of(metadata)
        context.worker_half = watcher if metadata.max_query_len == 1 else None
        return context

    monkeypatch.setattr(model, "context", watched)
    check(model, num_compiled, (2,))
    assert watcher.calls == [(call, layer_name(i)) for i in range(3) for call in ("wait", "save")] * 4
