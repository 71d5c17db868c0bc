"""Loads a rank's parameters from a checkpoint folder, and checks that every tensor fits.

Only the rank's slice of a tensor is read. A tensor that is missing, has another shape, or is left over (a
bias that the architecture does not have) raises UserError, because a model with wrong tensors would answer
wrongly without any error.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from baton.checkpoints.architecture import MAX_LAYERS, MlpNames
from baton.checkpoints.checkpoint import read_json, weight_files
from baton.checkpoints.config_fields import positive
from baton.checkpoints.latent_config import IndexShape
from baton.core.errors import UserError
from baton.core.layout import kv_heads_of
from baton.engine.models.decoder import Attention, Decoder, Mlp
from baton.engine.models.experts import MixtureOfExperts
from baton.engine.models.gated_delta import GatedDeltaMixer
from baton.engine.models.indexer import Indexer
from baton.engine.models.latent_attention import LatentAttention
from baton.engine.models.layers import PackedLinear, RowParallelLinear
from baton.engine.models.mamba2 import Mamba2Mixer
from baton.engine.models.state_mixer import StateMixer

_RECOMPUTED = ".rotary_emb.inv_freq"  # Tensor of old checkpoints; config.json determines it.
_STORED_DTYPES = ("F64", "F32", "BF16", "F16")  # Codes of quantised weights would be taken for numbers.
_DRAFTS = "mtp."  # Layers that guess several tokens. The engine does not run them.


class _Target(NamedTuple):
    """`rows` and `columns` of the checkpoint's tensor `name` are copied to `destination`.

    If the tensor has one matrix per expert, this applies to each of the `matrices`.
    """

    name: str
    shape: tuple[int, ...]  # Shape of the whole tensor, according to config.json.
    destination: torch.Tensor
    rows: slice = slice(None)
    columns: slice = slice(None)
    matrices: slice = slice(None)


def load_weights(model: Decoder, folder: str | Path) -> None:
    """Load all weights and seal the model. Raises UserError if folder and architecture do not match."""
    fill_weights(model, folder)
    model.seal()


def fill_weights(model: Decoder, folder: str | Path) -> None:
    """Load all weights without sealing, so that they can be read."""
    targets = list(_targets(model))
    with ExitStack() as stack:
        home: dict[str, Any] = {}
        for path in weight_files(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except SafetensorError as error:
                raise UserError(f"{path.name} is damaged: {error}", field="model") from error
            home.update(dict.fromkeys(file.keys(), file))
        drafting = _drafting_layers(model, folder)
        described = {name: file for name, file in home.items() if not name.startswith(drafting)}
        _check_names(described, targets, tied=model.architecture.tie_word_embeddings)
        for target in targets:
            stored = home[target.name].get_slice(target.name)
            _fill(target, stored)
            model.stored_dtypes[target.name] = stored.get_dtype()


def _drafting_layers(model: Decoder, folder: str | Path) -> tuple[str, ...]:
    """Prefixes of the layers after the model's, which predict further tokens and are not used."""
    config, first = read_json(Path(folder) / "config.json"), model.architecture.num_layers
    num_drafting = positive(config, "num_nextn_predict_layers", default=0, minimum=0, maximum=MAX_LAYERS)
    return tuple(f"model.layers.{layer}." for layer in range(first, first + num_drafting))


