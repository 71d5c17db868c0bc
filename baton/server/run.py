"""Lifecycle of `baton serve`, from binding the port to the last answer and the exit status.

    bind the port -> start the engine -> "ready" -> serve --signal------> drain, stop the engine, exit 0
                                                     |--engine died----> pending answers get 503, exit 1

The port is bound first, so that a port in use is reported before seconds go into loading a model. Clients
cannot connect until the engine is ready.

    leave    at most 3 s                  routers where it is registered learn that it leaves
    drain    at most drain_timeout_s      new requests and /health get 503, running ones finish, and lent
                                          blocks are returned
    stop     at most shutdown_timeout_s   the port is closed; running requests may still finish
    end                                   the engine is stopped, which ends every remaining answer

A second signal ends it at once.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import uvicorn
from starlette.applications import Starlette

from baton.core.config import EngineConfig
from baton.core.errors import ConfigError
from baton.engine.core.client import EngineClient
from baton.engine.text.tokenizer import Tokenizer
from baton.http.bodies import Bodies
from baton.http.connections import raise_descriptor_limit, server_config
from baton.http.gate import hosts_to_check
from baton.http.log_limit import limit_logs
from baton.http.settings import HttpSettings
from baton.http.tls import ServerTls, TlsAcceptor
from baton.http.watched_files import WatchedFiles
from baton.http.workers import WorkerPool
from baton.server.app import build_admin_app, build_app
from baton.server.connector_log import ConnectorLog
from baton.server.introduction import introduce
from baton.server.metrics import BuildConnectorMetrics, ServerMetrics
from baton.server.registration import Registrar
from baton.server.service import Service
from baton.server.settings import ServeSettings
from baton.server.tokens import PromptEncoder
from baton.server.transfer_ask import CheckParams
from baton.tracing import open_tracer

logger = logging.getLogger(__name__)

EXIT_STOPPED = 0
EXIT_ENGINE_DIED = 1
LAST_ANSWERS_S = 3.0  # Time to send answers after the engine has stopped.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Parts(NamedTuple):
    """Parts of `run` that tests replace, and what is read for it."""

    start_engine: Callable[[], Awaitable[EngineClient]]
    load_tokenizer: Callable[[], Tokenizer]
    check_params: CheckParams
    http: HttpSettings = HttpSettings()
    build_connector_metrics: BuildConnectorMetrics | None = None
    connector_log: ConnectorLog | None = None
    new_registrar: Callable[[str], Registrar | None] = lambda url: None  # Called in the event loop.
    places_lent: tuple[str, ...] = ()  # See `EngineCard`.
    otlp_traces_endpoint: str | None = None  # Where spans go; None: nothing is traced.


async def run(
    config: EngineConfig, settings: ServeSettings, parts: Parts, on_ready: Callable[[str], None]
) -> int:
    """Serve until a signal or the engine's death; return the exit status.

    Raises UserError, or the error of starting the engine.
    """
    raise_descriptor_limit()
    limit_logs("baton.server.errors")
    stop, hurry = asyncio.Event(), asyncio.Event()
    server: _Server | None = None
    tls = None if settings.tls is None else ServerTls(settings.tls)

    def on_signal() -> None:
        if stop.is_set() and server is not None:
            hurry.set()
            server.force_exit = True
        stop.set()

    workers = WorkerPool()
    with ExitStack() as stack:
        stack.callback(workers.close)
        listener = stack.enter_context(_bound_socket(settings.host, settings.port, "port"))
        admin_listener = None
        if settings.admin_port is not None:
            admin_listener = stack.enter_context(
                _bound_socket(settings.host, settings.admin_port, "admin_port")
            )
        stack.enter_context(_signals(on_signal))
        tokenizer = parts.load_tokenizer()
        encoder = PromptEncoder(tokenizer, config.model_config, workers, parts.http)
        stack.callback(encoder.close)
        await encoder.check_template()
        async with _running_engine(parts.start_engine, stop) as engine:
            if engine is None:
                return EXIT_STOPPED
            service = Service(
                engine=engine,
                model_config=config.model_config,
                tokenizer=tokenizer,
                encoder=encoder,
                bodies=Bodies(parts.http, workers),
                limits=parts.http,
                metrics=ServerMetrics(
                    config.model_config.served_model_name,
                    build_connector_metrics=parts.build_connector_metrics,
                    connector_log=parts.connector_log,
                ),
                check_params=parts.check_params,
                introduction=await introduce(
                    config, engine, lends=parts.places_lent, tokenizer=tokenizer.digest
                ),
                weights_root=None if settings.weights_root is None else Path(settings.weights_root),
            )
            hosts = hosts_to_check(settings.host, parts.http.allowed_hosts)
            if admin_listener is not None:
                service.admin_port = admin_listener.getsockname()[1]
            service.tracer = tracer = open_tracer("baton-engine", parts.otlp_traces_endpoint)
            app = build_app(service, checked_hosts=hosts)
            url = _url(settings, listener)
            registrar = parts.new_registrar(url)

            def started() -> None:
                on_ready(url)
                if registrar is not None:
                    registrar.start()

            server = _Server(app, settings, parts.http, tls, started)
            try:
                async with _admin_server(
                    build_admin_app(service, checked_hosts=hosts), settings, parts.http, tls, admin_listener
                ):
                    await _serve(server, service, listener, stop, hurry, settings, registrar)
            finally:
                if registrar is not None:
                    await registrar.close()
                if parts.connector_log is not None:
                    parts.connector_log.flush()
                if tracer is not None:
                    await asyncio.to_thread(tracer.close)
            return EXIT_ENGINE_DIED if server.engine_died else EXIT_STOPPED


@asynccontextmanager
async def _admin_server(
    app: Starlette,
    settings: ServeSettings,
    http: HttpSettings,
    tls: ServerTls | None,
    listener: socket.socket | None,
) -> AsyncIterator[None]:
    if listener is None:
        yield
        return
    server = _Server(app, settings, http, tls, lambda: None)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    logger.info("metrics and /baton/* are at %s", _url(settings, listener))
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)


async def _serve(
    server: "_Server",
    service: Service,
    listener: socket.socket,
    stop: asyncio.Event,
    hurry: asyncio.Event,
    settings: ServeSettings,
    registrar: Registrar | None,
) -> None:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    dying = asyncio.create_task(service.engine.wait_dead())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((serving, dying, stopping), return_when=asyncio.FIRST_COMPLETED)
        server.engine_died = dying.done()
        if server.engine_died:
            logger.error("the engine has died; the server ends")
        elif registrar is not None:
            await registrar.leave()
        service.is_draining = True
        if not server.engine_died and settings.drains_for_s > 0:
            await _drain(server, service, hurry, settings.drains_for_s)
            server.engine_died = service.engine.is_dead
        server.should_exit = True
        timeout_s = 0.0 if hurry.is_set() else settings.shutdown_timeout_s
        await asyncio.wait((serving,), timeout=timeout_s)
        if not serving.done():
            logger.warning("requests are still running after %g s; stopping the engine", timeout_s)
            await service.engine.close()
        await serving
    finally:
        for task in (serving, dying, stopping):
            task.cancel()
        await asyncio.gather(serving, dying, stopping, return_exceptions=True)


async def _drain(server: "_Server", service: Service, hurry: asyncio.Event, timeout_s: float) -> None:
    """Wait until no request runs and nothing is lent, or the time is up, the engine dead, or a second
    signal came.
    """
    logger.info(
        "draining for at most %g s: no new requests, running ones finish, lent blocks are returned", timeout_s
    )
    draining = asyncio.create_task(_finish_all(server, service.engine, timeout_s))
    interrupts = (asyncio.create_task(service.engine.wait_dead()), asyncio.create_task(hurry.wait()))
    try:
        await asyncio.wait((draining, *interrupts), return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            logger.warning("the drain was interrupted by a second signal or the engine's death")
        elif not draining.result():
            logger.warning("requests or lent blocks are left after a drain of %g s", timeout_s)
    finally:
        for task in (draining, *interrupts):
            task.cancel()
        await asyncio.gather(draining, *interrupts, return_exceptions=True)


async def _finish_all(server: "_Server", engine: EngineClient, timeout_s: float) -> bool:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    # New requests are refused. Requests first: a prefill may still lend blocks, which are then fetched.
    if running := server.running_requests():
        _, late = await asyncio.wait(running, timeout=timeout_s)
        if late:
            return False
    return await engine.drain(max(0.0, deadline_s - loop.time()))


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, and with a callback when it is ready."""

    def __init__(
        self,
        app: Starlette,
        settings: ServeSettings,
        http: HttpSettings,
        tls: ServerTls | None,
        on_started: Callable[[], None],
    ) -> None:
        super().__init__(
            server_config(
                app,
                http,
                log_config=None,  # Logging is configured already.
                lifespan="off",
                # A last resort: answers end by themselves once the engine has stopped.
                timeout_graceful_shutdown=int(settings.shutdown_timeout_s + LAST_ANSWERS_S) + 1,
            )
        )
        self.engine_died = False
        self._on_started = on_started
        self._tls, self._handshake_s = tls, http.header_s

    def running_requests(self) -> set[asyncio.Task[None]]:
        return set(self.server_state.tasks)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # `run` handles signals from before the engine is started.

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is None:
            await super().startup(sockets)
        else:
            await super().startup([])
            door = TlsAcceptor(sockets or (), self._new_connection, self._tls, handshake_s=self._handshake_s)
            self.servers.append(door)  # type: ignore[arg-type]  # uvicorn closes it, and waits for that.
        self._on_started()

    def _new_connection(self) -> asyncio.Protocol:
        """Make a connection as uvicorn does."""
        config = self.config
        return config.http_protocol_class(  # type: ignore[call-arg]
            config=config, server_state=self.server_state, app_state=self.lifespan.state
        )


