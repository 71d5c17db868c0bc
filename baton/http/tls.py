"""TLS contexts of servers and clients. Certificates of a server are read again when their files change."""

import logging
import os
import ssl
from collections.abc import Sequence

import msgspec

from baton.core.errors import ConfigError

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 10.0  # At most, at the files of a server.


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of PEM files."""

    cert: str  # With the chain up to, and without, the root.
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


class _Tls:
    """`context` is of all connections of a process. Raises ConfigError for files that do not fit."""

    def __init__(self, context: ssl.SSLContext, files: TlsFiles | None) -> None:
        self.context, self._files = context, files
        self._seen = None if files is None else _load(context, files)
        self._look_at_s = 0.0

    def refresh(self, now_s: float) -> None:
        """Read the certificate and its key again if they have changed. Bad files change nothing.

        Call it before each new connection.
        """
        if self._files is None or now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_EVERY_S
        try:
            if (seen := _changed_at(self._files)) == self._seen:
                return
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._files)  # Raises before `context` is changed.
            _load(self.context, self._files)
        except (ConfigError, OSError) as error:
            logger.error("the TLS certificate stays as it was: %s", error)
        else:
            self._seen = seen
            logger.info("read the TLS certificate again: %s", self._files.cert)


class ServerTls(_Tls):
    def __init__(self, files: TlsFiles) -> None:
        super().__init__(_server_context(files), files)


class ClientTls(_Tls):
    """Verifies servers, and gives those that ask for a certificate the one of `files`."""

    def __init__(self, ca: str | None, files: TlsFiles | None = None, *, field: str) -> None:
        """`ca`: PEM file of the only authorities that are trusted; None: the system's. `field` names it."""
        try:
            context = ssl.create_default_context(cafile=ca)
        except OSError as error:
            raise ConfigError(f"{ca}: {error}", field=field) from error
        super().__init__(context, files)


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
    return context


def _load(context: ssl.SSLContext, files: TlsFiles) -> Sequence[int]:
    """Return when the files were changed. Raises ConfigError."""
    try:
        seen = _changed_at(files)  # First: a change during the next line is read next time.
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    except OSError as error:  # ssl.SSLError is one.
        raise ConfigError(f"{files.cert}, {files.key}: {error}", field="tls_cert") from error
    return seen


def _no_password() -> str:
    return ""  # Else OpenSSL asks the terminal.


def _changed_at(files: TlsFiles) -> Sequence[int]:
    """Raises OSError."""
    return [os.stat(path).st_mtime_ns for path in (files.cert, files.key)]
