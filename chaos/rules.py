"""Rules of the switch: what happens to a packet from one host to another. Time and dice are arguments."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from chaos.packets import WORD_BYTES, Segment, flip_bit, parse_segment, resets_for

FRONT = "front"  # Host of the router and of the clients.
HTTP_PORT = 8100  # Of each engine on its own host.
CONTROL_PORT = 14600  # Of each engine's control channel.
DATA_PORT = 14700  # Of each engine's tcp transport: one a rank, from here on.
RANKS_MAX = 2
QUEUE_MAX_S = 1.0  # A rate limit drops what would wait longer, as a router's full queue does.
REORDER_S = 0.02  # A packet that is to be overtaken waits this long.
# A flipped bit 16 to 21 of an address moves it by 64 KiB to 2 MiB: inside the same registered memory, in
# another block. Half of all flips are of this kind; the other half can hit any bit.
ADDRESS_BITS = range(16, 22)

Channel = Literal["any", "http", "control", "data"]


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For packets from `source` to `target` (host names, None: all). Shares are probabilities a packet."""

    source: str | None = None
    target: str | None = None
    channel: Channel = "any"
    loss: float = 0.0
    delay_s: float = 0.0
    jitter_s: float = 0.0  # Uniform in [0, jitter_s), added to the delay; packets overtake each other.
    duplicate: float = 0.0
    reorder: float = 0.0
    rate_bytes_s: float | None = None
    corrupt: float = 0.0  # Of packets with TCP payload.
    reset: float = 0.0  # Of packets with TCP payload: both ends of the connection get a reset instead.


@dataclass(frozen=True, slots=True)
class Delivery:
    """`packet` leaves the switch at `due_s`, for the host in its own header."""

    due_s: float
    packet: bytes


def channel_of(segment: Segment | None) -> Channel:
    """By the ports of both ends. "data" is every connection that is neither HTTP nor control."""
    if segment is None:
        return "any"
    ports = (segment.source_port, segment.target_port)
    if HTTP_PORT in ports:
        return "http"
    return "control" if CONTROL_PORT in ports else "data"


@dataclass
class RuleBook:
    """The rules of now. `strikes` counts the packets that each rule has changed, delayed or dropped."""

    dice: random.Random
    rules: Sequence[Rule] = ()
    strikes: list[int] = field(default_factory=list)
    _free_at_s: list[float] = field(default_factory=list)

    def replace(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        self.strikes = [0] * len(rules)
        self._free_at_s = [0.0] * len(rules)

    def decide(self, packet: bytes, source: str, target: str, now_s: float) -> list[Delivery]:
        """The first rule that matches decides; without one the packet leaves at once."""
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
        deliveries, struck = self._strike(index, rule, packet, segment, now_s)
        self.strikes[index] += struck
        return deliveries

    def _strike(
        self, index: int, rule: Rule, packet: bytes, segment: Segment | None, now_s: float
    ) -> tuple[list[Delivery], bool]:
        dice = self.dice
        if dice.random() < rule.loss:
            return [], True
        has_payload = segment is not None and segment.payload_bytes > 0
        if segment is not None and has_payload and dice.random() < rule.reset:
            return [Delivery(now_s, reset) for reset in resets_for(packet, segment)], True
        due_s, struck = now_s + rule.delay_s, rule.delay_s > 0
        if rule.jitter_s:
            due_s, struck = due_s + dice.random() * rule.jitter_s, True
        if rule.rate_bytes_s is not None:
            waits_s = max(0.0, self._free_at_s[index] - now_s)
            if waits_s > QUEUE_MAX_S:
                return [], True
            waits_s += len(packet) / rule.rate_bytes_s
            self._free_at_s[index] = now_s + waits_s
            due_s, struck = due_s + waits_s, True
        if segment is not None and has_payload and dice.random() < rule.corrupt:
            packet, struck = self._corrupt(packet, segment), True
        if dice.random() < rule.reorder:
            due_s, struck = due_s + REORDER_S, True
        copies = 1
        if dice.random() < rule.duplicate:
            copies, struck = 2, True
        return [Delivery(due_s, packet)] * copies, struck

    def _corrupt(self, packet: bytes, segment: Segment) -> bytes:
        words = segment.payload_bytes // WORD_BYTES
        if words and self.dice.random() < 0.5:
            bit = self.dice.choice(ADDRESS_BITS)
            return flip_bit(packet, segment, self.dice.randrange(words) * WORD_BYTES + bit // 8, bit % 8)
        return flip_bit(packet, segment, self.dice.randrange(segment.payload_bytes), self.dice.randrange(8))
