"""An engine does not differ from itself: the logits of a token do not depend on how its step was composed.

The last token of a prompt is computed with the whole prompt in one step, after chunks, after a cached prefix,
and in a batch. Kernels and orders of sums differ between these, so the results differ by rounding, but not by
more. `bound_of` derives how much that is. Mixtures of experts are left out: a rounding may choose another
expert.
"""

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.checkpoints.checkpoint import load_model_config
from baton.checkpoints.random_model import write_checkpoint
from baton.engine.models.decoder import Decoder
from baton.engine.models.matmul import Matmul
from tests.engine_models.paged import BLOCK_SIZE, SHUFFLED_BLOCKS, VOCAB, PagedModel, prompt_of

FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"family": "llama"},
    "qwen2": {"family": "qwen2", "sliding_window": 12},
    "qwen3": {"family": "qwen3"},
    "gemma3": {"family": "gemma3", "sliding_window": 12},
    "mamba2": {"family": "mamba2"},
    "qwen3_5": {"family": "qwen3_5"},
}
HIDDEN, LAYERS, HEADS, HEAD_DIM = 64, 3, 4, 32
MAX_PROMPT, MAX_OTHERS = 40, 7
BLOCKS_OF_REQUEST = MAX_PROMPT // BLOCK_SIZE
DTYPES = ("float32", "bfloat16")
CASES = [
    *itertools.product(FAMILIES, DTYPES, [1]),
    *zip(FAMILIES, itertools.cycle(DTYPES), itertools.repeat(2)),
]
NUDGE = 2.0**-12  # Above float32's rounding, and small enough to be proportional.
CHILD_TIMEOUT_S = 300

Requests = list[tuple[list[int], int, list[int]]]


def bound_of(dtype: str, gain: float) -> float:
    """The largest difference of two results, as the norm of the difference over the norm of the logits.

    A number passes R roundings on its way through the model, each by at most u of the number (u: half the
    distance of 1 to the next number of the dtype), and by 0.42 u in the root mean square: errors are uniform
    in [-u, u] / m, m in [1, 2) has the density 1 / (m ln 2), and 1 / sqrt(3) sqrt(0.54) = 0.42. Their signs
    are independent, so they add in quadrature, and those of two computations as 2 R. An error of the
    embedding arrives `gain` times as large at the logits, one of the last norm once; errors between them
    between that, which makes gain / sqrt(3) in the mean. So 0.245 gain u sqrt(2 R) is expected. Twice that is
    allowed.

    float32     Each term of a sum is rounded, in another order or not: R is the number of terms of all sums.
    bfloat16    Kernels add in float32. R is the number of results that are rounded: in each layer two norms,
                four products, norm and rotation of heads, the weights of attention and their sum, two of
                the gate, and two sums with the residual.

    In float32 this is about 2e-5. Rows that are rounded to bfloat16 make 7e-3.
    """
    if dtype == "float32":
        terms = LAYERS * (4 * HIDDEN + HEAD_DIM + MAX_PROMPT + HEADS * HEAD_DIM + 4 * HIDDEN) + 2 * HIDDEN
        return 0.49 * gain * 2.0**-24 * math.sqrt(2 * terms)
    return 0.49 * gain * 2.0**-8 * math.sqrt(2 * (LAYERS * 14 + 3))


