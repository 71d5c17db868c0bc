"""Other routers of the same engines: the load that each has reported, and the messages between routers.

    router --Message: its load, the turns that it keeps or takes--> every other router

A message is authenticated with a secret that all routers have (HMAC-SHA256, RFC 2104). It has a number and a
time, so that a router drops an old one that comes again. It is not encrypted. Messages may be lost: loads are
repeated, and an engine computes the prompt of a turn that is not known or was taken twice. A router that is
silent for SILENT_S counts as dead: its requests are no load any more.
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec

from baton.core.errors import PeerError
from baton.router.fleet.links import NOTHING
from baton.router.fleet.notes import EngineLoad, Load, TurnKept, TurnTaken
from baton.router.fleet.replica import sum_of

SILENT_S = 1.0
LATE_MAX_S = 30.0  # Largest difference between two hosts' clocks, with the time on the way.
PEERS_MAX = 32
TAG_BYTES = hashlib.sha256().digest_size

PeerNote: TypeAlias = Load | TurnKept | TurnTaken


class Message(msgspec.Struct, frozen=True, array_like=True):
    router: str  # Random name of one start of a router.
    number: int  # Counts the messages of the router.
    unix_s: float
    notes: list[PeerNote]


_decoder = msgspec.msgpack.Decoder(Message)


def seal(message: Message, secret: bytes) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return hmac.digest(secret, payload, "sha256") + payload


def unseal(data: bytes, secret: bytes, unix_s: float) -> Message:
    """Raises PeerError."""
    tag, payload = data[:TAG_BYTES], data[TAG_BYTES:]
    if not hmac.compare_digest(tag, hmac.digest(secret, payload, "sha256")):
        raise PeerError("a message is not signed with this router's peer secret")
    try:
        message = _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise PeerError(f"a message of another version: {error}") from error
    if abs(unix_s - message.unix_s) > LATE_MAX_S:
        raise PeerError(f"a message is {unix_s - message.unix_s:.0f} s old; set the hosts' clocks")
    return message


@dataclass(slots=True)
class _Peer:
    number: int = 0
    heard_at_s: float = 0.0
    load: Load = NOTHING  # The last one, without counts of the past.


class News(NamedTuple):
    """What is new in one message."""

    turns: Sequence[TurnKept | TurnTaken] = ()
    is_new: bool = False  # The router was not known: it does not know the turns of this router yet.


class Peers:
    """The peers of one router. Not thread-safe."""

    def __init__(self, router: str, secret: bytes) -> None:
        self._router, self._secret = router, secret
        self._number = 0  # Number of this router's last message.
        self._peers: dict[str, _Peer] = {}
        self._silent: dict[str, _Peer] = {}  # Silent routers, for the numbers of their last messages.

    def write(self, notes: list[PeerNote], unix_s: float) -> bytes:
        """The next message to all peers."""
        self._number += 1
        return seal(Message(self._router, self._number, unix_s, notes), self._secret)

    def read(self, data: bytes, unix_s: float, now_s: float) -> News:
        """Raises PeerError."""
        return self.hear(unseal(data, self._secret, unix_s), now_s)

    def hear(self, message: Message, now_s: float) -> News:
        """Raises PeerError."""
        if message.router == self._router:
            return News()  # A message of this router that came back.
        known = self._peers.get(message.router) or self._silent.get(message.router)
        if known is not None and message.number <= known.number:
            return News()  # This message came before, by another way, or is late.
        is_new = message.router not in self._peers
        if is_new and len(self._peers) >= PEERS_MAX:
            raise PeerError(f"more than {PEERS_MAX} routers")
        peer = self._peers.setdefault(message.router, _Peer())
        self._silent.pop(message.router, None)
        peer.number, peer.heard_at_s = message.number, now_s
        turns: list[TurnKept | TurnTaken] = []
        for note in message.notes:
            if isinstance(note, Load):
                peer.load = Load(note.num_requests, [_waiting(row) for row in note.engines])
            else:
                turns.append(note)
        return News(turns, is_new)

    def expire(self, now_s: float) -> bool:
        """Forget routers that are silent. True: there was one."""
        silent = [name for name, peer in self._peers.items() if now_s - peer.heard_at_s > SILENT_S]
        for name in silent:
            self._silent[name] = self._peers.pop(name)
        # The number of a silent router stays as long as its messages may come late, or again.
        for name in [name for name, one in self._silent.items() if now_s - one.heard_at_s > 2 * LATE_MAX_S]:
            del self._silent[name]
        return bool(silent)

    def load(self) -> Load:
        """The sum of all peers' loads. Their clients do not count against this router's limit."""
        return Load(0, sum_of(peer.load for peer in self._peers.values()).engines)

    def snapshot(self, now_s: float) -> list[Mapping[str, Any]]:
        """The peers that are not silent, for operators."""
        return [
            {
                "router": name,
                "heard_s_ago": round(now_s - peer.heard_at_s, 3),
                "requests": peer.load.num_requests,
            }
            for name, peer in self._peers.items()
        ]


def _waiting(row: EngineLoad) -> EngineLoad:
    """The row without counts of the past, which are for each router's own statistics."""
    return EngineLoad(row.engine, row.in_flight, 0, 0, 0, row.num_queued_tokens)
