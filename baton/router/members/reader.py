"""Reads the sources of members while the router runs, and carries out what `values.members` decides."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from math import inf
from typing import Literal, Protocol

import msgspec

from baton.core.errors import BatonError, UserError
from baton.http.registration import TTL_S
from baton.router.fleet.engine import Engine
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.notes import Drains, Joined
from baton.router.members.probes import Prober
from baton.router.shell.metrics import RouterMetrics
from baton.router.shell.tasks import Tasks
from baton.router.values.members import (
    ROLES,
    Hold,
    Join,
    Leave,
    Listing,
    Member,
    Membership,
    Order,
    Registrations,
)
from baton.router.values.settings import EngineKey, Role, RouterSettings

logger = logging.getLogger(__name__)

RETRY_FIRST_S = 0.5
RETRY_MAX_S = 10.0
LOOK_S = 1.0  # Time between two looks at the registrations' times, and at members that are held.
_ONE_WAY: dict[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}
REFUSED_MAX = 16  # Registrations that are shown. Clients choose their names.
OPTIONS, REGISTRATIONS = "options", "registrations"


class SourceFailed(BatonError):
    """A source cannot be read now. Its last members stay, and it is read again."""


class SourceState(msgspec.Struct):
    """How a source was read last. degraded: some of its entries cannot be read, the others count."""

    name: str
    state: Literal["unread", "up", "degraded", "failed"] = "unread"
    members: int = 0  # Number of members that the source named last.
    skipped: Mapping[str, str] = {}  # Entries that cannot be read, and why.
    reason: str | None = None  # Why it has failed.


class Source(Protocol):
    name: str
    silent_after_s: float  # A source that is silent for so long has failed. inf: it reports only changes.

    def members(self) -> AsyncGenerator[Listing, None]:
        """All of its members, each time that it knows them anew. Raises SourceFailed, UserError.

        An entry that cannot be read fails by itself: see `read_entries`.
        """


class RegistrationSource:
    """Engines that register by themselves, see `baton.http.registration`. Implements `Source`."""

    name, silent_after_s = REGISTRATIONS, inf

    def __init__(self) -> None:
        self._registrations = Registrations()
        self._refused: dict[str, tuple[str, float]] = {}  # Why, and until when it is shown.
        self._has_changed = asyncio.Event()

    def note(self, member: Member, ttl_s: float) -> None:
        if self._registrations.note(member, ttl_s, asyncio.get_running_loop().time()):
            self._has_changed.set()

    def refuse(self, instance: str, why: str) -> None:
        """A registration that cannot be read: shown until its next one is due."""
        self._refused.pop(instance, None)
        while len(self._refused) >= REFUSED_MAX:
            del self._refused[next(iter(self._refused))]
        self._refused[instance] = why, asyncio.get_running_loop().time() + TTL_S
        self._has_changed.set()

    async def members(self) -> AsyncGenerator[Listing, None]:
        loop = asyncio.get_running_loop()
        while True:
            over = [one for one, (_, until_s) in self._refused.items() if until_s <= loop.time()]
            for one in over:
                del self._refused[one]
            if self._registrations.expire(loop.time(), LOOK_S) or over or self._has_changed.is_set():
                self._has_changed.clear()
                skipped = {one: why for one, (why, _) in self._refused.items()}
                yield Listing(self._registrations.members, skipped)
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._has_changed.wait()
            except TimeoutError:
                pass


class Members:
    """Used in one event loop. `start` it when the prober runs, and `close` it."""

    def __init__(
        self,
        settings: RouterSettings,
        fleet: Fleet,
        prober: Prober,
        metrics: RouterMetrics,
        sources: Sequence[Source],
        on_fault: Callable[[str], None],
    ) -> None:
        """`on_fault`: a task that reads a source has ended with a defect."""
        self._fleet, self._prober, self._metrics = fleet, prober, metrics
        self._drain_s = settings.drain_timeout_s
        self._loop = asyncio.get_running_loop()
        self.registrations = RegistrationSource()
        self._sources: list[Source] = [*sources, self.registrations]
        first = frozenset(engine.member for engine in fleet.engines)
        self._membership = Membership([*(one.name for one in self._sources), OPTIONS], first)
        self._options = frozenset(Member(role, url) for role in ROLES for url in settings.option_urls(role))
        self._tasks = Tasks(on_fault)
        self._timer: asyncio.TimerHandle | None = None
        self._states = {one.name: SourceState(one.name) for one in self._sources}

    def start(self) -> None:
        self._hear(OPTIONS, self._options)
        for one in self._sources:
            fault = f"the task that reads the members of {one.name} has ended"
            self._tasks.start(self._watch(one), fault)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.close()

    async def reload(self) -> None:
        """Read every source anew."""
        logger.info("reading the members of the fleet anew: %s", self._shown_sources())
        await self.close()
        self.start()

    def _shown_sources(self) -> str:
        return ", ".join(one.name for one in self._sources)

    async def _watch(self, source: Source) -> None:
        pause_s, state = RETRY_FIRST_S, self._states[source.name]
        while True:
            try:
                async with aclosing(source.members()) as found:
                    while True:
                        limit_s = source.silent_after_s
                        async with asyncio.timeout(None if limit_s == inf else limit_s):
                            listing = await anext(found)
                        self._take(listing, state, source is self.registrations)
                        pause_s = RETRY_FIRST_S
            except StopAsyncIteration:
                return
            except TimeoutError:
                why = f"nothing was heard for {source.silent_after_s:g} s"
            except (SourceFailed, UserError) as error:
                why = str(error)
            self._metrics.of("source_failures", source.name).inc()
            if why != state.reason:
                logger.error("%s: %s; the last members stay", source.name, why)
            state.state, state.reason = "failed", why
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_MAX_S)

    def _take(self, listing: Listing, state: SourceState, may_be_empty: bool) -> None:
        """Raises SourceFailed if no entry can be read."""
        skipped = dict(sorted(listing.skipped.items()))
        self._metrics.of("source_skipped_entries", state.name).set(len(skipped))
        for name, why in skipped.items() - state.skipped.items():
            logger.warning("%s: the entry %s is skipped: %s", state.name, name, why)
        state.skipped = skipped
        if skipped and not listing.members and not may_be_empty:
            raise SourceFailed("no entry can be read: " + "; ".join(map(": ".join, skipped.items())))
        if state.reason is not None:
            logger.info("%s: members can be read again", state.name)
        state.state, state.reason = "degraded" if skipped else "up", None
        state.members = len(listing.members)
        self._hear(state.name, listing.members)

    def sources(self) -> list[SourceState]:
        """Return the sources that the router reads, for /status."""
        return list(self._states.values())

    # --- Orders

    def _hear(self, source: str, members: Iterable[Member]) -> None:
        self._carry_out(self._membership.hear(source, members, self._loop.time(), self._serving), source)
        self._metrics.of("source_members", source).set(self._membership.named_by(source))

    def _look(self) -> None:
        self._carry_out(self._membership.look(self._loop.time(), self._serving), "others serve")

    @property
    def _serving(self) -> set[EngineKey]:
        return {engine.key for engine in self._fleet.engines if engine.is_eligible}

    def _carry_out(self, orders: Sequence[Order], why: str) -> list[str]:
        """Return what was done."""
        done = []
        for order in orders:
            match order:
                case Join(member):
                    known = self._fleet.find(member.key)
                    engine = self._fleet.join(member, self._loop.time())
                    self._fleet.tell(Joined(member))
                    if known is None:
                        self._prober.watch(engine)
                    self._metrics.of("member_changes", "joined").inc()
                case Leave(key):
                    if (leaving := self._fleet.find(key)) is not None:
                        logger.info("%s engine %s leaves: %s", *key, why)
                        done.append(self.drain(leaving, self._drain_s, is_leaving=True))
                    self._metrics.of("member_changes", "left").inc()
                case Hold(key):
                    logger.warning(
                        "no source names the %s engine %s; it stays, as one of the last of its role",
                        *key,
                    )
                    self._metrics.of("member_changes", "held").inc()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._membership.held:
            at_s = min(self._loop.time() + LOOK_S, self._membership.held_until_s)
            self._timer = self._loop.call_at(at_s, self._look)
        return done

    def drain(self, engine: Engine, timeout_s: float, *, is_leaving: bool) -> str:
        """Return what was done."""
        self._fleet.drain(engine, self._loop.time() + timeout_s, is_leaving=is_leaving)
        self._fleet.tell(Drains(engine.key, timeout_s, is_leaving))
        node, what = node_of(engine), f"{engine.role}_instances"
        if engine.is_removed:
            return f"Removed {node} from {what}."
        then = f", and is then removed from {what}" if engine.is_leaving else ""
        return f"{node} drains {engine.load} requests for at most {timeout_s:g} s{then}."

    # --- The administrator

    async def add(self, member: Member) -> Engine:
        """Raises UserError."""
        known = self._fleet.engines
        engine = self._fleet.add(member, self._loop.time())
        self._fleet.tell(Joined(member))
        if engine not in known:
            await self._prober.probe(engine)
            if not engine.is_up:
                self.drain(engine, 0.0, is_leaving=True)
                why = f"{engine.last_error}; start the engine first"
                raise UserError(f"{engine.url} does not serve: {why}", field="instance")
            self._prober.watch(engine)
        self._carry_out(self._membership.add(member, self._loop.time(), self._serving), "the administrator")
        return engine

    def remove(self, engine: Engine, timeout_s: float) -> str:
        done = self.drain(engine, timeout_s, is_leaving=True)
        orders = self._membership.remove(engine.key, self._loop.time(), self._serving)
        self._carry_out([order for order in orders if order != Leave(engine.key)], "the administrator")
        return done

    def change_role(self, engine: Engine, role: Role, timeout_s: float) -> list[str]:
        """Drain the engine in its present role, and let it join in the other one. Return what was done.

        Raises UserError.
        """
        kv_role = None if engine.introduction is None else engine.introduction.kv_role
        if kv_role in _ONE_WAY.values() and kv_role != _ONE_WAY[role]:
            raise UserError(f"{engine.url} is a {kv_role}; start it as kv_both", field="type")
        drained = self.drain(engine, timeout_s, is_leaving=True)
        orders = self._membership.change_role(engine.url, role, self._loop.time(), self._serving)
        self._carry_out([order for order in orders if order != Leave(engine.key)], "the administrator")
        return [drained, f"Added {node_of(engine)} to {role}_instances."]


def node_of(engine: Engine) -> str:
    """The engine's address in the form of vLLM's proxies: host:port."""
    return engine.url.removeprefix("http://")
