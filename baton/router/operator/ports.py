"""The ports of one process of a router: each has a listener, and all check their clients in the same way."""

import asyncio
from collections.abc import Callable

from baton.http.bodies import Bodies
from baton.http.workers import WorkerPool
from baton.router.operator.client_auth import ClientAuth
from baton.router.operator.control import is_admin_path
from baton.router.shell.client_http import Incoming, Listener, Reply
from baton.router.shell.timers import TimerWheel
from baton.router.values.settings import RouterSettings


class Ports:
    """Made and used in one event loop. `start` it, and `close` it."""

    def __init__(self, settings: RouterSettings, wheel: TimerWheel, on_fault: Callable[[str], None]) -> None:
        """`on_fault`: see `ClientAuth`."""
        self._settings, self._wheel = settings, wheel
        self.auth = settings.doors.auth_file(asyncio.get_running_loop().time)
        self._client_auth = ClientAuth(settings, self.auth, on_fault)
        self._workers = WorkerPool()
        self._bodies = Bodies(settings.doors, self._workers)
        self.listeners: list[Listener] = []

    def start(self) -> None:
        self._client_auth.start()

    async def listen(
        self,
        serve: Callable[[Incoming, Reply], None],
        host: str,
        port: int,
        *,
        is_admin: Callable[[str], bool] = is_admin_path,
        is_shared: bool = False,
    ) -> int:
        """Open a port and return it. Raises OSError.

        `is_admin`: whether a path is one of the administrator's. `is_shared`: with other processes.
        """
        settings = self._settings
        listener = Listener(
            serve,
            settings.doors,
            self._client_auth.checks(is_admin),
            self._bodies,
            self._wheel,
            reads_in_s=settings.timeouts.idle_s,
            tls=settings.tls,
        )
        self.listeners.append(listener)
        return await listener.listen(host, port, is_shared=is_shared)

    async def close(self, timeout_s: float) -> None:
        """`timeout_s`: how long answers may take to reach their clients."""
        await asyncio.gather(*(listener.close(timeout_s) for listener in self.listeners))
        await self._client_auth.close()
        self._workers.close()
