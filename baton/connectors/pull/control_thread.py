"""The thin shell around an agent: one thread that owns the control channel and wakes when something is due.

    frame --decode--> agent.receive      agent.take_envelopes --encode--> frame      deadline --> agent.wake
                          |
                          +-- effects for the engine's thread --> on_effects

The engine's thread and this one share the agent under one lock, held as long as a machine takes to answer.
A long engine step delays nothing here: leases are renewed while the model computes.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable

from baton.connectors.pull.agent import PullAgent
from baton.contract import ConnectorDead
from baton.core.errors import PeerError, TransferError
from baton.core.ids import Address
from baton.protocol.messages import Envelope, decode_envelope, encode_envelope
from baton.transport.control import ControlChannel, Destination
from baton.transport.threads import join_all, start_owned_thread

logger = logging.getLogger(__name__)

SLEEP_MAX_S = 60.0
GOODBYE_S = 0.05  # For the last frames to leave; a peer that misses them waits for its deadline.
ROUTES_MAX = 4096  # Peers whose way we remember; the one unused for longest goes first.


class ControlThread:
    """Owns `channel` from `start` on; `close` ends both."""

    def __init__(
        self,
        agent: PullAgent,
        lock: threading.Lock,
        channel: ControlChannel,
        clock: Callable[[], float],
        *,
        on_effects: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_effects` is called on this thread, without the lock, when the agent has effects to take, or
        when the thread has died."""
        self._agent = agent
        self._lock = lock
        self._channel = channel
        self._clock = clock
        self._on_effects = on_effects
        self._routes: OrderedDict[Address, Destination] = OrderedDict()
        self._closing = False
        self._death: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._sleeps_until = float("inf")
        self.num_bad_frames = 0

    @property
    def url(self) -> str:
        return self._channel.url

    def start(self) -> None:
        assert self._thread is None, "started once"
        self._thread = start_owned_thread("baton-control", self._run, on_death=self._note_death)

    def route(self, peer: Address, url: str) -> None:
        """With the lock held: where a peer listens, from its signed ticket."""
        self._remember(peer, url)

    def flush(self) -> None:
        """With the lock held: wake the thread if it sleeps on something to send, or beyond a deadline."""
        if self._agent.has_envelopes or self._agent.next_deadline < self._sleeps_until:
            self._channel.wake()

    def raise_if_dead(self) -> None:
        """For the owner, each step: without this thread no lease is kept."""
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
            with self._lock:
                self._agent.wake(self._clock())
                has_effects = self._agent.has_effects
            if has_effects:
                self._on_effects()  # Which may have something to send, and soon.
            with self._lock:
                now = self._clock()
                outgoing = [(e, self._routes.get(e.target)) for e in self._agent.take_envelopes()]
                self._sleeps_until = min(self._agent.next_deadline, now + SLEEP_MAX_S)
                sleep_s = max(0.0, self._sleeps_until - now)
            for envelope, route in outgoing:
                self._send(envelope, route)
            for received in self._channel.poll(sleep_s):
                self._receive(received.route, received.frame)
        self._say_goodbye()

    def _say_goodbye(self) -> None:
        """What a shutdown still has to say (loans released) goes out if it goes out at once."""
        with self._lock:
            outgoing = [(e, self._routes.get(e.target)) for e in self._agent.take_envelopes()]
        for envelope, route in outgoing:
            self._send(envelope, route)
        if outgoing:
            self._channel.poll(GOODBYE_S)

    def _receive(self, route: Destination, frame: bytes) -> None:
        try:
            envelope = decode_envelope(frame)
        except PeerError as error:
            self.num_bad_frames += 1
            # The first, second, fourth, ...: a peer that sends nothing else must not fill the log.
            is_news = self.num_bad_frames & (self.num_bad_frames - 1) == 0
            level = logging.WARNING if is_news else logging.DEBUG
            logger.log(level, "dropped a control frame, number %d: %s", self.num_bad_frames, error)
            return
        with self._lock:
            # A url from a ticket stays; a connection that came in dies with its peer.
            if not isinstance(self._routes.get(envelope.sender), str):
                self._remember(envelope.sender, route)
            self._agent.receive(envelope, self._clock())

    def _send(self, envelope: Envelope, route: Destination | None) -> None:
        if route is None:
            logger.debug("no way to %s; dropped what it would have been told", envelope.target)
            return  # As a network might: whoever waits for it asks again.
        try:
            self._channel.send(route, encode_envelope(envelope))
        except (PeerError, TransferError) as error:
            logger.warning("cannot send to %s: %s", envelope.target.engine_id, error)

    def _remember(self, peer: Address, route: Destination) -> None:
        self._routes[peer] = route
        self._routes.move_to_end(peer)
        if len(self._routes) > ROUTES_MAX:
            self._routes.popitem(last=False)

    def _note_death(self, error: BaseException) -> None:
        self._death = error
        self._on_effects()
