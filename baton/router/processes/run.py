"""The life of `baton route`: from its ports to its exit status."""

import asyncio
import gc
import logging
import logging.config
import signal
from collections.abc import Callable, Sequence
from typing import Any

import uvloop

from baton.http.connections import raise_descriptor_limit
from baton.http.log_limit import limit_logs
from baton.router.members.reader import Source
from baton.router.processes.app import CLOSING_S, LOGS_LIMITED, Router
from baton.router.processes.coordinator import Coordinator
from baton.router.processes.workers import NotStarted
from baton.router.values.settings import RouterSettings

logger = logging.getLogger(__name__)

ENGINES_PER_WORKER = 4
WORKERS_OF_MEMBERS = 4
EXIT_STOPPED = 0
EXIT_NOT_STARTED = 3
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def num_workers_for(settings: RouterSettings, num_cores: int) -> int:
    """One process for each ENGINES_PER_WORKER engines, on a core each. Others may join."""
    num_engines = len(settings.prefill_urls) + len(settings.decode_urls)
    num_wanted = max(-(-num_engines // ENGINES_PER_WORKER), WORKERS_OF_MEMBERS if settings.has_sources else 1)
    return max(1, min(num_cores, num_wanted))


def serve(
    settings: RouterSettings,
    *,
    host: str,
    port: int,
    admin_port: int | None,
    num_workers: int,
    log_config: dict[str, Any],
    sources: Sequence[Source] = (),
) -> int:
    """Returns the exit status after a signal. `admin_port`: for metrics, /fleet and the page.

    SIGHUP: the sources of members are read anew.
    """
    logging.config.dictConfig(log_config)
    raise_descriptor_limit()
    limit_logs(*LOGS_LIMITED)

    def make() -> Router | Coordinator:
        if num_workers == 1:
            return Router(settings, log_config=log_config, sources=sources)
        return Coordinator(settings, num_workers, log_config, sources)

    status: int = uvloop.run(_serve(make, settings, host, port, admin_port))
    return status


async def _serve(
    make: Callable[[], Router | Coordinator],
    settings: RouterSettings,
    host: str,
    port: int,
    admin_port: int | None,
) -> int:
    """The first signal drains the router and then ends it; the second one ends it at once."""
    router = make()
    is_told = asyncio.Event()

    def hear() -> None:
        if is_told.is_set():
            router.end_requests()
        is_told.set()

    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        if not reloads:
            reloads.add(task := asyncio.create_task(router.reload()))
            task.add_done_callback(reloads.discard)

    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, hear)
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        try:
            bound = await router.open(host, port, admin_port)
        except (OSError, NotStarted) as error:
            logger.error("cannot listen on %s port %d: %s", host, port, error)
            return EXIT_NOT_STARTED
        # Objects that exist now live as long as the process; the collector need not visit them again. No
        # collection before it: a start leaves no garbage, and to look for it takes 35 ms.
        gc.freeze()
        scheme = "http" if settings.tls is None else "https"
        logger.info("listening on %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, bound)
        await is_told.wait()
        await router.drain(settings.drain_timeout_s)
        return EXIT_STOPPED
    finally:
        await router.close(CLOSING_S)
        for number in (*_STOP_SIGNALS, signal.SIGHUP):
            loop.remove_signal_handler(number)
