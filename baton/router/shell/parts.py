"""The parts of every process of a router, whether it serves requests, watches the engines, or does both."""

from baton.http.tls import ClientTls
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.pairs import Pairs
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
        self.settings = settings
        self.fleet = Fleet(settings)
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
        if (admission := self.view.admission) is not None:
            self.metrics.waiting.set_function(lambda: admission.num_waiting)
        self.fleet.on_removed += [self.pairs.forget, self.metrics.forget]

    async def close(self) -> None:
        await self.introducer.close()
        await self.loans.close()
        await self.pool.close()
