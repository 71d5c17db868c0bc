"""The compiled attention of decoded tokens, compared with the reference in `attention_check`."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.attention import build_backend, compiled
from baton.engine.attention.compiled import LEVELS, LIBRARY, CompiledDecode, compiled_decode, load_library
from baton.engine.attention.sdpa import SdpaBackend
from baton.engine.forward_context import build_attention_metadata
from tests.engine_models.attention_check import BLOCK_SIZE, check_backend, shape_of
from tests.transport.fake_cuda import COMPILER

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="no C compiler on this machine")

SHAPES = st.fixed_dictionaries(
    {
        "num_kv_heads": st.sampled_from([1, 2]),
        "num_heads": st.sampled_from([2, 4, 6, 10]),
        "head_dim": st.sampled_from([16, 48, 64, 80]),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
    }
)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 37), min_size=1, max_size=5),
    prompt=st.sampled_from([0, 3]),
    shape=SHAPES,
    level=st.integers(0, len(LEVELS) - 1),
    window=st.sampled_from([None, 1, 5, 16, 100]),
    seed=st.integers(0, 1000),
    num_layers=st.sampled_from([1, 3]),
    has_sinks=st.booleans(),
    is_token_major=st.booleans(),
)
def test_decoded_tokens_agree_with_the_definition(
    lengths: list[int],
    prompt: int,
    shape: dict[str, Any],
    level: int,
    window: int | None,
    seed: int,
    **how: Any,
) -> None:
    """A prompt of `prompt` tokens is among the requests, unless `prompt` is 0."""
    assert torch.get_num_threads() == 1, "with more, torch computes"
    library = load_library()
    assert library is not None
    whole = shape_of(**shape)
    requests = [(length, 1) for length in lengths]
    if prompt:
        requests.insert(len(requests) // 2, (2, prompt))
    compiled = CompiledDecode(whole, library, level=level)
    check_backend(SdpaBackend(whole, compiled), requests, window, seed, **how)


def test_keys_that_are_not_numbers_stay_visible_in_their_request() -> None:
    backend = build_backend(shape_of())
    cache = torch.ones(4, 2, BLOCK_SIZE, 32)
    cache[1, 0, 2, 3] = torch.nan  # A key of the first request; a value of the second one.
    cache[3, 1, 0, 20] = torch.nan
    plan = backend.plan(build_attention_metadata([7, 7], [1, 1], [[0, 1], [2, 3]], BLOCK_SIZE), None, cache)
    assert plan.compiled is not None
    answer = backend.attend(torch.ones(2, 4, 16), cache, plan).view(2, 2, 2, 16)
    is_nan = answer.isnan()
    assert is_nan[0, 0].all()
    assert not is_nan[0, 1].any()
    assert not is_nan[1, 0].any()
    assert is_nan[1, 1, :, 4].all()
    assert is_nan.sum() == 2 * 16 + 2


@pytest.mark.parametrize("how", [{"head_dim": 24}, {"dtype": torch.float16}])
def test_other_shapes_are_not_compiled(how: dict[str, Any]) -> None:
    assert compiled_decode(shape_of(**how)) is None


def test_without_the_library_decoding_gathers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiled._log_missing.cache_clear()
    caplog.set_level("INFO")
    monkeypatch.setattr(compiled, "LIBRARY", tmp_path / "missing.so")
    check_backend(build_backend(shape_of()), [(5, 1), (9, 1)], None, seed=1)
    assert "run scripts/build-library decode" in caplog.text


def test_the_sources_have_no_warnings() -> None:
    assert COMPILER is not None
    strict = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1", "-fsyntax-only", f"-I{LIBRARY.parent}"]
    engine = LIBRARY.parents[1]
    sources = [str(engine / name) for name in ("attention/decode.c", "models/rows.c", "models/layers.c")]
    subprocess.run([COMPILER, *strict, *sources], check=True)
