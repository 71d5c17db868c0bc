"""Authentication of clients: the API keys and tokens that are accepted, and the tenant of each.

    [jwt]                                   tokens of an issuer; see `jwt_tokens.JwtSettings`
    issuer = "https://login.example/"
    audience = "baton"
    jwks_url = "https://login.example/.well-known/jwks.json"

    [tenants.search]                        keys and limits of one tenant
    keys = ["..."]
    requests_per_minute = 600
    prompt_tokens_per_minute = 1000000
    share = 2                               in the router's queue, compared with 1 of the others

    [default]                               limits of each tenant that has none of its own
    requests_per_minute = 60

Keys are compared by a keyed digest of each process, so the time of a comparison tells nothing about a key.
"""

import hashlib
import logging
import secrets
import stat
import tomllib
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path

import msgspec

from baton.core.errors import ConfigError
from baton.core.limited_file import read_limited
from baton.core.validation import explain
from baton.http.errors import ApiError
from baton.http.jwt_tokens import TENANT_CHARS_MAX, JwtSettings, JwtVerifier
from baton.http.registration import PATH as REGISTER_PATH
from baton.http.watched_files import WatchedFiles

logger = logging.getLogger(__name__)

MAX_KEY_FILE_BYTES = 1 << 16
MAX_AUTH_FILE_BYTES = 4 << 20  # Room for the keys of ten thousands of tenants.
MIN_KEY_CHARS = 8  # A shorter key is guessed over the network.
OPEN_PATHS = frozenset({"/health"})  # Load balancers and supervisors, which ask it, have no key.
STORAGES = ("redis://", "rediss://")
ReadFile = Callable[[str, str], str]  # Path and field; the file's text.


class Rate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None: no limit."""

    requests_per_minute: int | None = None
    prompt_tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        for name in Rate.__struct_fields__:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError("must be at least 1", field=name)

    @property
    def is_limited(self) -> bool:
        return self.requests_per_minute is not None or self.prompt_tokens_per_minute is not None


class Tenant(Rate, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keys: tuple[str, ...] = ()
    share: float | None = None  # None: 1.


class AuthSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of `--auth-file`, with the files that it names. Raises ConfigError that names the field."""

    jwt: JwtSettings | None = None
    tenants: dict[str, Tenant] = {}
    default: Rate = Rate()
    storage: str | None = None  # Where limits are counted: a Redis. None: in the router.

    def __post_init__(self) -> None:
        owners: dict[str, str] = {}
        for name, tenant in self.tenants.items():
            if not 0 < len(name) <= TENANT_CHARS_MAX:
                raise ConfigError(
                    f"{name[:20]!r} must have 1 to {TENANT_CHARS_MAX} characters", field="tenants"
                )
            if tenant.share is not None and not 0 < tenant.share < inf:
                raise ConfigError("must be a positive number", field=f"tenants.{name}.share")
            check_keys(tenant.keys, field=f"tenants.{name}.keys")
            for key in tenant.keys:
                if owners.setdefault(key, name) != name:
                    raise ConfigError(f"has a key of {owners[key]} too", field=f"tenants.{name}.keys")
        if self.storage is not None and not self.storage.startswith(STORAGES):
            raise ConfigError("must be redis://HOST:PORT/NUMBER or rediss://...", field="storage")

    @property
    def has_keys(self) -> bool:
        return any(tenant.keys for tenant in self.tenants.values())

    @property
    def shares(self) -> tuple[tuple[str, float], ...]:
        shares = ((name, tenant.share) for name, tenant in self.tenants.items())
        return tuple((name, share) for name, share in shares if share is not None)

    def rate_of(self, tenant: str) -> Rate:
        own = self.tenants.get(tenant)
        return own if own is not None and own.is_limited else self.default

    @property
    def is_limited(self) -> bool:
        return any(rate.is_limited for rate in (self.default, *self.tenants.values()))

    @classmethod
    def from_toml(cls, text: str, read_file: ReadFile) -> "AuthSettings":
        """Raises ConfigError. Files of `[jwt]`: `secret_file`, `key_file`."""
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            # The library's message may quote a line, and so a key.
            raise ConfigError("is not valid TOML", field="auth_file") from error
        if isinstance(issued := document.get("jwt"), dict):
            for named, field in (("secret_file", "secret"), ("key_file", "keys")):
                if field in issued:
                    raise ConfigError(f"unknown; use {named}", field=f"jwt.{field}")
                if isinstance(path := issued.pop(named, None), str):
                    issued[field] = read_file(path, f"jwt.{named}").strip()
        try:
            return msgspec.convert(document, cls)
        except msgspec.ValidationError as error:
            problem, path = explain(error, cls)
            raise ConfigError(problem, field=f"auth_file{path}") from error


