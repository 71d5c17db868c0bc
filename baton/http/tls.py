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


class ServerTls:
    """`context` is of all connections of a process. Raises ConfigError for files that do not fit."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self.context = _server_context(files)
        self._seen, self._look_at_s = _changed_at(files), 0.0

    def refresh(self, now_s: float) -> None:
        """Read the certificate and its key again if they have changed. Bad files change nothing."""
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_EVERY_S
        try:
            if (seen := _changed_at(self._files)) == self._seen:
                return
            _server_context(self._files)  # Raises before the context in use is changed.
            self.context.load_cert_chain(self._files.cert, self._files.key)
        except (ConfigError, OSError) as error:
            logger.error("the TLS certificate stays as it was: %s", error)
        else:
            self._seen = seen
            logger.info("read the TLS certificate again: %s", self._files.cert)


def client_context(ca: str | None) -> ssl.SSLContext:
    """`ca`: PEM file of the only authorities that are trusted; None: the system's. Raises ConfigError."""
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{ca}: {error}", field="engine_ca") from error


def _server_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{files.cert}, {files.key}: {error}", field="tls_cert") from error
    if files.client_ca is not None:
        try:
            context.load_verify_locations(files.client_ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"{files.client_ca}: {error}", field="tls_client_ca") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    return ""  # Else OpenSSL asks the terminal.


def _changed_at(files: TlsFiles) -> Sequence[int]:
    """Raises OSError."""
    return [os.stat(path).st_mtime_ns for path in (files.cert, files.key)]
