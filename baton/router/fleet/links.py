"""Links between the processes of a router, and between routers: one mechanism for all notes and loads.

    worker --link--+
    worker --link--+-- coordinator --link-- other routers

A note goes out by every link except the one that it came by. The load that goes out by a link is the sum of
this process's own and of those that came by the other links, so no process hears of its own requests. The
links form a tree, so nothing comes twice. A load that is lost is repeated with the next heartbeat. A link
accepts the notes of its type only; `processes/messages.py` and `peers.py` have the types.

Pure: the clock is an argument, and links move the notes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from baton.router.fleet.notes import EngineLoad, Load, Note
from baton.router.fleet.replica import Replica, sum_of
from baton.router.values.settings import EngineKey

# Least time between two loads, on each of the two ways: worker to coordinator, and back.
LOAD_EVERY_S = 0.005
HEARTBEAT_S = 0.3  # Most time between two loads. A process that is silent for much longer has died or hangs.
NOTHING = Load(0, [])


class Clock(Protocol):
    """What is used of an event loop."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[[], None], /) -> object: ...


class Link(Protocol):
    """The way to one other process, or to several that get the same."""

    load_every_s: float  # Least time between two loads.

    def send(self, note: Note) -> None:
        """Send the note, if the other side accepts notes of its type."""


@dataclass(slots=True)
class _Heard:
    load: Load = NOTHING  # The last one that came by the link.
    is_due: bool = False  # A load is to go out by it.


class Links:
    """Not thread-safe."""

    def __init__(self, replica: Replica, clock: Clock) -> None:
        self.replica, self._clock = replica, clock
        self.num_own: Callable[[], int] = lambda: 0  # Clients' requests in flight in this process.
        self._links: dict[Link, _Heard] = {}
        self._ended: dict[EngineKey, EngineLoad] = {}  # Counts of the processes that have ended.
        self._is_learn_due = self._is_beating = False

    @property
    def num_requests(self) -> int:
        """Clients' requests in flight in all processes of this router."""
        return self.num_own() + self.replica.num_requests_elsewhere

    def join(self, link: Link) -> None:
        self._links[link] = _Heard()
        self._send_load(link)
        if not self._is_beating:
            self._is_beating = True
            self._clock.call_later(HEARTBEAT_S, self._beat)

    def leave(self, link: Link) -> None:
        """The other side has ended, and its requests with it. Nothing happens if it has left before."""
        if (heard := self._links.pop(link, None)) is not None:
            rows = [
                msgspec.structs.replace(row, in_flight=0, num_queued_tokens=0, speeds=None)
                for row in heard.load.engines
            ]
            ended = sum_of([Load(0, [*self._ended.values()]), Load(0, rows)])
            self._ended = {row.engine: row for row in ended.engines}
            self._learn_soon()
            self.load_has_changed()

    def hear(self, note: Note, link: Link) -> None:
        """A note has come by the link."""
        if not isinstance(note, Load):
            self.replica.apply(note, self._clock.time())
            self.tell(note, but=link)
        elif (heard := self._links.get(link)) is not None:
            if note != heard.load:
                heard.load = note
                self.load_has_changed(but=link)
            self._learn_soon()

    def tell(self, note: Note, *, but: Link | None = None) -> None:
        """Send a note, after it has been applied here."""
        for link in self._links:
            if link is not but:
                link.send(note)

    def load_has_changed(self, *, but: Link | None = None) -> None:
        for link, heard in self._links.items():
            if not heard.is_due and link is not but:
                heard.is_due = True
                self._clock.call_later(link.load_every_s, partial(self._send_load, link))

    def _send_load(self, link: Link) -> None:
        if (to := self._links.get(link)) is not None:
            to.is_due = False
            link.send(sum_of([self.replica.load(self.num_own()), *self._heard(but=link)]))

    def _heard(self, *, but: Link | None = None) -> list[Load]:
        others = [heard.load for link, heard in self._links.items() if link is not but]
        return [Load(0, [*self._ended.values()]), *others]

    def _learn_soon(self) -> None:
        """Learn at once with one link. A coordinator chooses no engines: it learns as often as it tells."""
        if len(self._links) == 1:
            self._learn()
        elif not self._is_learn_due:
            self._is_learn_due = True
            self._clock.call_later(LOAD_EVERY_S, self._learn)

    def _learn(self) -> None:
        self._is_learn_due = False
        self.replica.apply(sum_of(self._heard()), self._clock.time())

    def _beat(self) -> None:
        """Repeat the loads: one may be lost, or have come before its engine was known."""
        self._is_beating = bool(self._links)
        if self._is_beating:
            self._clock.call_later(HEARTBEAT_S, self._beat)
            self._learn_soon()
            self.load_has_changed()
