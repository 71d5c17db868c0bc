"""The rules of network faults: the packets that they affect, and their removal at the end of the fault."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from lab.chaos.faults import FAULTS, Fault, FaultContext, fault_named
from lab.chaos.load import Load
from lab.chaos.modes import DECODE, PREFILL
from lab.chaos.rules import FRONT, Rule, RuleBook
from lab.chaos.system import System
from tests.chaos.test_packets import make_packet

DATA = make_packet(b"a read request or its answer".ljust(64))
NETWORK = [fault for fault in FAULTS if fault.strikes and fault.target is None]
NUM_TRIES = 300


@dataclass
class RecordingNetwork:
    rules: list[Sequence[Rule]] = field(default_factory=list)

    def replace_rules(self, rules: Sequence[Rule]) -> int:
        self.rules.append(tuple(rules))
        return 0


@dataclass
class NetworkOnly:
    network: RecordingNetwork


def rules_of(fault: Fault) -> Sequence[Rule]:
    network = RecordingNetwork()
    context = FaultContext(cast(System, NetworkOnly(network)), cast(Load, None), random.Random(0))
    fault.begin(context)
    fault.end(context)
    rules, none = network.rules
    assert none == ()
    return rules


def is_affected(fault: Fault, source: str, target: str) -> bool:
    book = RuleBook(random.Random(0))
    book.replace(rules_of(fault))
    for index in range(NUM_TRIES):
        book.decide(DATA, source, target, float(index))
    return sum(book.strikes) > 0


@pytest.mark.parametrize("fault", NETWORK, ids=lambda fault: fault.name)
def test_a_network_fault_sets_rules_and_removes_them_at_its_end(fault: Fault) -> None:
    assert rules_of(fault)


@pytest.mark.parametrize(
    ("name", "to_prefill", "to_decode"),
    [
        ("corrupt-requests", True, False),
        ("corrupt-answers", False, True),
        ("cut-to-d", False, True),
        ("cut-to-p", True, False),
        ("partition", True, True),
        ("reset", True, True),
        ("corrupt-control", False, False),  # The test packet belongs to a data connection.
    ],
)
def test_faults_between_engines_affect_every_pair_in_their_direction_only(
    name: str, to_prefill: bool, to_decode: bool
) -> None:
    fault = fault_named(name)
    for prefill in PREFILL:
        for decode in DECODE:
            assert is_affected(fault, decode, prefill) == to_prefill
            assert is_affected(fault, prefill, decode) == to_decode
        assert not is_affected(fault, FRONT, prefill)


def test_a_router_that_is_cut_off_from_one_engine_reaches_the_others() -> None:
    fault = fault_named("partition-router")
    assert is_affected(fault, FRONT, "p0")
    assert is_affected(fault, "p0", FRONT)
    assert not is_affected(fault, FRONT, "p1")
    assert not is_affected(fault, "d0", "p0")
