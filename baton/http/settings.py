"""Settings of the HTTP layer: limits and deadlines per request and per process."""

from collections.abc import Callable

import msgspec

from baton.core.errors import ConfigError
from baton.http.auth import NO_AUTH, NO_KEY_FILES, AuthFile, AuthSettings, KeyFiles


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The option `--limits` of `baton serve` and `baton route`. Raises ConfigError that names the field."""

    max_connections: int = 4096  # Also at most a quarter of the process's file descriptors.
    header_s: float = 10.0  # Time to send a request's headers. It starts when a connection is opened.
    body_s: float = 30.0  # Time for a client to send its body.
    idle_s: float = 75.0  # Time between a connection's requests. Clients and proxies close idle ones earlier.
    max_body_bytes: int = 32 << 20
    inline_body_bytes: int = 4 << 20  # A worker process checks the JSON of larger bodies first.
    total_body_bytes: int = 256 << 20  # Sum over all bodies that are being read or decoded.
    max_token_ids: int = 1 << 20  # Token ids in one request.
    max_text_chars: int = 4 << 20  # Length of one prompt, as its chat template renders it.
    render_s: float = 1.0  # Processor time for one chat template.
    admission_s: float = 10.0  # Time for all work on a request before the engine has it.

    def __post_init__(self) -> None:
        for name in HttpLimits.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ConfigError("must be positive", field=f"limits.{name}")

    @classmethod
    def from_json(cls, text: str) -> "HttpLimits":
        """Decode limits. Raises ConfigError, or msgspec.ValidationError that names the key."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError as error:
            raise ConfigError(f"is not JSON: {error}", field="limits") from error


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

    @classmethod
    def of(
        cls,
        limits: HttpLimits,
        *,
        api_keys: tuple[str, ...],
        allowed_hosts: str,
        admin_keys: tuple[str, ...] = (),
        register_keys: tuple[str, ...] = (),
        key_files: KeyFiles = NO_KEY_FILES,
        auth: AuthSettings = NO_AUTH,
    ) -> "HttpSettings":
        """Make the settings; `allowed_hosts` is a list separated by commas."""
        hosts = tuple(name.strip() for name in allowed_hosts.split(",") if name.strip())
        return cls(
            **msgspec.structs.asdict(limits),
            api_keys=api_keys,
            admin_keys=admin_keys,
            register_keys=register_keys,
            key_files=key_files,
            auth=auth,
            allowed_hosts=hosts,
        )
