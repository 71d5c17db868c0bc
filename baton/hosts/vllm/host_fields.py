"""All of vLLM's configuration for the identity of KV, but for the rows of host_fields.toml.

    EXCLUDED   field -> why it cannot change the numbers in the KV cache
    NEUTRAL    field -> the values with which vLLM computes what Baton's other engines compute, and why
    COMPARED   field -> why it is compared; to tell known fields from those of a new vLLM

Fields are called "section.name", see there.
"""

from __future__ import annotations

import dataclasses
import enum
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import msgspec

from baton.checkpoints.architecture import DecoderArchitecture
from baton.checkpoints.families import FAMILIES, parse_architecture
from baton.core.errors import UserError

_TABLES: Final[dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


class Neutral(NamedTuple):
    reason: str
    values: tuple[str, ...] = ()  # Values in JSON.
    when: str = ""  # The rule by which other values are neutral; see `_RULES`.


def _rows(kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for table in _TABLES[kind]:
        for section in table.keys() - {"reason", "values", "when"}:
            for name in table[section].split():
                yield f"{section}.{name}", table


EXCLUDED: Final = {name: str(table["reason"]) for name, table in _rows("excluded")}
COMPARED: Final = {name: str(table["reason"]) for name, table in _rows("compared")}
NEUTRAL: Final = {
    name: Neutral(table["reason"], tuple(table.get("values", ())), table.get("when", ""))
    for name, table in _rows("neutral")
}
ROPES: Final = frozenset(_TABLES["length"]["rope_types"].split())
LENGTH_IS_A_LIMIT: Final = frozenset(_TABLES["length"]["architectures"].split())


class _Model(NamedTuple):
    """The model whose fields are compared."""

    config: Mapping[str, Any] = {}  # config.json after all overrides.
    dtype: str = ""
    architecture: DecoderArchitecture | None = None  # Result of Baton's parser; None: an unknown family.


_Rule = Callable[[Any, _Model, Any], bool]  # The third: the architecture; None only outside of hf_config.
_RULES: Final[Mapping[str, _Rule]] = {
    "always": lambda value, model, read: True,
    "no layer reads the length": lambda value, model, read: (
        _has_known_ropes(model.config)
        and LENGTH_IS_A_LIMIT.issuperset(model.config.get("architectures") or ["unknown"])
    ),
    "rotary embeddings are of known kinds": lambda value, model, read: _has_known_ropes(model.config),
    "a class of vLLM's": lambda value, model, read: value == "auto" or str(value).startswith("vllm."),
    "the model's dtype": lambda value, model, read: value in ("auto", model.dtype),
    "the family's model_type": lambda value, model, read: (
        value == (FAMILIES[read.family].model_type or read.family)
    ),
    "no windows": lambda value, model, read: not any(read.windows),
    "layer_types are listed": lambda value, model, read: bool(model.config.get("layer_types")),
    "layer_types equal the windows": lambda value, model, read: (
        value == [f"{'full' if window is None else 'sliding'}_attention" for window in read.windows]
    ),
    "no rotary embedding": lambda value, model, read: read.rotary_dim == 0,
    "the part that rotates": lambda value, model, read: (
        int(read.head_dim * (1 if value is None else value))
        == (read.head_dim if read.rotary_dim is None else read.rotary_dim)
    ),
    "no experts": lambda value, model, read: read.experts is None,
    "latent attention": lambda value, model, read: read.latent is not None,
    # vLLM resolves "auto" itself on CPUs with AVX512-BF16 only.
    "no layer has a state, or those of a float32 model": lambda value, model, read: (
        (value == "auto" and model.dtype == "float32") or (read is not None and read.state is None)
    ),
    "layers with a state": lambda value, model, read: read.state is not None,
}


def host_settings(vllm_config: Any, environment: Mapping[str, str]) -> dict[str, Any]:
    """Describe what vLLM was told beside the model. Empty: it computes what Baton's other engines do."""
    model = _model_of(vllm_config.model_config)
    settings = _changed("vllm_config", vllm_config, model)
    return dict(settings) | {
        f"environment.{name}": value
        for name, value in environment.items()
        if f"environment.{name}" not in EXCLUDED
    }


def section_settings(section: str, config: Any) -> dict[str, Any]:
    """Describe the fields of one of vLLM's configurations, such as its SpeculativeConfig."""
    return dict(_changed(section, config, _Model()))


def model_settings(model: Any) -> tuple[DecoderArchitecture | None, dict[str, Any]]:
    """The architecture of vLLM's ModelConfig, None for an unknown family, and what vLLM computes beside it.

    For an unknown family the latter has all of its config.json.
    """
    of = _model_of(model)
    read = of.architecture
    settings = dict(_changed("model_config", model, of))
    for path, value in _leaves(of.config):
        name, plain = ".".join(("hf_config", *map(str, path))), _plain(value)
        if read is None or not (_is_read(of.config, path, plain, read) or _is_neutral(name, plain, of)):
            settings[name] = plain
    return read, settings


def _model_of(model: Any) -> _Model:
    config: dict[str, Any] = model.hf_config.to_dict()
    text = getattr(model, "hf_text_config", model.hf_config)
    if text is not model.hf_config:  # The text model may have changes of its own.
        config["text_config"] = text.to_dict()
    try:
        read = parse_architecture(config)
    except UserError:
        read = None
    return _Model(config, str(model.dtype).removeprefix("torch."), read)


def _changed(section: str, config: Any, model: _Model) -> Iterator[tuple[str, Any]]:
    """Fields with a value that is not neutral; parts that are configurations are sections of their own."""
    for field, value in _fields_of(config).items():
        name = f"{section}.{field}"
        if name in EXCLUDED or name == "vllm_config.model_config":  # The latter: `model_settings`.
            continue
        if _is_config(value):
            yield from _changed(field if field.endswith("_config") else name, value, model)
            continue
        if name == "model_config.max_model_len" and getattr(config, "original_max_model_len", None) == -1:
            value = "fits memory"  # vLLM lowers it after the layers have read it.
        if not _is_neutral(name, plain := _plain(value), model):
            yield name, plain


def _is_neutral(name: str, value: Any, model: _Model) -> bool:
    row = NEUTRAL.get(name)
    if row is None:
        return False
    if msgspec.json.encode(value).decode() in row.values:
        return True
    if not row.when or (name.startswith("hf_config.") and model.architecture is None):
        return False
    return _RULES[row.when](value, model, model.architecture)


def _has_known_ropes(config: Mapping[str, Any]) -> bool:
    """Whether no rotary embedding depends on the number of positions."""
    raw = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config.get("text_config") or not isinstance(raw, Mapping):
        return False
    each = [raw] if "rope_type" in raw or "type" in raw or not raw else list(raw.values())
    return all(
        isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type", "default")) in ROPES
        for rope in each
        if rope is not None
    )


# --- Keys of config.json --------------------------------------------------------------------------------


def _leaves(
    config: Mapping[str, Any], *parents: str, is_model: bool = True
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Paths and values, without those that are excluded in a model or a part of one."""
    for key, value in config.items():
        if is_model and f"hf_config.{key}" in EXCLUDED:
            continue
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, *parents, key, is_model="model_type" in value)
        else:
            yield (*parents, key), value


def _is_read(config: Mapping[str, Any], path: tuple[str, ...], value: Any, read: DecoderArchitecture) -> bool:
    """Whether another value of this key would change what Baton's parser reads, or be refused."""
    for other in _others(value):
        try:
            if parse_architecture(_with(config, path, other)) != read:
                return True
        except UserError:
            return True
    return False


def _with(config: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *rest = path
    return {**config, first: _with(config[first], tuple(rest), value) if rest else value}


def _others(value: Any) -> list[Any]:
    match value:
        case bool():
            return [not value]
        case int() | float():
            return [value + 1, value * 2]
        case str():
            return [f"{value}x"]
        case list():
            return [value[:-1] if value else [1], value[::-1], value + value[:1]]
        case _:
            return [1, True, "x", {"x": 1}, [1]]


# --- Values ---------------------------------------------------------------------------------------------


def _is_config(value: Any) -> bool:
    return isinstance(value, SimpleNamespace) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


def _fields_of(config: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(config):
        return dict(vars(config))
    return {field.name: getattr(config, field.name, None) for field in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    """The value in JSON's types. An unknown object is its text, which may differ in each process."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case enum.Enum():
            return value.name
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case set() | frozenset():
            return sorted(map(str, value))
        case type():
            return f"{value.__module__}.{value.__qualname__}"
    if _is_config(value):
        return {name: _plain(item) for name, item in _fields_of(value).items()}
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    return str(value).removeprefix("torch.")