@asynccontextmanager
async def _running_engine(
    start_engine: Callable[[], Awaitable[EngineClient]], stop: asyncio.Event
) -> AsyncIterator[EngineClient | None]:
    """Yield the engine, and close it afterwards. Yields None if stopped before the engine was ready."""
    starting = asyncio.ensure_future(start_engine())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not starting.done():
            starting.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
    if starting.cancelled():
        yield None
        return
    engine = starting.result()
    try:
        yield engine
    finally:
        await engine.close()


@contextmanager
def _bound_socket(host: str, port: int, field: str) -> Iterator[socket.socket]:
    """Bind a socket without listening yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"{host!r} is not an address of this machine: {error}", field="host") from error
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", field=field) from error
        yield listener


def _url(settings: ServeSettings, listener: socket.socket) -> str:
    scheme = "http" if settings.tls is None else "https"
    shown = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{shown}:{listener.getsockname()[1]}"


@contextmanager
def _signals(handler: Callable[[], None]) -> Iterator[None]:
    """Install the handler, and at SIGHUP look at files with keys and certificates.

    Only possible in the main thread; in others (tests) no signals are sent.
    """
    loop = asyncio.get_running_loop()
    installed = []
    with suppress(RuntimeError, ValueError):
        hears = {**dict.fromkeys(_STOP_SIGNALS, handler), signal.SIGHUP: WatchedFiles.look_now}
        for number, hear in hears.items():
            loop.add_signal_handler(number, hear)
            installed.append(number)
    try:
        yield
    finally:
        for number in installed:
            loop.remove_signal_handler(number)
