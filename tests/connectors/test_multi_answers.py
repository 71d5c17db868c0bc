"""Answers of a Multi connector from its children's answers, and the arguments that each child gets."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from baton.connectors.multi import MultiSchedulerHalf, MultiWorkerHalf
from baton.connectors.multi.metadata import MultiHandshake
from baton.contract import (
    KVConnectorHandshakeMetadata,
    KVConnectorOutput,
    NullSchedulerHalf,
    NullWorkerHalf,
)

ALL = {(True, True): True, (True, False): False, (False, True): False, (False, False): False}
ANY = {(True, True): True, (True, False): True, (False, True): True, (False, False): False}

OF_THE_SCHEDULER: dict[str, dict[tuple[Any, Any], Any]] = {
    "requires_kv_delivery": ANY,  # One child that requires it is enough.
    "supports_divergent_local_hybrid_hits": ALL,
    "has_pending_push_work": ANY,
    "has_pending_block_frees": ANY,
    "bind_wake": ALL,  # If one child cannot wake the host, the host must poll.
    # A child that answers None promises nothing.
    "reset_cache": {**ALL, (None, True): False, (None, None): False},
    "set_weights": {**ALL, (None, True): False, (None, None): False},
    "introduction": {("i", None): "i", (None, "i"): "i", (None, None): None},
    "take_events": {(("e",), ("f", "g")): ["e", "f", "g"], ((), ("f",)): ["f"]},
    "get_finished_count": {(5, None): None, (None, 5): None},  # Each child's reports are counted separately.
}
OF_A_RANK: dict[str, dict[tuple[Any, Any], Any]] = {
    "prefer_cross_layer_blocks": ALL,
    "graph_capturable": ALL,
    "bind_wake": ALL,
    "hidden_states_wanted": {((3, 1), (2,)): (1, 2, 3), ((), (2,)): (2,), ((1,), (1,)): (1,)},
}


def answering(base: type, name: str, answer: Any) -> Any:
    is_property = not callable(getattr(base, name))
    return type("Answering", (base,), {name: answer if is_property else lambda self, *args: answer})()


def ask(multi: Any, name: str) -> Any:
    asked = getattr(multi, name)
    if not callable(asked):
        return asked
    wake: Callable[[], None] = lambda: None  # noqa: E731
    return asked(*{"bind_wake": (wake,), "set_weights": ("digest", None)}.get(name, ()))


def cases(table: dict[str, dict[tuple[Any, Any], Any]]) -> list[tuple[str, tuple[Any, Any], Any]]:
    return [(name, given, expected) for name, answers in table.items() for given, expected in answers.items()]


@pytest.mark.parametrize(("name", "given", "expected"), cases(OF_THE_SCHEDULER))
def test_answers_of_the_scheduler_half_are_combined(name: str, given: tuple[Any, Any], expected: Any) -> None:
    children = [
        (child, answering(NullSchedulerHalf, name, answer)) for child, answer in zip("ab", given, strict=True)
    ]
    assert ask(MultiSchedulerHalf(children, block_tokens=4), name) == expected


@pytest.mark.parametrize(("name", "given", "expected"), cases(OF_A_RANK))
def test_answers_of_the_worker_half_are_combined(name: str, given: tuple[Any, Any], expected: Any) -> None:
    children = [
        (child, answering(NullWorkerHalf, name, answer)) for child, answer in zip("ab", given, strict=True)
    ]
    assert ask(MultiWorkerHalf(children), name) == expected


@pytest.mark.parametrize(
    ("base", "table"), [(NullSchedulerHalf, OF_THE_SCHEDULER), (NullWorkerHalf, OF_A_RANK)]
)
def test_every_property_has_a_table(base: type, table: dict[str, Any]) -> None:
    properties = {
        name
        for name, value in inspect.getmembers(base)
        if not name.startswith("_") and isinstance(value, property | bool | tuple)
    }
    assert properties
    assert properties <= set(table)


class Hears(NullSchedulerHalf):
    def __init__(self) -> None:
        self.handshakes: list[Any] = []
        self.invalid_blocks: list[set[int]] = []

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        self.handshakes.append(metadata)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.invalid_blocks.append(connector_output.invalid_block_ids)
        connector_output.invalid_block_ids = set()  # A child may change its copy.


class Own(KVConnectorHandshakeMetadata): ...


def test_each_child_gets_its_own_part_of_every_ranks_handshake() -> None:
    a, b = Hears(), Hears()
    multi = MultiSchedulerHalf([("a", a), ("b", b)], block_tokens=4, num_ranks=2)
    of_a, of_b0, of_b1 = Own(), Own(), Own()
    multi.set_xfer_handshake_metadata_pp_aware(
        {(0, 0): MultiHandshake((of_a, of_b0)), (0, 1): MultiHandshake((None, of_b1))}
    )
    assert a.handshakes == [{(0, 0): of_a}]
    assert b.handshakes == [{(0, 0): of_b0, (0, 1): of_b1}]


def test_every_child_gets_every_bad_block() -> None:
    """A block may be shared, and bad because of another child's load while this child is about to save it."""
    a, b = Hears(), Hears()
    multi = MultiSchedulerHalf([("a", a), ("b", b)], block_tokens=4)
    output = KVConnectorOutput(invalid_block_ids={3, 5})
    multi.update_connector_output(output)
    assert a.invalid_blocks == b.invalid_blocks == [{3, 5}]
    assert output.invalid_block_ids == {3, 5}, "the host must get them too"