NO_AUTH = AuthSettings()


class KeyFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Files whose keys replace those of the settings when they change. None: there is no file."""

    api_keys: str | None = None
    admin_keys: str | None = None
    register_keys: str | None = None
    auth: str | None = None  # See `AuthFile`.


NO_KEY_FILES = KeyFiles()


def read_secret(path: Path, max_bytes: int, field: str, *, is_public: bool = False) -> str:
    """Raises ConfigError."""
    content = read_limited(path, max_bytes, field=field)
    if not is_public and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        logger.warning("%s can be read by other users of this machine; chmod 600 it", path)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text", field=field) from error


def read_key_file(path: str, *, field: str) -> tuple[str, ...]:
    """Raises ConfigError, also for a file without a key."""
    keys = parse_api_keys(read_secret(Path(path), MAX_KEY_FILE_BYTES, field), field=field)
    if not keys:
        raise ConfigError(f"{path} has no key", field=field)
    return keys


def parse_api_keys(text: str, *, field: str) -> tuple[str, ...]:
    """Split a text of keys at white space and commas; lines that begin with # are comments.

    Raises ConfigError for a key that is too short or not printable ASCII.
    """
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    keys = tuple(key for line in lines for key in line.replace(",", " ").split())
    check_keys(keys, field=field)
    return keys


def check_keys(keys: Sequence[str], *, field: str) -> None:
    """Raises ConfigError."""
    for key in keys:
        if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"each key must have at least {MIN_KEY_CHARS} printable ASCII characters; "
                "for example: openssl rand -hex 32",
                field=field,
            )


def read_auth(file: str | None) -> AuthSettings:
    """Files that the file names are relative to it. Raises ConfigError."""
    if file is None:
        return NO_AUTH

    def read_file(name: str, field: str) -> str:
        is_public = field == "jwt.key_file"
        return read_secret(Path(file).parent / name, MAX_KEY_FILE_BYTES, field, is_public=is_public)

    return AuthSettings.from_toml(read_secret(Path(file), MAX_AUTH_FILE_BYTES, "auth_file"), read_file)


class AuthFile:
    """One process's tenants with their keys and limits, read again when the file changes.

    `[jwt]` and `storage` stay as they were at the start, and so do the shares of a queue.
    """

    def __init__(
        self, settings: AuthSettings, path: str | None = None, now_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        """`settings`: contents of the file at the start."""
        self._settings, self._path, self._now_s = settings, path, now_s
        self._watched = WatchedFiles([] if path is None else [path], are_read=False)

    @property
    def current(self) -> AuthSettings:
        if self._path is not None and self._watched.have_changed(self._now_s()):
            self._refresh(self._path)
        return self._settings

    def _refresh(self, path: str) -> None:
        """A bad file changes nothing."""
        before = self._settings
        try:
            read = read_auth(path)
        except ConfigError as error:
            logger.error("the tenants stay as they were: %s", error)
            return
        for name in ("jwt", "storage", "shares"):
            if getattr(read, name) != getattr(before, name):
                logger.warning("%s: changes of %s need a restart", path, name)
        read = msgspec.structs.replace(read, jwt=before.jwt, storage=before.storage)
        if read == before:
            return
        self._settings = read
        logger.info("read %s again: %d tenants", path, len(read.tenants))


class Caller(msgspec.Struct, frozen=True):
    """`tenant`: empty if the server accepts every client. `is_named`: it is more than the digest of a key."""

    tenant: str = ""
    is_named: bool = False


ANYONE = Caller()


class Authenticator:
    """Checks the clients of one port. If there is neither a key nor an issuer, every client is served.

    `api_keys` open everything, unless there are `admin_keys`, which alone open the administrator's pages. A
    tenant's keys and tokens never open these. `register_keys` open the path of registrations only.
    """

    def __init__(
        self,
        api_keys: Sequence[str] = (),
        *,
        admin_keys: Sequence[str] = (),
        register_keys: Sequence[str] = (),
        files: KeyFiles = NO_KEY_FILES,
        auth: AuthFile | None = None,
        verifier: JwtVerifier | None = None,
        is_admin: Callable[[str], bool] = lambda path: False,
        now_s: Callable[[], float] = lambda: 0.0,
        open_paths: frozenset[str] = OPEN_PATHS,
    ) -> None:
        """`is_admin`: whether a path is one of the administrator's. `now_s`: the loop's clock.

        `files`: they hold these keys and are read again when they change. `open_paths` need no key.
        """
        self._open_paths = open_paths
        self._salt = secrets.token_bytes(32)
        self._keys = {
            "api_keys": tuple(api_keys),
            "admin_keys": tuple(admin_keys),
            "register_keys": tuple(register_keys),
        }
        found = ((name, getattr(files, name)) for name in self._keys)
        self._files = {name: path for name, path in found if path is not None}
        self._watched = WatchedFiles(list(self._files.values()), are_read=False)
        self._auth = auth or AuthFile(NO_AUTH)
        self._verifier, self._is_admin, self._now_s = verifier, is_admin, now_s
        self._use_keys()
        # A file that loses its last key opens nothing.
        self._is_open = not self._callers and self._verifier is None
        self._is_admin_open = self._is_open and not self._admins

    def _use_keys(self) -> None:
        self._of_tenants = self._auth.current
        self._callers = {self._digest(key): Caller(_unnamed(key)) for key in self._keys["api_keys"]}
        self._admins = {self._digest(key): Caller() for key in self._keys["admin_keys"]}
        self._admins = self._admins or dict(self._callers)
        self._registrars = {self._digest(key) for key in self._keys["register_keys"]}
        self._callers |= {
            self._digest(key): Caller(name, True)
            for name, tenant in self._of_tenants.tenants.items()
            for key in tenant.keys
        }

    def _digest(self, key: str) -> bytes:
        return hashlib.blake2b(key.encode(), key=self._salt, digest_size=32).digest()

    def _refresh(self) -> None:
        """Read key files again that have changed. Bad files change nothing."""
        try:
            read = {name: read_key_file(path, field=path) for name, path in self._files.items()}
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
            return
        if self._keys | read != self._keys:
            self._keys |= read
            self._use_keys()
            logger.info("read the API keys again: %s", ", ".join(self._files.values()))

    def caller(self, path: str, headers: Mapping[str, str]) -> Caller:
        """Raises ApiError 401, or 503 while the keys of an issuer are fetched."""
        if self._watched.have_changed(self._now_s()):
            self._refresh()
        if self._auth.current is not self._of_tenants:
            self._use_keys()
            if self._is_open and self._callers:
                logger.warning("every client is still served: the first keys need a restart")
        if path in self._open_paths:
            return ANYONE
        is_admin = self._is_admin(path)
        if self._is_admin_open if is_admin else self._is_open:
            return ANYONE
        given = _credentials(headers)
        digest = self._digest(given)
        found = (self._admins if is_admin else self._callers).get(digest)
        if found is not None:
            return found
        if path == REGISTER_PATH and digest in self._registrars:
            return ANYONE
        if is_admin:
            raise ApiError(
                401,
                "a valid key of the administrator is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
            )
        if self._verifier is not None and given.count(".") == 2:
            return Caller(self._verifier.tenant_of(given, self._now_s()), True)
        raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")


def _credentials(headers: Mapping[str, str]) -> str:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return (given if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip()


def _unnamed(key: str) -> str:
    """The tenant of a key that belongs to none."""
    return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
