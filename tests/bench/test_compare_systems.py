"""Systems under comparison, as data."""

import json
from pathlib import Path

import pytest

from lab.bench.compare.systems import (
    FAULT_SYSTEMS,
    GROUPS,
    PEERS,
    SYSTEMS,
    TRACE_GROUP,
    Ports,
    engine_command,
    front_command,
)

PORTS = Ports(8001, 5601)


def config_of(name: str, role: str) -> dict[str, object]:
    system = SYSTEMS[name]
    command = engine_command(
        system,
        role,  # type: ignore[arg-type]
        PORTS,
        model=Path("/model"),
        vllm_python=Path("/vllm/python"),
        num_blocks=10,
    )
    config: dict[str, object] = json.loads(command[command.index("--kv-transfer-config") + 1])
    return config


def test_every_name_belongs_to_a_system() -> None:
    named = {name for group in GROUPS for name in group} | set(FAULT_SYSTEMS) | set(TRACE_GROUP)
    assert named | set(PEERS) | set(PEERS.values()) <= set(SYSTEMS)


def test_every_group_begins_with_the_single_engine_of_its_kind() -> None:
    for first, *others in GROUPS:
        assert SYSTEMS[first].connector is None
        assert all(SYSTEMS[name].kind == SYSTEMS[first].kind for name in others)


def test_a_pair_shares_one_connector() -> None:
    for name, system in SYSTEMS.items():
        if system.connector is not None:
            prefill, decode = (config_of(name, role) for role in ("prefill", "decode"))
            assert prefill["kv_connector"] == decode["kv_connector"] == system.connector.name
            assert prefill["engine_id"] != decode["engine_id"]


def test_a_confined_engine_gets_one_core() -> None:
    system = SYSTEMS["baton"].confined()
    command = engine_command(system, "single", PORTS, model=Path("/m"), vllm_python=Path("/v"), num_blocks=10)
    assert command[:2] == ["taskset", "-c"]


@pytest.mark.parametrize("name", [name for name, system in SYSTEMS.items() if system.front is not None])
def test_a_front_knows_both_engines(name: str) -> None:
    command = front_command(
        SYSTEMS[name], 9000, Ports(8001, 5601), Ports(8002, 5602), model=Path("/m"), proxies=Path("/p")
    )
    text = " ".join(command)
    assert "8001" in text
    assert "8002" in text
    assert "9000" in text
