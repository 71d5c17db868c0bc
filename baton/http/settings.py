"""Settings of the HTTP layer: limits and deadlines per request and per process."""

from collections.abc import Callable

import msgspec

from baton.core.errors import ConfigError
from baton.http.auth import NO_AUTH, NO_KEY_FILES, AuthFile, AuthSettings, KeyFiles


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The option `--limits` of `baton serve` and `baton route`. Raises ConfigError that names the field.

    max_connections: Open connections, also at most a quarter of the process's file descriptors. With more,
        the connection that has waited longest for a request is closed.
    header_s: Time to send a request's headers, from the opening of a connection. Then it is closed.
    body_s: Time for a client to send its body; then 408
    idle_s: Time between a connection's requests; then it is closed. Clients and proxies close idle ones
        earlier
    max_body_bytes: Size of a body; a larger one gets 413
    inline_body_bytes: Size above which a worker process checks the JSON of a body first
    total_body_bytes: Sum over all bodies that are being read or decoded; a further one gets 503 with
        Retry-After
    max_token_ids: Token ids in one request; more get 400
    max_text_chars: Length of one prompt, as its chat template renders it; a longer one gets 400
    render_s: Processor time for one chat template; then 400, and the worker process that renders is killed
    admission_s: Time to parse, render and encode a request, before the engine has it; then 503
    """

    max_connections: int = 4096
    header_s: float = 10.0
    body_s: float = 30.0
    idle_s: float = 75.0
    max_body_bytes: int = 32 << 20
    inline_body_bytes: int = 4 << 20
    total_body_bytes: int = 256 << 20
    max_token_ids: int = 1 << 20
    max_text_chars: int = 4 << 20
    render_s: float = 1.0
    admission_s: float = 10.0

    def __post_init__(self) -> None:
        for name in HttpLimits.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ConfigError("must be positive", field=f"limits.{name}")


class HttpSettings(HttpLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of the HTTP layer of one server."""

    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()  # Keys of the administrator's pages. Empty: `api_keys` open these, too.
    register_keys: tuple[str, ...] = ()  # Keys with which engines register; they open nothing else.
    key_files: KeyFiles = NO_KEY_FILES
    auth: AuthSettings = NO_AUTH
    allowed_hosts: tuple[str, ...] = ()  # Names in the Host header besides those of loopback; "*": any.

    @property
    def is_open(self) -> bool:
        """Whether a client needs neither key nor token."""
        return not (self.api_keys or self.auth.has_keys or self.auth.jwt)

    @property
    def may_limit(self) -> bool:
        """Whether a tenant has a limit, or may get one when the file is read again."""
        return self.auth.is_limited or self.key_files.auth is not None

    def auth_file(self, now_s: Callable[[], float]) -> AuthFile:
        """`now_s`: the loop's clock."""
        return AuthFile(self.auth, self.key_files.auth, now_s)
