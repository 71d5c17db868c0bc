"""Rules of the switch: what happens to each packet between two hosts.

Pure functions of their arguments, which include the time and the random numbers.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from lab.chaos.packets import WORD_BYTES, Segment, flip_bit, parse_segment, resets_for

FRONT = "front"  # Host of the router and the clients.
HTTP_PORT = 8100  # HTTP port of each engine, on its own host.
CONTROL_PORT = 14600  # Port of each engine's control channel.
DATA_PORT = 14700  # First port of each engine's tcp transport; each rank has one.
RANKS_MAX = 2
QUEUE_MAX_S = 1.0  # A rate limit drops packets that would wait longer, as a router's full queue does.
REORDER_S = 0.02  # Delay of a packet that others are to overtake.
# Flipping bit 16 to 21 of an address moves it by 64 KiB to 2 MiB: to another block in the same registered
# memory. Half of all flips are of this kind; the other half can hit any bit.
ADDRESS_BITS = range(16, 22)

Channel = Literal["any", "http", "control", "data"]


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to do with packets from `source` to `target` (host names; None: all).

    Shares are probabilities per packet.
    """

    source: str | None = None
    target: str | None = None
    channel: Channel = "any"
    loss: float = 0.0
    delay_s: float = 0.0
    jitter_s: float = 0.0  # Uniform in [0, jitter_s), added to the delay; packets overtake each other.
    duplicate: float = 0.0
    reorder: float = 0.0
    rate_bytes_s: float | None = None
    corrupt: float = 0.0  # Share of packets with TCP payload.
    # Share of packets with TCP payload for which both ends of the connection get a reset instead.
    reset: float = 0.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """A packet that leaves the switch at `due_s`, to the host in its own header."""

    due_s: float
    packet: bytes


def channel_of(segment: Segment | None) -> Channel:
    """Return the channel by the ports of both ends; "data" is all that is neither HTTP nor control."""
    if segment is None:
        return "any"
    ports = (segment.source_port, segment.target_port)
    if HTTP_PORT in ports:
        return "http"
    return "control" if CONTROL_PORT in ports else "data"


@dataclass
class RuleBook:
    """The current rules. `strikes` counts the packets that each rule changed, delayed or dropped."""

    rng: random.Random
    rules: Sequence[Rule] = ()
    strikes: list[int] = field(default_factory=list)
    _free_at_s: list[float] = field(default_factory=list)

    def replace(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        self.strikes = [0] * len(rules)
        self._free_at_s = [0.0] * len(rules)

    def decide(self, packet: bytes, source: str, target: str, now_s: float) -> list[Delivery]:
        """Apply the first rule that matches; without one the packet leaves at once."""
        if self.rules:
            segment = parse_segment(packet)
            channel = channel_of(segment)
            for index, rule in enumerate(self.rules):
                if (
                    rule.source in (None, source)
                    and rule.target in (None, target)
                    and rule.channel in ("any", channel)
                ):
                    return self._apply(index, rule, packet, segment, now_s)
        return [Delivery(now_s, packet)]

    def _apply(
        self, index: int, rule: Rule, packet: bytes, segment: Segment | None, now_s: float
    ) -> list[Delivery]:
        deliveries, affected = self._apply_shares(index, rule, packet, segment, now_s)
        self.strikes[index] += affected
        return deliveries

    def _apply_shares(
        self, index: int, rule: Rule, packet: bytes, segment: Segment | None, now_s: float
    ) -> tuple[list[Delivery], bool]:
        rng = self.rng
        if rng.random() < rule.loss:
            return [], True
        has_payload = segment is not None and segment.payload_bytes > 0
        if segment is not None and has_payload and rng.random() < rule.reset:
            return [Delivery(now_s, reset) for reset in resets_for(packet, segment)], True
        due_s, affected = now_s + rule.delay_s, rule.delay_s > 0
        if rule.jitter_s:
            due_s, affected = due_s + rng.random() * rule.jitter_s, True
        if rule.rate_bytes_s is not None:
            waits_s = max(0.0, self._free_at_s[index] - now_s)
            if waits_s > QUEUE_MAX_S:
                return [], True
            waits_s += len(packet) / rule.rate_bytes_s
            self._free_at_s[index] = now_s + waits_s
            due_s, affected = due_s + waits_s, True
        if segment is not None and has_payload and rng.random() < rule.corrupt:
            packet, affected = self._corrupt(packet, segment), True
        if rng.random() < rule.reorder:
            due_s, affected = due_s + REORDER_S, True
        copies = 1
        if rng.random() < rule.duplicate:
            copies, affected = 2, True
        return [Delivery(due_s, packet)] * copies, affected

    def _corrupt(self, packet: bytes, segment: Segment) -> bytes:
        words = segment.payload_bytes // WORD_BYTES
        if words and self.rng.random() < 0.5:
            bit = self.rng.choice(ADDRESS_BITS)
            return flip_bit(packet, segment, self.rng.randrange(words) * WORD_BYTES + bit // 8, bit % 8)
        return flip_bit(packet, segment, self.rng.randrange(segment.payload_bytes), self.rng.randrange(8))
