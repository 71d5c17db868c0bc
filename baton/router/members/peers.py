"""The link to other routers: publishes this router's load and turns, and reads theirs (ZeroMQ PUB, SUB)."""

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any

import zmq
import zmq.asyncio

from baton.core.errors import PeerError
from baton.router.fleet.links import NOTHING, Links
from baton.router.fleet.notes import Load, Note
from baton.router.fleet.peers import PeerNote, Peers
from baton.router.shell.tasks import Tasks
from baton.router.values.settings import PeerSettings

logger = logging.getLogger(__name__)

MESSAGES_MAX = 10_000  # Messages that wait to be sent, or to be read.
MESSAGE_BYTES_MAX = 4 << 20
BREATH = 64  # Messages that are read before others have a turn.


class PeerLink:
    """Implements `Link`. Made and used in one event loop. `start` it, and `close` it."""

    load_every_s = 0.01  # If it is 0.1, two routers send bursts to the same engine (docs/log.md).

    def __init__(self, settings: PeerSettings, links: Links) -> None:
        self._settings, self._links = settings, links
        self.peers = Peers(secrets.token_hex(8), settings.secret.encode())
        self._loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        self._out: zmq.asyncio.Socket | None = None
        self._in: zmq.asyncio.Socket | None = None
        self._tasks = Tasks()
        self.endpoint = settings.bind

    def start(self) -> None:
        """Raises OSError."""
        self._out, self._in = self._context.socket(zmq.PUB), self._context.socket(zmq.SUB)
        for one in (self._out, self._in):
            one.setsockopt(zmq.LINGER, 0)
            one.setsockopt(zmq.IPV6, 1)
        self._out.setsockopt(zmq.SNDHWM, MESSAGES_MAX)
        self._in.setsockopt(zmq.RCVHWM, MESSAGES_MAX)
        self._in.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        self._in.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        try:
            self._out.bind(self._settings.bind)
        except zmq.ZMQError as error:
            raise OSError(f"cannot publish to other routers on {self._settings.bind}: {error}") from error
        self._in.setsockopt(zmq.SUBSCRIBE, b"")
        for endpoint in self._settings.routers:
            self._in.connect(endpoint)
        self._tasks.start(self._read(), "the link to other routers has ended; this router goes on alone")
        self.endpoint = self._out.getsockopt_string(zmq.LAST_ENDPOINT)
        self._links.join(self)

    def connect(self, endpoint: str) -> None:
        """Read from one more router."""
        assert self._in is not None
        self._in.connect(endpoint)

    def send(self, note: Note) -> None:
        """Send a load, or a note about a turn. The other routers see everything else themselves."""
        if isinstance(note, Load) and self.peers.expire(self._loop.time()):
            logger.warning("another router is silent; its requests count as ended")
            self._links.hear(self.peers.load(), self)
        if isinstance(note, PeerNote):
            self._publish([note])

    async def close(self) -> None:
        """Tell the other routers that nothing is left to do here, and end."""
        self._links.leave(self)
        if self._out is not None:
            self._publish([NOTHING])
        await self._tasks.close()
        for one in (self._out, self._in):
            if one is not None:
                one.close()
        self._context.term()

    def snapshot(self) -> list[Mapping[str, Any]]:
        return self.peers.snapshot(self._loop.time())

    def _publish(self, notes: list[PeerNote]) -> None:
        assert self._out is not None
        try:
            # What a slow router does not take is dropped there.
            zmq.Socket.send(self._out, self.peers.write(notes, time.time()), zmq.NOBLOCK)
        except zmq.Again:
            logger.warning("a message to other routers is dropped: too many wait")

    async def _read(self) -> None:
        assert self._in is not None
        num_read = 0
        while True:
            data = await self._in.recv()
            try:
                self._hear(data)
            except PeerError as error:
                logger.error("a router at one of %s: %s", ", ".join(self._settings.routers), error)
            num_read += 1
            if num_read % BREATH == 0:
                await asyncio.sleep(0)

    def _hear(self, data: bytes) -> None:
        """Raises PeerError."""
        news = self.peers.read(data, time.time(), self._loop.time())
        for turn in news.turns:
            self._links.hear(turn, self)
        self._links.hear(self.peers.load(), self)
        if news.is_new:
            logger.info("another router is there")
            self._publish([*self._links.replica.kept_turns()])