def gain_of(model: PagedModel, prompt: list[int]) -> float:
    """How much larger a relative error of the embedding is in the logits: the largest of four random errors.

    `model`: in float32.
    """
    generator, embedding = torch.Generator().manual_seed(len(prompt)), model.model.embedding
    exact, numbers = model.step([(prompt, 0, table(0))])[-1], embedding.detach().clone()
    gains = [1.0]
    for _ in range(4):
        errors = NUDGE * torch.randn(numbers.shape, generator=generator)
        with torch.inference_mode():
            embedding.copy_(numbers * (1 + errors))
        found = model.step([(prompt, 0, table(0))])[-1]
        gains.append(float((found - exact).norm() / exact.norm()) / NUDGE)
    with torch.inference_mode():
        embedding.copy_(numbers)
    return max(gains)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], PagedModel]:
    made: dict[tuple[str, str], PagedModel] = {}

    def make(family: str, dtype: str) -> PagedModel:
        if (family, dtype) not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            shape = {"hidden": HIDDEN, "layers": LAYERS, "heads": HEADS, "kv_heads": 2, "head_dim": HEAD_DIM}
            shape |= {"vocab": VOCAB, "max_position": 64}
            write_checkpoint(folder, **{**shape, **FAMILIES[family]})  # type: ignore[arg-type]
            made[family, dtype] = PagedModel(load_model_config(folder, dtype=dtype))
        return made[family, dtype]

    return make