def _check_names(home: dict[str, Any], targets: list[_Target], *, tied: bool) -> None:
    wanted = {target.name for target in targets}
    if missing := sorted(wanted - home.keys()):
        raise UserError(f"the checkpoint lacks {_some(missing)}", field="model")
    ignored = {"lm_head.weight"} if tied else set()
    left_over = sorted(
        name
        for name in home.keys() - wanted - ignored
        if not (name.endswith(_RECOMPUTED) or name.startswith(_DRAFTS))
    )
    if left_over:
        raise UserError(
            f"the checkpoint has {_some(left_over)}, which its config.json does not describe", field="model"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _fill(target: _Target, stored: Any) -> None:
    shape = tuple(stored.get_shape())
    if shape != target.shape:
        raise UserError(
            f"{target.name} has shape {list(shape)}, config.json requires {list(target.shape)}", field="model"
        )
    if (dtype := stored.get_dtype()) not in _STORED_DTYPES:
        raise UserError(
            f"{target.name} has the dtype {dtype}; must be {', '.join(_STORED_DTYPES)}: quantised weights "
            "are not supported",
            field="model",
        )
    index = (
        (target.rows,) if len(shape) == 1 else (target.matrices, target.rows, target.columns)[-len(shape) :]
    )
    piece = stored[index]
    assert piece.shape == target.destination.shape
    target.destination.copy_(piece)


def _targets(model: Decoder) -> Iterator[_Target]:
    a = model.architecture
    norm, vocabulary = (a.hidden_size,), (a.vocab_size, a.hidden_size)
    names = a.names
    yield _Target(f"{names.root}.{names.embedding}.weight", vocabulary, model.embedding)
    if not a.tie_word_embeddings:
        yield _Target("lm_head.weight", vocabulary, model.head)
    yield _Target(f"{names.root}.{names.norm}.weight", norm, model.norm.weight)
    for index, layer in enumerate(model.layers):
        prefix, of_mlp = a.tensor_prefixes(index)
        yield _Target(f"{prefix}.{names.input_norm}.weight", norm, layer.input_norm.weight)
        if isinstance(layer.attention, StateMixer):
            yield from _mixer_targets(model, layer.attention, f"{prefix}.{names.mixer}")
        elif isinstance(layer.attention, LatentAttention):
            yield from _latent_attention_targets(model, layer.attention, f"{prefix}.{names.attention}")
        else:
            yield from _attention_targets(model, layer.attention, f"{prefix}.{names.attention}")
        if layer.post_norm is None or layer.mlp is None:
            continue
        if layer.attended_norm is None or layer.mlp_norm is None:
            yield _Target(f"{of_mlp}.{names.post_norm}.weight", norm, layer.post_norm.weight)
        else:
            yield _Target(f"{prefix}.post_attention_layernorm.weight", norm, layer.attended_norm.weight)
            yield _Target(f"{prefix}.pre_feedforward_layernorm.weight", norm, layer.post_norm.weight)
            yield _Target(f"{prefix}.post_feedforward_layernorm.weight", norm, layer.mlp_norm.weight)
        if isinstance(layer.mlp, MixtureOfExperts):
            yield from _expert_targets(model, layer.mlp, prefix)
        else:
            yield from _mlp_targets(model, layer.mlp, of_mlp, names.mlp)
        if layer.shared_mlp is not None:
            yield from _mlp_targets(model, layer.shared_mlp, prefix, names.shared_mlp)
        if layer.shared_gate is not None:
            gate = f"{prefix}.{names.shared_mlp.block}_gate.weight"
            yield _Target(gate, (1, a.hidden_size), layer.shared_gate)


def _attention_targets(model: Decoder, attention: Attention, prefix: str) -> Iterator[_Target]:
    a, group = model.architecture, model.group
    heads = a.num_heads // group.size
    kv_heads = kv_heads_of(group.rank, tp_size=group.size, num_kv_heads=a.num_kv_heads)
    num_queries, num_keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    query = slice(group.rank * heads * a.head_dim, (group.rank + 1) * heads * a.head_dim)
    key = slice(kv_heads.start * a.head_dim, kv_heads.stop * a.head_dim)
    if attention.has_gate:
        yield from _gated_query_targets(model, attention, f"{prefix}.q_proj")
    else:
        yield from _packed(attention.qkv, _Part(f"{prefix}.q_proj", num_queries, query))
    keys, values = _Part(f"{prefix}.k_proj", num_keys, key), _Part(f"{prefix}.v_proj", num_keys, key)
    yield from _packed(attention.qkv, keys, values, first=1)
    yield from _row_parallel(attention.output, f"{prefix}.o_proj", num_queries, query)
    if attention.sinks is not None:
        mine = slice(group.rank * heads, (group.rank + 1) * heads)
        yield _Target(f"{prefix}.sinks", (a.num_heads,), attention.sinks, mine)
    if attention.qk_norm is not None:
        # One norm for all heads of a kind, stored once per head: see Attention.
        for row in range(len(attention.qk_norm)):
            kind = "q_norm" if row < heads else "k_norm"
            yield _Target(f"{prefix}.{kind}.weight", (a.head_dim,), attention.qk_norm[row])


def _latent_attention_targets(model: Decoder, attention: LatentAttention, prefix: str) -> Iterator[_Target]:
    """This rank has the rows of its query heads, and all rows of the latents' projections and norms."""
    a, group = model.architecture, model.group
    assert a.latent is not None
    latent, heads = a.latent, a.num_heads // group.size

    def mine(size: int) -> slice:
        return slice(group.rank * heads * size, (group.rank + 1) * heads * size)

    queries, rank = a.num_heads * latent.qk_head_dim, latent.q_lora_rank
    expanded = latent.qk_nope_head_dim + latent.v_head_dim
    of_queries = mine(latent.qk_head_dim)
    slot = _Part(f"{prefix}.kv_a_proj_with_mqa", latent.slot_size, slice(None))
    if attention.query_norm is None or attention.query_up is None or rank is None:
        yield from _packed(attention.down, _Part(f"{prefix}.q_proj", queries, of_queries), slot)
    else:
        yield from _packed(attention.down, _Part(f"{prefix}.q_a_proj", rank, slice(None)), slot)
        yield _Target(f"{prefix}.q_a_layernorm.weight", (rank,), attention.query_norm.weight)
        yield from _packed(attention.query_up, _Part(f"{prefix}.q_b_proj", queries, of_queries))
    if attention.indexer is not None and latent.index is not None:
        yield from _indexer_targets(attention.indexer, latent.index, f"{prefix}.indexer")
    yield _Target(f"{prefix}.kv_a_layernorm.weight", (latent.kv_lora_rank,), attention.norm.weight)
    shape = (a.num_heads * expanded, latent.kv_lora_rank)
    yield _Target(f"{prefix}.kv_b_proj.weight", shape, attention.up.flatten(0, 1), mine(expanded))
    num_values = a.num_heads * latent.v_head_dim
    yield from _row_parallel(attention.output, f"{prefix}.o_proj", num_values, mine(latent.v_head_dim))


def _indexer_targets(indexer: Indexer, shape: IndexShape, prefix: str) -> Iterator[_Target]:
    queries, everything = shape.num_heads * shape.head_dim, slice(None)
    yield from _packed(indexer.query, _Part(f"{prefix}.wq_b", queries, everything))
    yield from _packed(
        indexer.key_and_weights,
        _Part(f"{prefix}.wk", shape.head_dim, everything),
        _Part(f"{prefix}.weights_proj", shape.num_heads, everything),
    )
    yield _Target(f"{prefix}.k_norm.weight", (shape.head_dim,), indexer.norm_weight)
    yield _Target(f"{prefix}.k_norm.bias", (shape.head_dim,), indexer.norm_bias)


def _gated_query_targets(model: Decoder, attention: Attention, name: str) -> Iterator[_Target]:
    """Targets of queries and gates, which alternate in the checkpoint: each head has the rows of both."""
    a, group = model.architecture, model.group
    heads = kv_heads_of(group.rank, tp_size=group.size, num_kv_heads=a.num_heads)
    wanted: list[tuple[str, tuple[int, ...], tuple[torch.Tensor, ...]]] = [
        ("weight", (a.hidden_size,), attention.qkv.weight_parts())
    ]
    if attention.qkv.bias is not None:
        wanted.append(("bias", (), attention.qkv.bias_parts()))
    for kind, inputs, (queries, _, _, gates) in wanted:
        for place, head in enumerate(heads):
            for row, destination in ((2 * head, queries), (2 * head + 1, gates)):
                yield _Target(
                    f"{name}.{kind}",
                    (2 * a.num_heads * a.head_dim, *inputs),
                    destination[_rows_of(range(place, place + 1), a.head_dim)],
                    _rows_of(range(row, row + 1), a.head_dim),
                )


def _mlp_targets(model: Decoder, mlp: Mlp, prefix: str, names: MlpNames) -> Iterator[_Target]:
    total, prefix = mlp.inner_size, f"{prefix}.{names.block}"
    wide = total // model.group.size
    mine = slice(model.group.rank * wide, (model.group.rank + 1) * wide)
    gate, up = _Part(f"{prefix}.{names.gate}", total, mine), _Part(f"{prefix}.{names.up}", total, mine)
    if gate == up:
        gate, up = _stacked(gate.name, gate, up)
    yield from _packed(mlp.gate_up, *((gate, up) if mlp.has_gate else (up,)))
    yield from _row_parallel(mlp.down, f"{prefix}.{names.down}", total, mine)


def _expert_targets(model: Decoder, mlp: MixtureOfExperts, prefix: str) -> Iterator[_Target]:
    a, group = model.architecture, model.group
    assert a.experts is not None
    num, hidden, total = a.experts.num_experts, a.hidden_size, a.expert_size
    wide = total // group.size
    mine = slice(group.rank * wide, (group.rank + 1) * wide)
    if mlp.router_bias is None or mlp.gate_up_bias is None or mlp.down_bias is None:
        names = a.names.experts
        block = f"{prefix}.{names.block}"
        yield _Target(f"{block}.{names.router}.weight", (num, hidden), mlp.router)
        if names.is_stacked:
            gates, ups = mlp.gate_up.chunk(2, dim=1)
            stack, above = (num, 2 * total, hidden), slice(total + mine.start, total + mine.stop)
            yield _Target(f"{block}.{names.gate}.weight", stack, gates, mine)
            yield _Target(f"{block}.{names.up}.weight", stack, ups, above)
            yield _Target(f"{block}.{names.down}.weight", (num, hidden, total), mlp.down, columns=mine)
            return
        for expert in range(num):
            own = f"{block}.experts.{expert}"
            gate, up = mlp.gate_up[expert].chunk(2)
            yield _Target(f"{own}.{names.gate}.weight", (total, hidden), gate, mine)
            yield _Target(f"{own}.{names.up}.weight", (total, hidden), up, mine)
            yield _Target(f"{own}.{names.down}.weight", (hidden, total), mlp.down[expert], columns=mine)
        if mlp.choice_bias is not None:
            yield _Target(f"{prefix}.{names.block}.gate.e_score_correction_bias", (num,), mlp.choice_bias)
        return
    # GPT-OSS stores expert matrices as `[inputs, outputs]`, with gate and up in alternating columns.
    both = slice(2 * mine.start, 2 * mine.stop)
    prefix = f"{prefix}.mlp"
    experts = f"{prefix}.experts"
    yield _Target(f"{prefix}.router.weight", (num, hidden), mlp.router)
    yield _Target(f"{prefix}.router.bias", (num,), mlp.router_bias)
    gate_up, down = mlp.gate_up.transpose(1, 2), mlp.down.transpose(1, 2)
    yield _Target(f"{experts}.gate_up_proj", (num, hidden, 2 * total), gate_up, columns=both)
    yield _Target(f"{experts}.gate_up_proj_bias", (num, 2 * total), mlp.gate_up_bias, columns=both)
    yield _Target(f"{experts}.down_proj", (num, total, hidden), down, mine)
    yield _Target(f"{experts}.down_proj_bias", (num, hidden), mlp.down_bias)


def _mixer_targets(model: Decoder, mixer: StateMixer, prefix: str) -> Iterator[_Target]:
    if isinstance(mixer, Mamba2Mixer):
        yield from _mamba2_targets(model, mixer, prefix)
    if isinstance(mixer, GatedDeltaMixer):
        yield from _gated_delta_targets(model, mixer, prefix)


def _mamba2_targets(model: Decoder, mixer: Mamba2Mixer, prefix: str) -> Iterator[_Target]:
    """Targets of a mixer, whose projection and convolution have the rows of several vectors."""
    state, group = mixer.state, model.group
    heads = kv_heads_of(group.rank, tp_size=group.size, num_kv_heads=state.num_heads)
    groups = kv_heads_of(group.rank, tp_size=group.size, num_kv_heads=state.num_groups)
    inner, of_groups = state.inner_size, state.num_groups * state.state_size
    mine = _rows_of(heads, state.head_dim)
    x, b, c = (
        _Part(f"{prefix}.conv1d", size, rows)
        for size, rows in (
            (inner, mine),
            (of_groups, _rows_of(groups, state.state_size)),
            (of_groups, _rows_of(groups, state.state_size)),
        )
    )
    yield from _stacked_conv(mixer, x, b, c)
    gate, steps = _Part("", inner, mine), _Part("", state.num_heads, _rows_of(heads, 1))
    yield from _packed(mixer.input, *_stacked(f"{prefix}.in_proj", gate, x, b, c, steps))
    yield from _row_parallel(mixer.output, f"{prefix}.out_proj", inner, mine)
    yield _Target(f"{prefix}.norm.weight", (inner,), mixer.norm, mine)
    for name, parameter in (("A_log", mixer.a_log), ("D", mixer.skip), ("dt_bias", mixer.step_bias)):
        yield _Target(f"{prefix}.{name}", (state.num_heads,), parameter, _rows_of(heads, 1))


def _gated_delta_targets(model: Decoder, mixer: GatedDeltaMixer, prefix: str) -> Iterator[_Target]:
    """Targets of a mixer. Its two projections have, for each key head, the rows of all that belongs to it."""
    state, group = mixer.state, model.group
    keys = kv_heads_of(group.rank, tp_size=group.size, num_kv_heads=state.num_key_heads)
    values = kv_heads_of(group.rank, tp_size=group.size, num_kv_heads=state.num_value_heads)
    key_dim, value_dim, total = state.key_dim, state.value_dim, state.num_value_heads
    of_keys, in_group = state.num_key_heads * key_dim, total // state.num_key_heads
    mine = _rows_of(values, value_dim)
    some_keys = _Part(f"{prefix}.conv1d", of_keys, _rows_of(keys, key_dim))
    some_values = _Part(f"{prefix}.conv1d", total * value_dim, mine)
    yield from _stacked_conv(mixer, some_keys, some_keys, some_values)
    yield from _row_parallel(mixer.output, f"{prefix}.out_proj", total * value_dim, mine)
    yield _Target(f"{prefix}.norm.weight", (value_dim,), mixer.norm)
    for name, parameter in (("A_log", mixer.a_log), ("dt_bias", mixer.step_bias)):
        yield _Target(f"{prefix}.{name}", (total,), parameter, _rows_of(values, 1))
    if model.architecture.names.are_inputs_split:
        yield from _packed(
            mixer.input,
            *_stacked(f"{prefix}.in_proj_qkv", some_keys, some_keys, some_values),
            _Part(f"{prefix}.in_proj_z", total * value_dim, mine),
            _Part(f"{prefix}.in_proj_b", total, _rows_of(values, 1)),
            _Part(f"{prefix}.in_proj_a", total, _rows_of(values, 1)),
        )
        return
    q, k, v, gate, rate, step = mixer.input.weight_parts()
    hidden = mixer.input.weight.shape[1]
    of_group = 2 * key_dim + 2 * in_group * value_dim

    def wide(destination: torch.Tensor, place: int, start: int, size: int) -> _Target:
        shape, rows = (state.num_key_heads * of_group, hidden), slice(start, start + size)
        own = destination[place * size : (place + 1) * size]
        return _Target(f"{prefix}.in_proj_qkvz.weight", shape, own, rows)

    def narrow(destination: torch.Tensor, place: int, row: int) -> _Target:
        own, rows = destination[place : place + 1], slice(row, row + 1)
        return _Target(f"{prefix}.in_proj_ba.weight", (2 * total, hidden), own, rows)

    for place, key in enumerate(keys):
        yield wide(q, place, key * of_group, key_dim)
        yield wide(k, place, key * of_group + key_dim, key_dim)
    for place, value in enumerate(values):
        key, in_key = divmod(value, in_group)
        start = key * of_group + 2 * key_dim + in_key * value_dim
        yield wide(v, place, start, value_dim)
        yield wide(gate, place, start + in_group * value_dim, value_dim)
        yield narrow(rate, place, 2 * key * in_group + in_key)
        yield narrow(step, place, (2 * key + 1) * in_group + in_key)


def _rows_of(units: range, size: int) -> slice:
    return slice(units.start * size, units.stop * size)


def _stacked(name: str, *parts: "_Part") -> Iterator["_Part"]:
    """The parts where the tensor `name` has the rows of all of them, one after the other."""
    start, total = 0, sum(part.num_rows for part in parts)
    for part in parts:
        yield _Part(name, total, slice(part.rows.start + start, part.rows.stop + start))
        start += part.num_rows


def _stacked_conv(mixer: StateMixer, *parts: "_Part") -> Iterator[_Target]:
    """Targets of the convolution, `[channels, 1, kernel]`."""
    kernel, start = mixer.conv.shape[-1], 0
    for part in _stacked(parts[0].name, *parts):
        mine = slice(start, start + part.rows.stop - part.rows.start)
        start = mine.stop
        shape = (part.num_rows, 1, kernel)
        yield _Target(f"{part.name}.weight", shape, mixer.conv[mine], matrices=part.rows)
        if mixer.conv_bias is not None:
            yield _Target(f"{part.name}.bias", (part.num_rows,), mixer.conv_bias[mine], part.rows)


class _Part(NamedTuple):
    """One projection of a packed linear: this rank has `rows` of its `num_rows` outputs."""

    name: str
    num_rows: int
    rows: slice


def _packed(linear: PackedLinear, *parts: _Part, first: int = 0) -> Iterator[_Target]:
    """Targets of the projections from the one with index `first` on."""
    num_inputs, those = linear.weight.shape[1], slice(first, first + len(parts))
    for part, weight in zip(parts, linear.weight_parts()[those], strict=True):
        yield _Target(f"{part.name}.weight", (part.num_rows, num_inputs), weight, part.rows)
    if linear.bias is not None:
        for part, bias in zip(parts, linear.bias_parts()[those], strict=True):
            yield _Target(f"{part.name}.bias", (part.num_rows,), bias, part.rows)


def _row_parallel(linear: RowParallelLinear, name: str, num_inputs: int, mine: slice) -> Iterator[_Target]:
    """Targets of a row-parallel layer: this rank's columns `mine` of `num_inputs`, and the whole bias."""
    num_outputs = len(linear.weight)
    yield _Target(f"{name}.weight", (num_outputs, num_inputs), linear.weight, columns=mine)
    if linear.bias is not None:
        yield _Target(f"{name}.bias", (num_outputs,), linear.bias)
