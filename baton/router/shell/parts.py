"""The parts of every process of a router, whether it serves requests, watches the engines, or does both."""

import asyncio

from baton.http.tls import ClientTls
from baton.router.fleet.engine import Engine
from baton.router.fleet.fleet import DRAIN_GRACE_S, Fleet
from baton.router.fleet.links import Links
from baton.router.fleet.pairs import Pairs
from baton.router.fleet.replica import Replica
from baton.router.fleet.turns import TurnTable
from baton.router.fleet.view import FleetView
from baton.router.shell.asking import Asker
from baton.router.shell.engine_http import EnginePool
from baton.router.shell.engine_keys import EngineKeys
from baton.router.shell.introductions import Introducer
from baton.router.shell.loans import LoanReturns
from baton.router.shell.metrics import RouterMetrics
from baton.router.values.settings import RouterSettings


class Parts:
    """Made and used in one event loop; `close` ends what is under way."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings, self._loop = settings, asyncio.get_running_loop()
        self.fleet = Fleet(settings)
        self.fleet.on_drain = self._watch_drain
        self.pairs = Pairs()
        self.metrics = RouterMetrics(self.fleet, self.pairs)
        self.pool = EnginePool(
            connect_s=settings.timeouts.connect_s,
            keepalive_s=settings.timeouts.keepalive_s,
            tls=None
            if settings.engine_ca is None and settings.tls is None
            else ClientTls(settings.engine_ca, settings.tls, field="engine_ca"),
        )
        self.engine_keys = EngineKeys(settings)
        self.asker = Asker(self.pool, self.engine_keys.key_for)
        timeout_s = settings.probe.timeout_s
        self.introducer = Introducer(self.asker, self.fleet, timeout_s)
        self.loans = LoanReturns(self.asker, self.metrics, timeout_s)
        turns = TurnTable(self.loans.take_back, lambda note: self.fleet.tell(note))
        self.introducer.on_updated = turns.forget
        self.view = FleetView(settings, self.fleet, self.pairs, turns)
        self.links = Links(Replica(self.view), self._loop)
        self.fleet.tell, self.fleet.on_load = self.links.tell, self.links.load_has_changed
        if (admission := self.view.admission) is not None:
            self.metrics.of("waiting").set_function(lambda: admission.num_waiting)
        self.fleet.on_removed += [self.pairs.forget, self.metrics.forget]

    def _watch_drain(self, engine: Engine) -> None:
        """Let other engines continue its streams soon, and end what is left at the drain's deadline."""
        until_s, loop, fleet = engine.drain_until_s, self._loop, self.fleet
        assert until_s is not None
        loop.call_at(min(until_s, loop.time() + DRAIN_GRACE_S), fleet.hand_over, engine, until_s)
        loop.call_at(until_s, fleet.end_drain, engine, until_s)

    async def close(self) -> None:
        await self.introducer.close()
        await self.loans.close()
        await self.pool.close()
