"""The life of `baton route`: from its ports to its exit status."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from baton.http.connections import raise_descriptor_limit, server_config
from baton.http.log_limit import limit_logs
from baton.router.settings import RouterSettings
from baton.router.shell.app import Router

EXIT_STOPPED = 0
EXIT_NOT_STARTED = 3  # uvicorn's.
LAST_STREAMS_S = 5  # For connections to close, once the router has drained.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: two servers may run in one process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    settings: RouterSettings, *, host: str, port: int, admin_port: int | None, log_config: dict[str, Any]
) -> int:
    """Returns the exit status after a signal. `admin_port`: for metrics, /fleet and the dashboard."""
    raise_descriptor_limit()
    limit_logs("baton.router.shell.app")
    router = Router(settings)
    common: dict[str, Any] = {
        "host": host,
        "log_config": log_config,
        "timeout_graceful_shutdown": LAST_STREAMS_S,
    }
    app = router.app(has_admin_port=admin_port is not None)
    servers = [_Server(server_config(app, settings.doors, port=port, **common))]
    if admin_port is not None:
        config = server_config(router.admin_app(), settings.doors, port=admin_port, lifespan="off", **common)
        servers.append(_Server(config))
    asyncio.run(_serve(router, servers, settings.drain_timeout_s))
    return EXIT_STOPPED if all(server.started for server in servers) else EXIT_NOT_STARTED


async def _serve(router: Router, servers: list[_Server], drain_timeout_s: float) -> None:
    """The first signal drains the router and then ends it; the second one ends it at once."""
    stop = asyncio.Event()

    def hear() -> None:
        if stop.is_set():
            router.end_requests()
            for server in servers:
                server.force_exit = True
        stop.set()

    async def end() -> None:
        await stop.wait()
        await router.drain(drain_timeout_s)
        for server in servers:
            server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, hear)
    ending = asyncio.create_task(end())
    try:
        await asyncio.gather(*(server.serve() for server in servers))
    finally:
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)
