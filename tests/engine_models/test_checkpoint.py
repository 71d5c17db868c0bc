"""Model folders: reading, refusal of faulty ones, and properties of written ones."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.checkpoints.checkpoint import load_model_config, weight_files, weights_digest
from baton.checkpoints.random_model import write_checkpoint
from baton.core.errors import UserError
from baton.engine.models import build_model, load_weights
from baton.engine.models.loading import fill_weights
from tests.engine_models.paged import PagedModel, prompt_of

TINY: dict[str, Any] = {
    "hidden": 32,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "vocab": 512,
    "max_position": 256,
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("written"), **TINY)


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "model"))


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_the_folder_is_read_into_a_configuration(folder: Path) -> None:
    config = load_model_config(folder)
    assert config.served_model_name == "model"
    assert (config.dtype, config.max_model_len, config.vocab_size) == ("float32", 256, 512)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_kv_heads) == (2, 2, 1)
    assert (config.hidden_size, config.head_dim) == (32, 16)
    assert config.eos_token_ids == (2, 0)
    assert config.bos_token_id is None
    assert config.hf_config == json.loads((folder / "config.json").read_text())


def test_limits_and_types_may_be_chosen(folder: Path) -> None:
    config = load_model_config(folder, dtype="bfloat16", max_model_len=100, served_model_name="m")
    assert (config.dtype, config.max_model_len, config.served_model_name) == ("bfloat16", 100, "m")


def test_a_model_without_positions_may_name_no_limit(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, family="mamba2", **TINY)
    edit(folder / "config.json", max_position_embeddings=None)
    assert load_model_config(folder).max_model_len == 2048
    assert load_model_config(folder, max_model_len=100_000).max_model_len == 100_000
    with pytest.raises(UserError) as caught:
        load_model_config(folder, max_model_len=1 << 30)
    assert caught.value.field == "max_model_len"


def test_a_time_step_limit_may_be_infinite_as_python_writes_it(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, family="mamba2", **TINY)
    plain = load_model_config(folder)
    edit(folder / "config.json", time_step_limit=[0.0, float("inf")])
    assert "Infinity" in (folder / "config.json").read_text()
    assert load_model_config(folder).architecture_digest == plain.architecture_digest
    (folder / "config.json").write_text("[Infinity]")
    with pytest.raises(UserError) as caught:
        load_model_config(folder)
    assert caught.value.field == "config.json"


def test_eos_ids_fall_back_to_config_json(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert load_model_config(folder).eos_token_ids == (2,)
    edit(folder / "config.json", eos_token_id=None)
    assert load_model_config(folder).eos_token_ids == ()


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"dtype": "int8"}, "dtype"),
        ({"max_model_len": 257}, "max_model_len"),
        ({"max_model_len": 0}, "max_model_len"),
    ],
)
def test_a_bad_choice_is_refused(folder: Path, arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError) as caught:
        load_model_config(folder, **arguments)
    assert caught.value.field == field


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a folder"):
        load_model_config(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"config\.json is missing"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: is not a JSON object"):
        load_model_config(tmp_path)


def test_missing_weights_are_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"neither model\.safetensors nor"):
        load_model_config(folder)


def test_an_index_cannot_name_files_elsewhere(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="not in"):
        weight_files(folder)


def test_one_changed_weight_changes_the_digest(folder: Path) -> None:
    before = weights_digest(folder)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert weights_digest(folder) != before


def test_the_same_arguments_write_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    again = write_checkpoint(tmp_path / "again", **TINY)
    other = write_checkpoint(tmp_path / "other", **TINY, seed=1)
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    assert all((folder / name).read_bytes() == (again / name).read_bytes() for name in names)
    assert weights_digest(other) != weights_digest(folder)


def test_shards_hold_what_one_file_holds(folder: Path, tmp_path: Path) -> None:
    sharded = write_checkpoint(tmp_path / "sharded", **TINY, shard_bytes=40_000)
    assert len(weight_files(sharded)) > 2
    whole, parts = (build_model(load_model_config(path)) for path in (folder, sharded))
    fill_weights(whole, folder)
    fill_weights(parts, sharded)
    for (name, one), other in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert one.equal(other), name


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"family": "gpt2"}, "family"),
        ({"dtype": "int8"}, "dtype"),
        ({"vocab": 100}, "vocab"),
        ({"layers": 0}, "layers"),
        ({"rope_scaling": "longrope"}, "rope_scaling"),
        ({"family": "mamba2", "rope_scaling": "yarn"}, "rope_scaling"),
        ({"family": "granite_hybrid", "sliding_window": 8}, "sliding_window"),
        ({"family": "mamba2", "heads": 3, "kv_heads": 1}, "config.json: head_dim"),
        ({"family": "llama", "sliding_window": 8}, "sliding_window"),
        ({"heads": 3, "kv_heads": 2}, "config.json: num_key_value_heads"),
    ],
)
def test_an_invalid_checkpoint_is_not_written(tmp_path: Path, arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError) as caught:
        write_checkpoint(tmp_path / "model", **{**TINY, **arguments})
    assert caught.value.field == field
    assert not (tmp_path / "model" / "config.json").exists()


def test_weights_that_do_not_fit_the_configuration_are_refused(folder: Path) -> None:
    def load(**fields: Any) -> None:
        edit(folder / "config.json", **fields)
        load_weights(build_model(load_model_config(folder)), folder)

    load()
    with pytest.raises(UserError, match=r"lacks model\.layers\.2\..* and \d+ more"):
        load(num_hidden_layers=3)
    with pytest.raises(UserError, match=r"has model\.layers\.1\..* not describe"):
        load(num_hidden_layers=1)
    with pytest.raises(UserError, match=r"has shape \[96, 32\]"):
        load(num_hidden_layers=2, intermediate_size=80)


def test_weights_that_are_no_floating_point_numbers_are_refused(folder: Path) -> None:
    path, name = folder / "model.safetensors", "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(path)
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, path)
    with pytest.raises(UserError, match=rf"{name} has the dtype F8_E4M3; must be F64, .* are not supported"):
        load_weights(build_model(load_model_config(folder)), folder)


def test_layers_that_predict_further_tokens_are_left_out(folder: Path) -> None:
    edit(folder / "config.json", num_hidden_layers=1, num_nextn_predict_layers=1)
    load_weights(build_model(load_model_config(folder)), folder)
    edit(folder / "config.json", num_nextn_predict_layers="1")
    with pytest.raises(UserError, match="num_nextn_predict_layers"):
        load_weights(build_model(load_model_config(folder)), folder)


def test_a_damaged_weight_file_is_named(folder: Path) -> None:
    config = load_model_config(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        load_weights(build_model(config), folder)


def test_bfloat16_weights_are_read_into_any_type(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", **TINY, dtype="bfloat16")
    assert load_model_config(folder).dtype == "bfloat16"
    prompt = [token % 500 for token in prompt_of(3, 40)]
    wide = PagedModel(load_model_config(folder, dtype="float32")).step([(prompt, 0, list(range(5)))])
    for dtype in ("auto", "float16"):
        logits = PagedModel(load_model_config(folder, dtype=dtype)).step([(prompt, 0, list(range(5)))])
        assert logits.dtype == wide.dtype
        assert (logits - wide).abs().mean() < 0.1 * wide.std()
