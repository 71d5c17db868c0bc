"""Server-sent events for those that watch the fleet: one question each second for all of them.

    event: snapshot    all of it, once, when a viewer comes
    event: latest      each second
    event: end         the stream has lasted STREAM_S, or the router stops; the viewer may come again

Nothing is asked while there is no viewer. One that does not read misses seconds, and is dropped after SLOW_S.
"""

import asyncio
from collections.abc import Awaitable, Callable

from baton.http.errors import ApiError
from baton.router.operator.admin import Reply as Answer
from baton.router.shell.client_http import Incoming, Reply
from baton.router.shell.tasks import Tasks

EVERY_S = 1.0
VIEWERS_MAX = 16
STREAM_S = 900.0
SLOW_S = 10.0
SNAPSHOT, LATEST = "/fleet/snapshot", "/fleet/latest"
_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}


class _Viewer:
    """Implements `Handler`."""

    def __init__(self, reply: Reply, on_gone: Callable[["_Viewer"], None]) -> None:
        self.reply = reply
        self.is_ready = False  # The snapshot has been sent.
        self.paused_at_s: float | None = None
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self.ends_at_s = self._loop.time() + STREAM_S

    def send(self, data: bytes, *, is_last: bool = False) -> None:
        if not self.reply.has_ended:
            self.reply.write(data, is_last=is_last)
            self.reply.flush()

    # --- Handler

    def client_gone(self) -> None:
        self._on_gone(self)

    def pause(self) -> None:
        self.paused_at_s = self._loop.time()

    def resume(self) -> None:
        self.paused_at_s = None


class Feed:
    """Sends the fleet's state to all viewers. `ask` answers a GET of SNAPSHOT or LATEST. `close` it."""

    def __init__(self, ask: Callable[[str], Awaitable[Answer]]) -> None:
        self._ask = ask
        self._viewers: set[_Viewer] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._tasks = Tasks()
        self._loop = asyncio.get_running_loop()
        self._is_closed = False

    def join(self, incoming: Incoming, reply: Reply) -> None:
        if len(self._viewers) >= VIEWERS_MAX or self._is_closed:
            error = ApiError(503, f"{VIEWERS_MAX} viewers watch already", retry_after_s=10)
            return reply.refuse(error)
        viewer = _Viewer(reply, self._viewers.discard)
        reply.handler = viewer
        reply.start(200, _HEADERS)
        if incoming.method == "HEAD":
            return viewer.send(b"", is_last=True)
        viewer.send(b"retry: 2000\n\n")
        self._viewers.add(viewer)
        self._tasks.start(self._greet(viewer), "a viewer of the fleet gets no snapshot")
        if self._ticking is None or self._ticking.done():
            self._ticking = self._tasks.start(self._tick(), "the fleet's viewers get no events any more")
        return None

    async def _greet(self, viewer: _Viewer) -> None:
        event = await self._event("snapshot", SNAPSHOT)
        if viewer in self._viewers:
            viewer.send(event)
            viewer.is_ready = True

    async def _tick(self) -> None:
        """Send the latest state each second, as long as there are viewers."""
        while self._viewers:
            await asyncio.sleep(EVERY_S)
            self._drop_late()
            if ready := [one for one in self._viewers if one.is_ready and one.paused_at_s is None]:
                event = await self._event("latest", LATEST)
                for viewer in ready:
                    if viewer in self._viewers and viewer.paused_at_s is None:
                        viewer.send(event)

    def _drop_late(self) -> None:
        now_s = self._loop.time()
        for viewer in list(self._viewers):
            if viewer.paused_at_s is not None and now_s >= viewer.paused_at_s + SLOW_S:
                viewer.reply.abort()
                self._viewers.discard(viewer)
            elif now_s >= viewer.ends_at_s:
                self._end(viewer)

    async def _event(self, name: str, path: str) -> bytes:
        answer = await self._ask(path)
        if answer.status != 200:
            return b": no answer\n\n"  # Keeps the stream; the next second may have one.
        return b"event: %b\ndata: %b\n\n" % (name.encode(), answer.body)

    def _end(self, viewer: _Viewer) -> None:
        self._viewers.discard(viewer)
        viewer.send(b"event: end\ndata: {}\n\n", is_last=True)

    def end(self) -> None:
        """End all streams in order, and accept no others."""
        self._is_closed = True
        for viewer in list(self._viewers):
            self._end(viewer)

    async def close(self) -> None:
        self.end()
        await self._tasks.close()
