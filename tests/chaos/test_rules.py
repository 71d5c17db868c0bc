"""Effects of rules on packets, with fixed random numbers and times."""

import random
from collections import Counter

from lab.chaos.packets import parse_segment
from lab.chaos.rules import CONTROL_PORT, HTTP_PORT, QUEUE_MAX_S, REORDER_S, Rule, RuleBook, channel_of
from tests.chaos.test_packets import make_packet

PACKET = make_packet(b"payload of sixty-four bytes".ljust(64))
NUM_TRIES = 4000


def book(*rules: Rule) -> RuleBook:
    made = RuleBook(random.Random(1))
    made.replace(rules)
    return made


def test_without_a_rule_that_matches_packets_leave_at_once_and_unchanged() -> None:
    rules = book(Rule(source="a", target="b", loss=1.0), Rule(channel="control", loss=1.0))
    for source, target in (("b", "a"), ("a", "c"), ("c", "b")):
        [delivery] = rules.decide(PACKET, source, target, 5.0)
        assert (delivery.due_s, delivery.packet) == (5.0, PACKET)
    assert rules.strikes == [0, 0]


def test_a_cut_affects_one_direction() -> None:
    rules = book(Rule(source="a", target="b", loss=1.0))
    assert rules.decide(PACKET, "a", "b", 0.0) == []
    assert len(rules.decide(PACKET, "b", "a", 0.0)) == 1
    assert rules.strikes == [1]


def test_shares_are_probabilities_per_packet() -> None:
    rules = book(Rule(loss=0.1, duplicate=0.2, reorder=0.3))
    outcomes = [rules.decide(PACKET, "a", "b", 0.0) for _ in range(NUM_TRIES)]
    copies = Counter(len(deliveries) for deliveries in outcomes)
    assert abs(copies[0] / NUM_TRIES - 0.1) < 0.03
    assert abs(copies[2] / NUM_TRIES - 0.18) < 0.03
    late = sum(bool(deliveries) and deliveries[0].due_s == REORDER_S for deliveries in outcomes)
    assert abs(late / NUM_TRIES - 0.27) < 0.03


def test_delay_and_jitter_add_up() -> None:
    rules = book(Rule(delay_s=0.5, jitter_s=0.2))
    dues = [rules.decide(PACKET, "a", "b", 1.0)[0].due_s for _ in range(100)]
    assert min(dues) >= 1.5
    assert max(dues) < 1.7
    assert len(set(dues)) > 50


def test_a_rate_limit_delays_packets_and_drops_those_that_would_wait_too_long() -> None:
    rate = 10.0 * len(PACKET)
    rules = book(Rule(rate_bytes_s=rate))
    dues = [d.due_s for _ in range(100) for d in rules.decide(PACKET, "a", "b", 0.0)]
    assert dues == sorted(dues)
    assert abs(dues[9] - 1.0) < 1e-9
    assert len(dues) < 100
    assert dues[-1] <= QUEUE_MAX_S + 2 / 10


def test_corruption_flips_one_bit_of_the_payload_and_never_changes_bare_acknowledgements() -> None:
    rules = book(Rule(corrupt=1.0))
    for _ in range(200):
        [delivery] = rules.decide(PACKET, "a", "b", 0.0)
        segment = parse_segment(PACKET)
        assert segment is not None
        before, after = PACKET[segment.payload_at :], delivery.packet[segment.payload_at :]
        assert sum((x ^ y).bit_count() for x, y in zip(before, after, strict=True)) == 1
    bare = make_packet(b"")
    assert rules.decide(bare, "a", "b", 0.0)[0].packet == bare
    assert rules.strikes == [200]


def test_a_reset_replaces_the_packet_at_both_ends() -> None:
    rules = book(Rule(reset=1.0))
    deliveries = rules.decide(PACKET, "a", "b", 0.0)
    assert len(deliveries) == 2
    assert PACKET not in [delivery.packet for delivery in deliveries]


def test_a_channel_follows_from_the_ports() -> None:
    segment = parse_segment(PACKET)
    assert segment is not None
    assert channel_of(segment) == "data"
    for port, channel in ((HTTP_PORT, "http"), (CONTROL_PORT, "control")):
        packet = bytearray(PACKET)
        packet[22:24] = port.to_bytes(2, "big")
        assert channel_of(parse_segment(packet)) == channel


def test_the_first_rule_that_matches_decides() -> None:
    rules = book(Rule(channel="data", loss=1.0), Rule(delay_s=1.0))
    assert rules.decide(PACKET, "a", "b", 0.0) == []
    other = make_packet(b"x", protocol=17)
    assert rules.decide(other, "a", "b", 0.0)[0].due_s == 1.0
