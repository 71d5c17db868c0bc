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

from baton.core.errors import UserError
from baton.core.layout import kv_heads_of
from baton.engine.checkpoints.architecture import EXPERT_NAMES, MAX_LAYERS
from baton.engine.checkpoints.checkpoint import read_json, weight_files
from baton.engine.checkpoints.config_fields import positive
from baton.engine.checkpoints.latent_config import IndexShape
from baton.engine.models.decoder import Attention, Decoder, Mlp
from baton.engine.models.experts import MixtureOfExperts
from baton.engine.models.indexer import Indexer
from baton.engine.models.latent_attention import LatentAttention
from baton.engine.models.layers import PackedLinear, RowParallelLinear

_RECOMPUTED = ".rotary_emb.inv_freq"  # In old checkpoints; config.json determines it.


class _Target(NamedTuple):
    """`rows` and `columns` of the checkpoint's tensor `name` are copied to `destination`.

    If the tensor has one matrix per expert, this applies to each of them.
    """

    name: str
    shape: tuple[int, ...]  # Of the whole tensor, according to config.json.
    destination: torch.Tensor
    rows: slice = slice(None)
    columns: slice = slice(None)


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
            _fill(target, home[target.name].get_slice(target.name))


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
    left_over = sorted(name for name in home.keys() - wanted - ignored if not name.endswith(_RECOMPUTED))
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
    index = (target.rows,) if len(shape) == 1 else (slice(None), target.rows, target.columns)[-len(shape) :]
    piece = stored[index]
    assert piece.shape == target.destination.shape
    target.destination.copy_(piece)


def _targets(model: Decoder) -> Iterator[_Target]:
    a = model.architecture
    norm, vocabulary = (a.hidden_size,), (a.vocab_size, a.hidden_size)
    yield _Target("model.embed_tokens.weight", vocabulary, model.embedding)
    if not a.tie_word_embeddings:
        yield _Target("lm_head.weight", vocabulary, model.head)
    yield _Target("model.norm.weight", norm, model.norm.weight)
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}"
        yield _Target(f"{prefix}.input_layernorm.weight", norm, layer.input_norm.weight)
        if layer.attended_norm is None or layer.mlp_norm is None:
            yield _Target(f"{prefix}.post_attention_layernorm.weight", norm, layer.post_norm.weight)
        else:
            yield _Target(f"{prefix}.post_attention_layernorm.weight", norm, layer.attended_norm.weight)
            yield _Target(f"{prefix}.pre_feedforward_layernorm.weight", norm, layer.post_norm.weight)
            yield _Target(f"{prefix}.post_feedforward_layernorm.weight", norm, layer.mlp_norm.weight)
        if isinstance(layer.attention, LatentAttention):
            yield from _latent_attention_targets(model, layer.attention, f"{prefix}.self_attn")
        else:
            yield from _attention_targets(model, layer.attention, f"{prefix}.self_attn")
        if isinstance(layer.mlp, MixtureOfExperts):
            yield from _expert_targets(model, layer.mlp, prefix)
        else:
            yield from _mlp_targets(model, layer.mlp, f"{prefix}.mlp")
        if layer.shared_mlp is not None:
            yield from _mlp_targets(model, layer.shared_mlp, f"{prefix}.mlp.shared_experts")


def _attention_targets(model: Decoder, attention: Attention, prefix: str) -> Iterator[_Target]:
    a, group = model.architecture, model.group
    heads = a.num_heads // group.size
    kv_heads = kv_heads_of(group.rank, tp_size=group.size, num_kv_heads=a.num_kv_heads)
    num_queries, num_keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    query = slice(group.rank * heads * a.head_dim, (group.rank + 1) * heads * a.head_dim)
    key = slice(kv_heads.start * a.head_dim, kv_heads.stop * a.head_dim)
    yield from _packed(
        attention.qkv,
        _Part(f"{prefix}.q_proj", num_queries, query),
        _Part(f"{prefix}.k_proj", num_keys, key),
        _Part(f"{prefix}.v_proj", num_keys, key),
    )
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


def _mlp_targets(model: Decoder, mlp: Mlp, prefix: str) -> Iterator[_Target]:
    total = mlp.inner_size
    wide = total // model.group.size
    mine = slice(model.group.rank * wide, (model.group.rank + 1) * wide)
    yield from _packed(
        mlp.gate_up, _Part(f"{prefix}.gate_proj", total, mine), _Part(f"{prefix}.up_proj", total, mine)
    )
    yield from _row_parallel(mlp.down, f"{prefix}.down_proj", total, mine)


def _expert_targets(model: Decoder, mlp: MixtureOfExperts, prefix: str) -> Iterator[_Target]:
    a, group = model.architecture, model.group
    assert a.experts is not None
    num, hidden, total = a.experts.num_experts, a.hidden_size, a.expert_size
    wide = total // group.size
    mine = slice(group.rank * wide, (group.rank + 1) * wide)
    if mlp.router_bias is None or mlp.gate_up_bias is None or mlp.down_bias is None:
        names = EXPERT_NAMES[a.family]
        yield _Target(f"{prefix}.{names.block}.gate.weight", (num, hidden), mlp.router)
        for expert in range(num):
            own = f"{prefix}.{names.block}.experts.{expert}"
            gate, up = mlp.gate_up[expert].chunk(2)
            yield _Target(f"{own}.{names.gate}.weight", (total, hidden), gate, mine)
            yield _Target(f"{own}.{names.up}.weight", (total, hidden), up, mine)
            yield _Target(f"{own}.{names.down}.weight", (hidden, total), mlp.down[expert], columns=mine)
        if mlp.choice_bias is not None:
            yield _Target(f"{prefix}.{names.block}.gate.e_score_correction_bias", (num,), mlp.choice_bias)
        return
    # Of GPT-OSS the expert matrices are `[inputs, outputs]`, with gate and up in alternating columns.
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


class _Part(NamedTuple):
    """One projection of a packed linear: this rank has `rows` of its `num_rows` outputs."""

    name: str
    num_rows: int
    rows: slice


def _packed(linear: PackedLinear, *parts: _Part) -> Iterator[_Target]:
    num_inputs = linear.weight.shape[1]
    for part, weight in zip(parts, linear.weight_parts(), strict=True):
        yield _Target(f"{part.name}.weight", (part.num_rows, num_inputs), weight, part.rows)
    if linear.bias is not None:
        for part, bias in zip(parts, linear.bias_parts(), strict=True):
            yield _Target(f"{part.name}.bias", (part.num_rows,), bias, part.rows)


def _row_parallel(linear: RowParallelLinear, name: str, num_inputs: int, mine: slice) -> Iterator[_Target]:
    """Targets of a row-parallel layer: this rank's columns `mine` of `num_inputs`, and the whole bias."""
    num_outputs = len(linear.weight)
    yield _Target(f"{name}.weight", (num_outputs, num_inputs), linear.weight, columns=mine)
    if linear.bias is not None:
        yield _Target(f"{name}.bias", (num_outputs,), linear.bias)
