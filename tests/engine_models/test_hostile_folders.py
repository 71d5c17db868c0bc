"""Hostile model folders: each defect is refused with its field, without a hang and in bounded memory."""

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.checkpoints.checkpoint import load_model_config
from baton.checkpoints.families import parse_architecture
from baton.core.errors import UserError
from baton.engine.text.tokenizer import MAX_GROWTH, Tokenizer
from baton.http.settings import HttpSettings
from baton.http.workers import WorkerPool
from baton.server.tokens import PromptEncoder
from tests.engine_models import test_architecture as of_models
from tests.server.fakes import model_config


@pytest.fixture
def folder(tmp_path: Path, checkpoint_of: Callable[[str], Path]) -> Path:
    return Path(shutil.copytree(checkpoint_of("llama"), tmp_path / "model"))


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("num_hidden_layers", 10**9, "num_hidden_layers"),
        ("num_hidden_layers", 4000, "weight files"),
        ("vocab_size", 10**12, "vocab_size"),
        ("vocab_size", 1 << 24, "weight files"),
        ("hidden_size", 1 << 23, "weight files"),
        ("intermediate_size", 1 << 23, "weight files"),
        ("max_position_embeddings", 1 << 60, "max_position_embeddings"),
        ("max_position_embeddings", 1 << 27, "max_model_len"),
        ("rope_theta", 1e300, "rope_theta"),
        ("rope_scaling", {"rope_type": "linear", "factor": 1e300}, "factor"),
    ],
)
def test_impossible_sizes_are_refused_before_any_allocation(
    folder: Path, field: str, value: Any, complaint: str
) -> None:
    change(folder / "config.json", **{field: value})
    with pytest.raises(UserError, match=complaint):
        load_model_config(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_fifo_is_no_configuration(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(UserError, match=rf"{name}.*not a regular file"):
        load_model_config(folder)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
)
def test_a_fifo_is_no_tokenizer(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(UserError, match=rf"{name}.*not a regular file"):
        Tokenizer.from_folder(folder)


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
@pytest.mark.parametrize(
    "step",
    [
        replace({"String": "a"}, "b" * (MAX_GROWTH + 1)),
        replace({"Regex": ""}, "b" * MAX_GROWTH),
        {"type": "Prepend", "prepend": "b" * MAX_GROWTH},
        {"type": "Sequence", "normalizers": [replace({"String": "a"}, "a" * 9)] * 2},
        {"type": "Sequence", "decoders": [replace({"Regex": "x*"}, "x")] * 7},
    ],
)
def test_replacements_that_explode_are_refused(folder: Path, part: str, step: dict[str, Any]) -> None:
    change(folder / "tokenizer.json", **{part: step})
    with pytest.raises(UserError, match=rf"tokenizer\.json: {part}: replacements"):
        Tokenizer.from_folder(folder)


@pytest.mark.processes
@pytest.mark.parametrize(
    "template",
    [
        "{{ 9**(9**9) }}",
        "{{ 'a' * 10**10 }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_never_ends_is_refused_at_start(folder: Path, template: str) -> None:
    change(folder / "tokenizer_config.json", chat_template=template)
    workers = WorkerPool(1)
    encoder = PromptEncoder(
        Tokenizer.from_folder(folder), model_config(), workers, HttpSettings(admission_s=0.3)
    )
    try:
        with pytest.raises(UserError, match=r"chat_template: cannot be compiled and rendered"):
            asyncio.run(encoder.check_template())
    finally:
        encoder.close()
        workers.close()


def test_a_macro_that_recurses_is_the_requests_fault(folder: Path) -> None:
    change(
        folder / "tokenizer_config.json",
        chat_template="{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}",
    )
    template = Tokenizer.from_folder(folder).chat_template
    assert template is not None
    with pytest.raises(UserError, match="recurses"):
        template.render([{"role": "user", "content": "a"}], add_generation_prompt=True)


OTHER_KEYS = {
    "intermediate_size",
    "max_window_layers",
    "num_attention_heads",
    "query_pre_attn_scalar",
    "rope_theta",
    "routed_scaling_factor",
    "sliding_window_pattern",
}
KEYS = sorted({name for fields, _ in of_models.REFUSED for name in fields} - {"architectures"} | OTHER_KEYS)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(("rope_type", "factor", "rope_theta", "full_attention", "mscale_all_dim")), inner
        )
    ),
    max_leaves=5,
)
FAMILIES: list[dict[str, Any]] = [
    {},
    of_models.GEMMA3,
    of_models.MIXTRAL,
    of_models.QWEN3_MOE,
    of_models.GPT_OSS,
    of_models.DEEPSEEK_V2,
    of_models.DEEPSEEK_V3,
    of_models.DEEPSEEK_V32,
    of_models.MAMBA2,
    of_models.GRANITE,
    of_models.QWEN3_NEXT,
    of_models.QWEN3_5_MOE,
    of_models.NEMOTRON_H,
    {
        "architectures": ["Qwen2ForCausalLM"],
        "sliding_window": 8,
        "max_window_layers": 1,
        "use_sliding_window": True,
    },
]


@settings(max_examples=100)
@given(
    family=st.sampled_from(FAMILIES),
    changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3),
)
@example(family=of_models.GEMMA3, changes={"layer_types": [[], None]})
def test_any_value_of_any_field_is_parsed_or_refused_by_name(
    family: dict[str, Any], changes: dict[str, Any]
) -> None:
    try:
        parse_architecture(of_models.with_fields(**{**family, **changes}))
    except UserError as error:
        assert error.field is not None  # noqa: PT017  Both ways out are right.
