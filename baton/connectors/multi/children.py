"""Children of a Multi connector: parses them from its configuration and checks their compatibility.

{"kv_connector": "BatonMultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": [
    {"kv_connector": "BatonPullConnector", "kv_connector_extra_config": {"transports": ["local"]}},
    {"kv_connector": "Mine", "kv_connector_module_path": "my.module", "kv_role": "kv_consumer"}]}}

The form is that of vLLM's MultiConnector: each entry is a KVTransferConfig. An entry inherits the engine's
fields (id, role, failure policy) from the Multi connector's own configuration. An engine has one value of
each, so a different value is refused. A child's role may be narrower than the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from baton.connectors.registry import connector_class
from baton.contract import KVConnectorBase_V1
from baton.core.config import EngineConfig, KVTransferConfig
from baton.core.errors import ConfigError
from baton.core.validation import explain

KEY: Final = "connectors"
FIELD: Final = f"kv_transfer_config.kv_connector_extra_config.{KEY}"
MAIN: Final = "BatonMultiConnector"

_INHERITED: Final = ("engine_id", "kv_load_failure_policy", "kv_buffer_device")


@dataclass(frozen=True, slots=True)
class ChildConfig:
    name: str  # The child's `kv_connector`, with a number appended if an earlier child has the same one.
    connector: type[KVConnectorBase_V1]
    config: EngineConfig  # The engine's, with the child's `kv_transfer_config`.

    @property
    def transfer(self) -> KVTransferConfig:
        assert self.config.kv_transfer_config is not None
        return self.config.kv_transfer_config


Listed: TypeAlias = Callable[[Mapping[str, Any]], list[Any]]
"""Finds the children's configurations in that of the Multi connector. Raises ConfigError."""


def listed_connectors(extra: Mapping[str, Any]) -> list[Any]:
    """Finds the children's configurations in vLLM's form (`Listed`). Raises ConfigError."""
    for key in extra:
        if key != KEY:
            raise ConfigError(
                f"is not known; {MAIN} has only {KEY!r}, each with its own kv_connector_extra_config",
                field=f"kv_transfer_config.kv_connector_extra_config.{key}",
            )
    listed = extra.get(KEY)
    if not isinstance(listed, list) or not listed:
        raise ConfigError(
            'must list at least one connector: [{"kv_connector": "BatonPullConnector"}, ...]', field=FIELD
        )
    return listed


def children_of(config: EngineConfig, listed: Listed = listed_connectors) -> tuple[ChildConfig, ...]:
    """The children in configuration order. Raises ConfigError naming the entry and what to change."""
    transfer = config.kv_transfer_config
    assert transfer is not None, "kv_transfer_config must be set"
    children: list[ChildConfig] = []
    for position, (of_child, connector) in enumerate(transfers_of(transfer, listed)):
        earlier = sum(child.transfer.kv_connector == of_child.kv_connector for child in children)
        name = f"{of_child.kv_connector}#{earlier + 1}" if earlier else str(of_child.kv_connector)
        assert position == len(children)
        children.append(
            ChildConfig(name, connector, msgspec.structs.replace(config, kv_transfer_config=of_child))
        )
    _refuse_same_answers(children)
    required_layout(children)
    return tuple(children)


def transfers_of(
    transfer: KVTransferConfig, listed: Listed = listed_connectors
) -> list[tuple[KVTransferConfig, type[KVConnectorBase_V1]]]:
    """Each child's configuration and class, before any checks among children. Raises ConfigError."""
    return [
        _child(raw, transfer, f"{FIELD}[{position}]")
        for position, raw in enumerate(listed(transfer.kv_connector_extra_config))
    ]


def required_layout(children: Sequence[ChildConfig]) -> str | None:
    """The KV-cache layout that children require, or None. Raises ConfigError if they disagree."""
    wanted: dict[str, str] = {}
    for child in children:
        layout = child.connector.get_required_kvcache_layout(child.config)
        if layout is not None:
            wanted.setdefault(layout, child.name)
    if len(wanted) > 1:
        needs = " and ".join(f"{name} needs {layout!r}" for layout, name in wanted.items())
        raise ConfigError(f"an engine's KV cache has one layout, but {needs}", field=FIELD)
    return next(iter(wanted), None)


def _child(raw: Any, of_engine: KVTransferConfig, field: str) -> tuple[KVTransferConfig, type[Any]]:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"must be an object like kv_transfer_config, is {raw!r}", field=field)
    inherited = {"kv_role": of_engine.kv_role}
    for key in _INHERITED:
        inherited[key] = getattr(of_engine, key)
        if key in raw and raw[key] != inherited[key]:
            raise ConfigError(
                f"is {raw[key]!r}, but the engine's is {inherited[key]!r}, and it has only one; "
                f"leave it out here, or set it beside kv_connector {of_engine.kv_connector!r}",
                field=f"{field}.{key}",
            )
    try:
        transfer = msgspec.convert({**inherited, **raw}, KVTransferConfig)
        if transfer.kv_connector is None:
            raise ConfigError("is missing", field=f"{field}.kv_connector")
        connector = connector_class(transfer)
    except msgspec.ValidationError as error:
        problem, path = explain(error, KVTransferConfig)
        raise ConfigError(problem, field=field + path) from error
    except ConfigError as error:
        raise ConfigError(str(error), field=field) from error
    if transfer.kv_connector_extra_config.get("layerwise"):
        raise ConfigError(
            "is for an only connector, BatonSharedStorageConnector",
            field=f"{field}.kv_connector_extra_config.layerwise",
        )
    if connector.stands_alone:
        raise ConfigError("must be the only connector: others would treat its KV as valid", field=field)
    too_wide = (transfer.is_kv_producer and not of_engine.is_kv_producer) or (
        transfer.is_kv_consumer and not of_engine.is_kv_consumer
    )
    if too_wide:
        raise ConfigError(
            f"is {transfer.kv_role!r}, but the engine is only {of_engine.kv_role!r}",
            field=f"{field}.kv_role",
        )
    return transfer, connector


def _refuse_same_answers(children: Sequence[ChildConfig]) -> None:
    """Raises ConfigError if two children answer with the same kv_transfer_params: one would be lost."""
    owner: dict[str, str] = {}
    for child in children:
        for key in sorted(child.connector.answered_params):
            if key in owner:
                raise ConfigError(
                    f"{owner[key]} and {child.name} both answer with {key!r} in kv_transfer_params; "
                    "keep one of them",
                    field=FIELD,
                )
            owner[key] = child.name
