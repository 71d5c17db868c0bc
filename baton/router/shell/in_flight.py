"""Requests in flight of one process: counts them, reports their timelines, and ends them in a drain."""

import asyncio
import logging
import time

from baton.router.request.spans import spans_of
from baton.router.request.timeline import RecentRequests, Recorder, RequestTimeline
from baton.router.shell.access_log import AccessLog
from baton.router.shell.client_http import Incoming, Reply
from baton.router.shell.metrics import RouterMetrics
from baton.router.shell.rate_limiting import Charging
from baton.router.shell.requests import RequestDriver
from baton.router.values.settings import RouterSettings
from baton.tracing import open_tracer

logger = logging.getLogger(__name__)


class InFlight:
    """Made and used in one event loop; `close` it. A request is known by its recorder."""

    def __init__(self, settings: RouterSettings, metrics: RouterMetrics) -> None:
        """Raises OSError if the access log cannot be opened."""
        self._metrics, self._loop = metrics, asyncio.get_running_loop()
        self._tracer = open_tracer("baton-router", settings.otlp_traces_endpoint)
        self._access_log = None if settings.access_log is None else AccessLog(settings.access_log)
        self._recent = RecentRequests()
        self._handlers: dict[Recorder, RequestDriver | Charging] = {}
        self.num_requests = 0
        self.is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def begin(self, incoming: Incoming, request_id: str) -> Recorder:
        received_at_s, span = incoming.received_at_s, None
        if self._tracer is not None:
            span = self._tracer.begin(incoming.headers, incoming.path)
        arrived_at_s = time.time() - (self._loop.time() - received_at_s)
        recorder = Recorder(
            request_id,
            incoming.method,
            incoming.path,
            received_at_s=received_at_s,
            arrived_at_s=arrived_at_s,
            span=span,
        )
        self._recent.begin(recorder)
        self.num_requests += 1
        self._is_idle.clear()
        self._metrics.of("in_flight").set(self.num_requests)
        return recorder

    def hand_to(self, handler: RequestDriver | Charging, recorder: Recorder, reply: Reply) -> None:
        """Pass what the client does, and the end of the router, to this handler."""
        self._handlers[recorder] = handler
        reply.handler = handler

    def take_from_handler(self, recorder: Recorder, reply: Reply) -> None:
        del self._handlers[recorder]
        reply.handler = None

    def end(self, recorder: Recorder, status: int) -> None:
        """`status`: what the client got."""
        self._handlers.pop(recorder, None)
        timeline = recorder.timeline(status, self._loop.time())
        self._recent.end(recorder, timeline)
        if self._access_log is not None:
            self._access_log.write(timeline)
        if timeline.span is not None and self._tracer is not None:
            self._tracer.export(spans_of(timeline))
        self.num_requests -= 1
        if not self.num_requests:
            self._is_idle.set()
        self._metrics.of("in_flight").set(self.num_requests)
        self._metrics.observe(timeline)

    def find(self, request_id: str | None) -> list[RequestTimeline]:
        """Timelines of the recent requests with this id, or of all. See `RecentRequests`."""
        return self._recent.find(request_id, self._loop.time())

    async def drain(self, timeout_s: float) -> None:
        """Return when the running requests have ended, by themselves or after that time."""
        self.is_draining = True
        logger.info("draining for at most %g s: %d requests are running", timeout_s, self.num_requests)
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            logger.warning("%d requests are ended after %g s", self.num_requests, timeout_s)
        self.stop()

    def stop(self) -> None:
        """End all requests."""
        self.is_draining = True
        for handler in list(self._handlers.values()):
            handler.stop()

    async def close(self) -> None:
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        if self._access_log is not None:
            self._access_log.close()