@pytest.fixture
def threads(num_threads: int) -> Iterator[None]:
    """Layers and attention of decode steps are compiled code with one thread, and torch's with several."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    yield
    torch.set_num_threads(before)


def table(index: int) -> list[int]:
    return SHUFFLED_BLOCKS[BLOCKS_OF_REQUEST * index : BLOCKS_OF_REQUEST * (index + 1)]


def logits_of_each_way(
    model: PagedModel, prompt: list[int], cuts: list[int], others: list[int]
) -> dict[str, torch.Tensor]:
    """Logits of the last token. `cuts`: where chunks end. `others`: lengths of other prompts in the batch."""
    ours, last = table(0), len(prompt) - 1

    def after_chunks(*cuts: int) -> torch.Tensor:
        for start, end in zip((0, *cuts), (*cuts, len(prompt)), strict=True):
            logits = model.step([(prompt[start:end], start, ours)])
        return logits[-1]

    ways = {"whole": after_chunks(), "chunks": after_chunks(*cuts), "last alone": after_chunks(last)}
    cached = cuts[-1] // BLOCK_SIZE * BLOCK_SIZE
    if cached:
        of_cache = table(1)
        model.step([(prompt[:cached], 0, of_cache)])
        blocks = of_cache[: cached // BLOCK_SIZE] + ours[cached // BLOCK_SIZE :]
        ways["cached prefix"] = model.step([(prompt[cached:], cached, blocks)])[-1]
    batch: Requests = [(prompt_of(7 + n, n), 0, table(2 + index)) for index, n in enumerate(others)]
    ways["batch of prompts"] = model.step([*batch, (prompt, 0, ours)])[-1]
    model.step([(prompt[:last], 0, ours)])
    model.step(batch)
    decoding: Requests = [([5], len(tokens), blocks) for tokens, _, blocks in batch]
    ways["batch of tokens"] = model.step([(prompt[last:], last, ours), *decoding])[0]
    model.step([(prompt[:last], 0, ours)])
    ways["batch of both"] = model.step([(prompt[last:], last, ours), *batch])[0]
    return ways


def differences(model: PagedModel, prompt: list[int], cuts: list[int], others: list[int]) -> dict[str, float]:
    """Return how far each way is from the whole prompt, relative."""
    ways = logits_of_each_way(model, prompt, cuts, others)
    whole = ways.pop("whole").double()
    return {way: float((logits.double() - whole).norm() / whole.norm()) for way, logits in ways.items()}


@pytest.mark.parametrize(("family", "dtype", "num_threads"), CASES)
@pytest.mark.usefixtures("threads")
def test_a_token_has_the_same_logits_in_each_step(
    family: str, dtype: str, num_threads: int, model_of: Callable[[str, str], PagedModel]
) -> None:
    model, exact = model_of(family, dtype), model_of(family, "float32")

    @given(
        seed=st.integers(0, 2**32),
        num_tokens=st.integers(2, MAX_PROMPT),
        cuts=st.sets(st.integers(1, MAX_PROMPT - 1), min_size=1, max_size=4),
        others=st.lists(st.integers(2, MAX_PROMPT - 1), min_size=1, max_size=MAX_OTHERS),
    )
    @settings(max_examples=5)
    def check(seed: int, num_tokens: int, cuts: set[int], others: list[int]) -> None:
        within = sorted(cut for cut in cuts if cut < num_tokens) or [1]
        prompt = prompt_of(seed, num_tokens)
        found = differences(model, prompt, within, others)
        assert max(found.values()) <= bound_of(dtype, gain_of(exact, prompt)), found

    check()


@pytest.mark.parametrize(("dtype", "rounded"), [("float32", torch.bfloat16), ("bfloat16", torch.float8_e5m2)])
def test_a_product_that_rounds_few_rows_otherwise_is_noticed(
    dtype: str,
    rounded: torch.dtype,
    model_of: Callable[[str, str], PagedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt, multiply = prompt_of(0, 33), Matmul.__call__
    bound, model = bound_of(dtype, gain_of(model_of("llama", "float32"), prompt)), model_of("llama", dtype)

    def few_rows_rounded(matmul: Matmul, x: torch.Tensor) -> torch.Tensor:
        return multiply(matmul, x.to(rounded).to(x.dtype) if len(x) <= 4 else x)

    monkeypatch.setattr(Matmul, "__call__", few_rows_rounded)
    monkeypatch.setattr(Decoder, "compiled_for", lambda *_: None)
    found = differences(model, prompt, [32], [5, 9, 20, 33])
    assert min(found["last alone"], found["cached prefix"]) > bound, found
    if dtype == "float32":
        assert min(found["last alone"], found["cached prefix"]) > 50 * bound, found


# --- Other CPUs --------------------------------------------------------------------------------------

PATHS = {
    "oneDNN and torch with AVX2": ("AVX2", "avx2", torch.cpu._is_avx2_supported, False),
    "AVX-512, no products in bfloat16": ("AVX512_CORE", "avx512", torch.cpu._is_avx512_supported, True),
    "AVX-512, products in bfloat16": (
        "AVX512_CORE_BF16",
        "avx512",
        torch.cpu._is_avx512_bf16_supported,
        True,
    ),
    "AMX": ("AVX512_CORE_AMX", "avx512", torch.cpu._is_amx_tile_supported, True),
}
"""Limits of oneDNN and of torch, whether this CPU has the instructions, whether they pack bfloat16."""

CHILD = """
import sys, pytest, torch
from baton.engine.attention.compiled import LEVELS, MOST_LEVEL
from baton.engine.models.matmul import is_packable
capability, is_packed, file = sys.argv[1:]
assert torch.backends.cpu.get_cpu_capability().lower() == capability
assert LEVELS[MOST_LEVEL].replace("-", "").lower() == capability
assert is_packable(torch.empty(1, dtype=torch.bfloat16)) is (is_packed == "True")
chosen = "same_logits and 1] and (gemma3 or mamba2 or qwen3_5)"
sys.exit(pytest.main([file, "-q", "-p", "no:cacheprovider", "-k", chosen]))
"""


@pytest.mark.processes
@pytest.mark.parametrize("path", PATHS)
def test_other_cpus_have_this_property(path: str) -> None:
    """Both limits are read once in a process, so each path has its own.

    The three families have all kinds of products, of attention and of states.
    """
    isa, capability, is_supported, is_packed = PATHS[path]
    if not is_supported():
        pytest.skip(f"this CPU lacks the instructions of {path!r}")
    if path == [name for name, (*_, has, _) in PATHS.items() if has()][-1]:
        pytest.skip(f"this process has no limits, which is {path!r}")
    limits = {"ONEDNN_MAX_CPU_ISA": isa, "ATEN_CPU_CAPABILITY": capability}
    child = subprocess.run(
        [sys.executable, "-c", CHILD, capability, str(is_packed), __file__],
        env={**os.environ, **limits},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=CHILD_TIMEOUT_S,
    )
    assert child.returncode == 0, child.stdout
