"""TLS of servers and clients: contexts, whose files are read again when they change, and handshakes.

Call `refresh` before each new connection. Files that do not fit change nothing.
"""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from baton.core.errors import ConfigError
from baton.http.watched_files import WatchedFiles

logger = logging.getLogger(__name__)

# A server accepts as many at once; they must fit into the descriptors that are kept in reserve.
BACKLOG = 512
HANDSHAKES_MAX = 256  # Handshakes that are open at once at one port.
ACCEPT_AGAIN_S = 0.1


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of PEM files."""

    cert: str  # Certificate with its chain up to, and without, the root.
    key: str
    client_ca: str | None = None  # Clients need a certificate of it. None: they need none.

    @classmethod
    def of(cls, cert: str | None, key: str | None, client_ca: str | None) -> "TlsFiles | None":
        """The files of the options; None: no option is set. Raises ConfigError for a part of them."""
        if cert is not None and key is not None:
            return cls(cert=cert, key=key, client_ca=client_ca)
        if cert or key or client_ca:
            raise ConfigError("tls_cert and tls_key are needed together", field="tls_cert")
        return None


class ServerTls:
    """`context` is for all connections of a process. Raises ConfigError for files that do not fit."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._watched = WatchedFiles([path for path in (files.cert, files.key, files.client_ca) if path])
        self._newest = self.context = _server_context(files)
        self.context.sni_callback = self._use_newest

    def _use_newest(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called in each handshake. Servers keep the first context, whose authorities can only grow."""
        connection.context = self._newest

    def refresh(self, now_s: float) -> None:
        if not self._watched.have_changed(now_s):
            return
        try:
            self._newest = _server_context(self._files)
        except ConfigError as error:
            logger.error("the TLS certificate stays as it was: %s", error)
        else:
            logger.info("read the TLS certificate again: %s", self._files.cert)


class ClientTls:
    """Verifies servers, and gives those that ask for a certificate the one of `files`."""

    def __init__(self, ca: str | None, files: TlsFiles | None = None, *, field: str) -> None:
        """`ca`: PEM file of the only authorities that are trusted; None: the system's. `field` names it.

        Raises ConfigError for files that do not fit.
        """
        self._ca, self._files, self._field = ca, files, field
        own = () if files is None else (files.cert, files.key)
        self._watched = WatchedFiles([*own, *([] if ca is None else [ca])])
        self.context = self._made()

    def _made(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self._ca)
        except OSError as error:
            raise ConfigError(f"{self._ca}: {error}", field=self._field) from error
        if self._files is not None:
            _load(context, self._files)
        return context

    def refresh(self, now_s: float) -> bool:
        """Whether `context` is another one now."""
        if not self._watched.have_changed(now_s):
            return False
        try:
            self.context = self._made()
        except ConfigError as error:
            logger.error("the TLS certificate and authorities for https servers stay as they were: %s", error)
            return False
        return True


class Bound(Protocol):
    def fileno(self) -> int: ...


class TlsAcceptor:
    """Accepts connections at sockets, with a bound on the handshakes that are open.

    asyncio's own servers have none: clients that only connect would use up the descriptors. When there are
    HANDSHAKES_MAX, the oldest is ended: an honest client's takes milliseconds.
    """

    def __init__(
        self,
        sockets: Sequence[Bound],
        make: Callable[[], asyncio.BaseProtocol],
        tls: ServerTls,
        *,
        handshake_s: float,
    ) -> None:
        """The sockets are bound; the caller may close them. `make`: a connection, before its handshake."""
        self._make, self._tls, self._handshake_s = make, tls, handshake_s
        self._loop = asyncio.get_running_loop()
        self._open: dict[asyncio.Task[None], None] = {}  # The oldest first.
        self._sockets = [socket.socket(fileno=os.dup(one.fileno())) for one in sockets]
        for one in self._sockets:
            one.setblocking(False)
            one.listen(BACKLOG)
        self._accepting = [self._loop.create_task(self._accept(one)) for one in self._sockets]
        for task in self._accepting:
            task.add_done_callback(self._report_death)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                accepted, _ = await self._loop.sock_accept(listener)
            except OSError as error:  # No descriptors, for now; or the client has left already.
                logger.warning("a connection cannot be accepted: %s", error)
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            self._tls.refresh(self._loop.time())
            if len(self._open) >= HANDSHAKES_MAX:
                oldest = next(iter(self._open))
                del self._open[oldest]
                oldest.cancel()
            task = self._loop.create_task(self._shake_hands(accepted))
            self._open[task] = None
            task.add_done_callback(lambda done: self._open.pop(done, None))

    def _report_death(self, accepting: asyncio.Task[None]) -> None:
        if not accepting.cancelled():
            message = "a port with TLS accepts no more connections"
            self._loop.call_exception_handler({"message": message, "exception": accepting.exception()})

    async def _shake_hands(self, accepted: socket.socket) -> None:
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(
                self._make, accepted, ssl=self._tls.context, ssl_handshake_timeout=self._handshake_s
            )
        except OSError as error:  # The connection of a client failed; ssl.SSLError is an OSError, too.
            logger.debug("a TLS handshake has failed: %s", error)

    def close(self) -> None:
        """Accept no more."""
        for task in (*self._accepting, *self._open):
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._accepting, *self._open, return_exceptions=True)
        for one in self._sockets:
            one.close()


def _server_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if files.client_ca is not None:
        try:
            context.load_verify_locations(files.client_ca)
        except OSError as error:
            raise ConfigError(f"{files.client_ca}: {error}", field="tls_client_ca") from error
        context.verify_mode = ssl.CERT_REQUIRED
        # A session that is resumed would not show its certificate to authorities that have changed.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
    _load(context, files)
    return context


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Raises ConfigError."""
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    except OSError as error:  # ssl.SSLError is one.
        raise ConfigError(f"{files.cert}, {files.key}: {error}", field="tls_cert") from error


def _no_password() -> str:
    return ""  # Else OpenSSL asks the terminal.
