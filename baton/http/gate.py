"""Checks of a request's headers: API key, Host, content type and bytes.

401   no valid API key or token in `Authorization: Bearer KEY` or `X-API-Key: KEY`, where any are configured;
      /health needs none
403   a Host header that is not this machine's name (a web page can make a browser send requests to
      loopback under its own name: DNS rebinding)
415   a POST whose content type is not JSON (a web page may send other types without asking: CSRF), nor a form
      for a path that takes forms; a form that a page of another origin sends gets 403
400   a header with bytes that are not ASCII
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import msgspec

from baton.core import hosts
from baton.http.auth import NO_KEY_FILES, Authenticator, Caller, KeyFiles
from baton.http.errors import ApiError
from baton.http.forms import is_form

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_ANY_HOST = "*"
_ABSOLUTE = re.compile(rb"https?://([^/?#]+)(.*)", re.IGNORECASE)


class Checks:
    """`allowed_hosts` are names besides loopback's own; None: the Host header is not checked."""

    def __init__(
        self,
        authenticator: Authenticator | None = None,
        *,
        allowed_hosts: Sequence[str] | None = None,
        form_paths: Collection[str] = (),
    ) -> None:
        """No `authenticator`: every client is served. `form_paths`: those that take multipart forms."""
        self._form_paths = form_paths
        self._authenticator = authenticator or Authenticator()
        self._hosts = None
        if allowed_hosts is not None and _ANY_HOST not in allowed_hosts:
            self._hosts = frozenset(name.lower() for name in allowed_hosts)

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> Caller:
        """Raise ApiError. `headers`: names in lower case, values ASCII; see `ascii_headers`."""
        if self._hosts is not None:
            self._check_host(headers.get("host"), self._hosts)
        caller = self._authenticator.caller(path, headers)
        if method in _WITH_BODY and path in self._form_paths and is_form(headers):
            if "origin" in headers and not is_own_origin(headers):
                raise ApiError(403, "a page of another origin may not send forms", code="cross_origin")
        elif method in _WITH_BODY:
            self._check_content_type(headers.get("content-type", ""))
        return caller

    def _check_host(self, host: str | None, allowed: frozenset[str]) -> None:
        if host is None:
            return  # HTTP/1.0; browsers always send it.
        name = _name_of(host)
        if name not in allowed and not is_loopback(name):
            raise ApiError(
                403,
                f"{host!r} is not a name of this server, which listens on loopback; add it to allowed_hosts",
                param="Host",
                code="host_not_allowed",
            )

    def _check_content_type(self, content_type: str) -> None:
        media_type = content_type.partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise ApiError(
                415,
                f"must be application/json, is {media_type[:100]!r}",
                param="Content-Type",
                code="unsupported_media_type",
            )


def is_own_origin(headers: Mapping[str, str]) -> bool:
    """Whether a browser's Origin, which it adds to each POST, is this server's."""
    return headers.get("origin", "").rpartition("//")[2].lower() == headers.get("host", "").lower()


class Gate:
    """ASGI middleware that makes the checks. The keys are as in `Authenticator`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[str] = (),
        admin_keys: Sequence[str] = (),
        files: KeyFiles = NO_KEY_FILES,
        is_admin: Callable[[str], bool] = lambda path: False,
        allowed_hosts: Sequence[str] | None = None,
    ) -> None:
        self._app = app
        authenticator = Authenticator(
            api_keys, admin_keys=admin_keys, files=files, is_admin=is_admin, now_s=time.monotonic
        )
        self._checks = Checks(authenticator, allowed_hosts=allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            authority, path = origin_form(scope.get("raw_path") or b"")
            if authority is not None:
                headers = [line for line in scope["headers"] if line[0] != b"host"]
                scope = {**scope, "raw_path": path, "path": unquote(path.decode("latin-1"))}
                scope["headers"] = [(b"host", authority), *headers]
            try:
                self._checks.check(scope["method"], scope["path"], ascii_headers(scope["headers"]))
            except ApiError as error:
                await send_error(send, error)
                return
        await self._app(scope, receive, send)


def origin_form(target: bytes) -> tuple[bytes | None, bytes]:
    """Return the authority of a target in absolute form, which replaces `Host`, and its path and query.

    Servers have to accept that form (RFC 9112, 3.2.2). None: the target has another form.
    """
    whole = _ABSOLUTE.fullmatch(target)
    if whole is None:
        return None, target
    return whole[1], whole[2] if whole[2].startswith(b"/") else b"/" + whole[2]


def ascii_headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers with names in lower case; of equal names the first. Raise ApiError."""
    headers: dict[str, str] = {}
    for name, value in raw:
        if not (name.isascii() and value.isascii()):
            raise ApiError(400, "must be ASCII", param=name.decode("latin-1"), code="bad_header")
        headers.setdefault(name.decode().lower(), value.decode())
    return headers


def is_loopback(name: str) -> bool:
    """Return whether a host name or address can only mean this machine."""
    return name.endswith(".localhost") or hosts.is_loopback(name)


def hosts_to_check(bound_host: str, allowed_hosts: Sequence[str]) -> Sequence[str] | None:
    """Return `allowed_hosts` for `Gate`: only a server on loopback checks the Host header."""
    return allowed_hosts if is_loopback(bound_host) else None


async def send_error(send: Send, error: ApiError) -> None:
    body = msgspec.json.encode(error.body())
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers()}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _name_of(host: str) -> str:
    """Return the host name in lower case, without the port and the brackets of IPv6."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
