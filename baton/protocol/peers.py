"""Known peers and the handshake with each: greeted once, kept while used, left alone after a failure.

    (unknown) --want--> ASKING --Welcome, compatible--> READY      (PeerReady)
    ASKING --Refused, unsound Welcome, no answer--> RESTING        (PeerLost; doubling from 1 to 60 s)
    ASKING --Welcome with other weights--> RESTING                 (PeerLost; 1 s)
    READY --Stranger about it, idle, crowded out--> (unknown)      (PeerLost)
    ASKING, READY --our weights have changed--> (unknown)          (PeerLost)
    RESTING --back-off over, and wanted again--> ASKING

Memory is bounded: there are at most `peers_max` records, and only our own `want` adds one. A Hello is
answered from our own data, and its sender is not recorded.
"""

from dataclasses import dataclass
from typing import Literal

from baton.core.errors import PeerError
from baton.core.identity import CurrentIdentity
from baton.core.ids import Address
from baton.core.reasons import FailureCode, FailureReason
from baton.core.timers import Timers
from baton.protocol.effects import PeerEffect, PeerLost, PeerReady, Send
from baton.protocol.handshake import (
    RankCard,
    answer_hello,
    decode_ranks,
    has_other_weights_only,
    incompatibilities,
    make_hello,
)
from baton.protocol.messages import Envelope, Hello, Message, Refused, Stranger, Welcome

NEVER = float("inf")
BACK_OFF_MIN_S = 1.0
BACK_OFF_MAX_S = 60.0
HELLOS_MAX = 5  # Hellos one round trip apart; if none is answered, the peer counts as unreachable.
PEERS_MAX = 1024


def admit(own_address: Address, envelope: Envelope) -> tuple[tuple[Message, ...], list[Send]]:
    """The messages for this incarnation, and the answer to send if the envelope is for another one.

    A message to an earlier process at this address MUST NOT reach a state machine. Its sender gets a
    Stranger, unless all its messages are Strangers: two engines would otherwise answer each other for ever.
    """
    if envelope.target == own_address:
        return envelope.messages, []
    if all(isinstance(message, Stranger) for message in envelope.messages):
        return (), []
    return (), [Send(envelope.sender, Stranger(envelope.target))]


@dataclass(slots=True)
class _Peer:
    state: Literal["asking", "ready", "resting"]
    wanted_at: float
    next_hello: float = NEVER
    num_hellos: int = 0
    num_failures: int = 0
    rests_until: float = -NEVER
    reason: FailureReason | None = None  # Reason for the last failure.
    welcome: Welcome | None = None
    ranks: tuple[RankCard, ...] = ()


