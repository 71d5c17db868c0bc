"""Control thread: owns the control channel of an engine, and wakes when a frame arrives or a timer is due.

    frame --open--> agent.receive      agent.take_envelopes --sign--> frame      deadline --> agent.wake

The engine's thread and this one share the agent under one lock, held as long as a machine takes to answer.
A long engine step delays nothing here: leases are renewed while the model computes.

A frame reaches the agent only if the sender that it names has signed it. A Stranger reaches it only over the
route that leads to the engine that it is about. So another member of the cluster can neither send in a peer's
name nor redirect the answers to a peer.

A turn that raises is logged, and the thread goes on with the agent's state. After RESTARTS_MAX of them in
RESTARTS_S seconds it dies, and its owner raises ConnectorDead.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from baton.connectors.pull.control.agent import PullAgent
from baton.contract import ConnectorDead
from baton.core.errors import BadTransferParams, PeerError, TransferError
from baton.core.ids import Address
from baton.core.transfer_params import FIELD
from baton.protocol.effects import pack_sends
from baton.protocol.messages import Envelope, Message, Stranger
from baton.protocol.peers import admit
from baton.protocol.signed_frame import ForgedFrame, ProcessKey, epoch_of
from baton.transport.base.threads import join_all, start_owned_thread
from baton.transport.control.channel import ControlChannel, Destination

logger = logging.getLogger(__name__)

SLEEP_MAX_S = 60.0
GOODBYE_S = 0.05  # Time for the last frames to leave; a peer that misses them waits for its deadline.
ROUTES_MAX = 4096  # Peers whose route is remembered; the one unused for longest is forgotten first.
RESTARTS_MAX = 5
RESTARTS_S = 60.0


@dataclass(frozen=True, slots=True)
class _Way:
    """How to reach a peer. Its key is known from a ticket, an introduction, or a frame that it wrote."""

    route: Destination
    public_key: bytes | None


class ControlThread:
    """Owns `channel` from `start` on; `close` ends both."""

    def __init__(
        self,
        agent: PullAgent,
        lock: threading.Lock,
        channel: ControlChannel,
        key: ProcessKey,
        clock: Callable[[], float],
        *,
        on_effects: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_effects` is called on this thread, without the lock, when a frame or the time has had effects,
        or when the thread has died."""
        self._agent = agent
        self._lock = lock
        self._channel = channel
        self._key = key
        self._clock = clock
        self._on_effects = on_effects
        self._ways: OrderedDict[Address, _Way] = OrderedDict()
        self._restarts: deque[float] = deque(maxlen=RESTARTS_MAX)
        self._has_news = False  # Effects since the last call of `on_effects`.
        self._closing = False
        self._death: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._sleeps_until = float("inf")
        self.num_bad_frames = 0  # Malformed or forged.
        self.num_forged_frames = 0  # Bad frames that were not written by the sender that they name.
        self.public_key = key.public

    @property
    def url(self) -> str:
        return self._channel.url

    def start(self) -> None:
        assert self._thread is None, "started once"
        self._thread = start_owned_thread("baton-control", self._run, on_death=self._note_death)

    def route(self, peer: Address, url: str, public_key: bytes | None) -> None:
        """Remember where a peer listens, from its signed ticket. Needs the lock.

        Raises BadTransferParams for a key that is not the peer's. None: the peer is only named.
        """
        if public_key is not None and epoch_of(public_key) != peer.epoch:
            raise BadTransferParams(
                f"names engine {peer.engine_id!r} with a key of another process",
                field=f"{FIELD}.baton_ticket",
            )
        self._remember(peer, _Way(url, public_key))

    def flush(self) -> None:
        """Wake the thread if it sleeps on something to send, or beyond a deadline. Needs the lock."""
        if self._agent.has_envelopes or self._agent.next_deadline < self._sleeps_until:
            self._channel.wake()

    def raise_if_dead(self) -> None:
        """Called by the owner in each step: without this thread no lease is renewed."""
        if self._death is not None:
            raise ConnectorDead("the control thread of the pull connector died") from self._death

    def close(self, timeout_s: float) -> None:
        self._closing = True
        self._channel.wake()
        if self._thread is not None:
            join_all([self._thread], timeout_s)
        self._channel.close()

    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except Exception as error:
                # A fault of ours. The thread has to live, or every lease lapses.
                now = self._clock()
                if len(self._restarts) == RESTARTS_MAX and now - self._restarts[0] < RESTARTS_S:
                    raise
                self._restarts.append(now)
                logger.exception("a turn of the control thread failed (%s); it goes on", error)
        self._say_goodbye()

    def _turn(self) -> None:
        with self._lock:
            num_effects = self._agent.num_effects
            self._agent.wake(self._clock())
            self._has_news |= self._agent.num_effects > num_effects
        if self._has_news:
            self._has_news = False
            self._on_effects()
        with self._lock:
            now = self._clock()
            outgoing = self._take_outgoing()
            self._sleeps_until = min(self._agent.next_deadline, now + SLEEP_MAX_S)
            sleep_s = max(0.0, self._sleeps_until - now)
        for envelope, way in outgoing:
            self._send(envelope, way)
        for received in self._channel.poll(sleep_s):
            self._receive(received.route, received.frame)

    def _say_goodbye(self) -> None:
        """Send what a shutdown has left (loans released), if it can be sent at once."""
        with self._lock:
            outgoing = self._take_outgoing()
        for envelope, way in outgoing:
            self._send(envelope, way)
        if outgoing:
            self._channel.poll(GOODBYE_S)

    def _take_outgoing(self) -> list[tuple[Envelope, _Way | None]]:
        return [(envelope, self._ways.get(envelope.target)) for envelope in self._agent.take_envelopes()]

    def _receive(self, route: Destination, frame: bytes) -> None:
        try:
            opened = self._key.open(frame, self._agent.address)
        except PeerError as error:
            self.num_bad_frames += 1
            self.num_forged_frames += isinstance(error, ForgedFrame)
            # Warn of the first, second, fourth, ... frame, so that one peer cannot fill the log.
            is_news = self.num_bad_frames & (self.num_bad_frames - 1) == 0
            level = logging.WARNING if is_news else logging.DEBUG
            logger.log(level, "dropped a control frame, number %d: %s", self.num_bad_frames, error)
            return
        envelope, way = opened.envelope, _Way(route, opened.public_key)
        # The frame is for another incarnation of this engine: only that is answered.
        if not opened.is_proved:
            _, answers = admit(self._agent.address, envelope)
            for answer in pack_sends(self._agent.address, answers):
                self._send(answer, way)
            return
        with self._lock:
            known = self._ways.get(envelope.sender)
            # A url from a ticket stays; a connection that came in dies with its peer.
            if known is None or not isinstance(known.route, str):
                self._remember(envelope.sender, way)
            messages = tuple(self._believed(envelope.messages, route))
            if messages:
                num_effects = self._agent.num_effects
                self._agent.receive(msgspec.structs.replace(envelope, messages=messages), self._clock())
                self._has_news |= self._agent.num_effects > num_effects

    def _believed(self, messages: Iterable[Message], route: Destination) -> Iterable[Message]:
        """Drops each Stranger about an engine that is reached by another route.

        Only the process that listens there knows that the engine is gone.
        """
        for message in messages:
            if isinstance(message, Stranger):
                way = self._ways.get(message.about)
                if way is None or way.route != route:
                    continue
            yield message

    def _send(self, envelope: Envelope, way: _Way | None) -> None:
        if way is None:
            logger.debug("no route to %s; dropped a message to it", envelope.target)
            return  # A network loses messages too: the peer that waits asks again.
        try:
            self._channel.send(way.route, self._key.sign(envelope, way.public_key))
        except (PeerError, TransferError) as error:
            logger.warning("cannot send to %s: %s", envelope.target.engine_id, error)

    def _remember(self, peer: Address, way: _Way) -> None:
        self._ways[peer] = way
        self._ways.move_to_end(peer)
        if len(self._ways) > ROUTES_MAX:
            self._ways.popitem(last=False)

    def _note_death(self, error: BaseException) -> None:
        self._death = error
        self._on_effects()