class PeerTable:
    def __init__(
        self,
        own_address: Address,
        identity: CurrentIdentity,
        timers: Timers,
        payload: bytes | None = None,
        *,
        peers_max: int = PEERS_MAX,
    ) -> None:
        """`payload` of our Welcome (`encode_ranks`). Until it is known, no Hello is answered."""
        self._own_address = own_address
        self._identity = identity
        self._timers = timers
        self._payload = payload
        self._peers_max = peers_max
        self._peers: dict[Address, _Peer] = {}
        # Longer than any use of a peer, so that an idle peer holds nothing for us.
        self._idle_max_s = max(600.0, 2 * timers.deadline_s)

    def announce(self, payload: bytes) -> None:
        """Our ranks have registered their memory; from now on Hellos are answered with this payload."""
        self._payload = payload

    def weights_changed(self) -> list[PeerEffect]:
        """Drop what peers have agreed on for our old weights. They are greeted anew when wanted."""
        effects: list[PeerEffect] = []
        for address, peer in list(self._peers.items()):
            if peer.state != "resting":
                effects.append(PeerLost(address, FailureReason(FailureCode.OTHER_WEIGHTS)))
            elif peer.reason is None or peer.reason.code is not FailureCode.OTHER_WEIGHTS:
                continue  # The peer rests for a reason that the weights do not change.
            del self._peers[address]
        return effects

    def want(self, address: Address, now: float) -> list[PeerEffect]:
        """Leads to PeerReady or PeerLost, at once or later. Call it at every use, or the peer is dropped."""
        peer = self._peers.get(address)
        if peer is None:
            effects = self._make_room()
            self._peers[address] = peer = _Peer("asking", now)
            return [*effects, self._hello(address, peer, now)]
        peer.wanted_at = now
        if peer.state == "ready":
            assert peer.welcome is not None
            return [PeerReady(address, peer.welcome, peer.ranks)]
        if peer.state == "asking":
            return []  # The answer is on its way.
        if now < peer.rests_until:
            assert peer.reason is not None, "a peer rests only after a failure"
            return [PeerLost(address, peer.reason)]
        peer.state, peer.num_hellos = "asking", 0
        return [self._hello(address, peer, now)]

    def receive(self, sender: Address, message: Message, now: float) -> list[PeerEffect]:
        match message:
            case Hello():
                if message.address != sender or self._payload is None:
                    return []  # A false address, or we cannot answer yet; the peer repeats its Hello.
                return [Send(sender, answer_hello(message, self._identity.value, self._payload))]
            case Welcome():
                return self._welcomed(sender, message, now)
            case Refused(reasons):
                text = f"refused by the peer: {'; '.join(reasons) or 'no reason given'}"
                return self._failed(sender, FailureReason(FailureCode.REFUSED, text), now)
            case Stranger(about):
                if self._peers.pop(about, None) is None:
                    return []
                text = "restarted or gone: another process answers there"
                return [PeerLost(about, FailureReason(FailureCode.GONE, text))]
            case _:
                return []

    def wake(self, now: float) -> list[PeerEffect]:
        effects: list[PeerEffect] = []
        for address, peer in list(self._peers.items()):
            if peer.state == "asking" and now >= peer.next_hello:
                if peer.num_hellos >= HELLOS_MAX:
                    text = f"no answer to {HELLOS_MAX} hellos"
                    effects += self._failed(address, FailureReason(FailureCode.NO_ANSWER, text), now)
                else:
                    effects.append(self._hello(address, peer, now))
            elif now >= self._idle_at(peer):
                del self._peers[address]
                if peer.state == "ready":
                    effects.append(PeerLost(address, FailureReason(FailureCode.PEER_IDLE)))
        return effects

    @property
    def next_deadline(self) -> float:
        if not self._peers:
            return NEVER
        due = NEVER
        for peer in self._peers.values():
            at = peer.next_hello if peer.state == "asking" else self._idle_at(peer)
            if at < due:
                due = at
        return due

    @property
    def num_open(self) -> int:
        return len(self._peers)

    def _hello(self, address: Address, peer: _Peer, now: float) -> Send:
        peer.num_hellos += 1
        peer.next_hello = now + self._timers.round_trip_max_s
        return Send(address, make_hello(self._own_address, self._identity.value))

    def _welcomed(self, sender: Address, welcome: Welcome, now: float) -> list[PeerEffect]:
        peer = self._peers.get(sender)
        if peer is None or peer.state != "asking":
            return []  # A duplicate, or an answer that came too late.
        ours, theirs = self._identity.value, (welcome.protocol_version, welcome.kv_identity)
        reasons = incompatibilities(ours, *theirs)
        if reasons:
            is_update = has_other_weights_only(ours, *theirs)
            code = FailureCode.OTHER_WEIGHTS if is_update else FailureCode.INCOMPATIBLE
            return self._failed(sender, FailureReason(code, f"{code}: {'; '.join(reasons)}"), now)
        try:
            ranks = decode_ranks(welcome.payload)
        except PeerError as error:
            return self._failed(sender, FailureReason(FailureCode.BAD_RANK_CARDS, str(error)), now)
        peer.state, peer.welcome, peer.ranks = "ready", welcome, ranks
        return [PeerReady(sender, welcome, ranks)]

    def _failed(self, address: Address, reason: FailureReason, now: float) -> list[PeerEffect]:
        peer = self._peers.get(address)
        if peer is None or peer.state != "asking":
            return []
        peer.state, peer.reason = "resting", reason
        if reason.code is FailureCode.OTHER_WEIGHTS:  # An update ends it; no failure of the peer.
            peer.rests_until = now + BACK_OFF_MIN_S
            return [PeerLost(address, reason)]
        peer.rests_until = now + min(BACK_OFF_MIN_S * 2**peer.num_failures, BACK_OFF_MAX_S)
        peer.num_failures += 1
        return [PeerLost(address, reason)]

    def _idle_at(self, peer: _Peer) -> float:
        return max(peer.wanted_at + self._idle_max_s, peer.rests_until)

    def _make_room(self) -> list[PeerEffect]:
        """Drops the peer that was wanted least recently, resting peers first."""
        if len(self._peers) < self._peers_max:
            return []
        address = min(
            self._peers, key=lambda a: (self._peers[a].state != "resting", self._peers[a].wanted_at)
        )
        peer = self._peers.pop(address)
        return [] if peer.state == "resting" else [PeerLost(address, FailureReason(FailureCode.PEERS_MAX))]
