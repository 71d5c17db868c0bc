"""Limits and deadlines of the HTTP doors: one budget for each request, and one for the whole process."""

import msgspec

from baton.core.errors import ConfigError


class DoorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that the engine server and the router share. Raises ConfigError that names the field."""

    api_keys: tuple[str, ...] = ()  # Empty: no key is asked for.
    allowed_hosts: tuple[str, ...] = ()  # Names in the Host header besides loopback's; "*" allows all.
    max_connections: int = 4096  # Also at most a quarter of the process's file descriptors.
    header_s: float = 10.0  # For a connection's first byte up to the end of a request's headers.
    body_s: float = 30.0  # For a client to send its body.
    idle_s: float = 75.0  # Between two requests of a connection. Clients and proxies close idle ones earlier.
    max_body_bytes: int = 32 << 20
    inline_body_bytes: int = 4 << 20  # The JSON of larger bodies is first checked by a worker process.
    total_body_bytes: int = 256 << 20  # Of all bodies that are being read or parsed.
    max_token_ids: int = 1 << 20  # In one request.
    max_text_chars: int = 4 << 20  # Of one rendered template.
    render_s: float = 1.0  # Processor time for one chat template.
    admission_s: float = 10.0  # For all work on a request before the engine has it.

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, int | float) and not value > 0:
                raise ConfigError("must be positive", field=name)
        for key in self.api_keys:
            if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(
                    f"each key has at least {MIN_KEY_CHARS} printable ASCII characters without spaces; "
                    "for example: openssl rand -hex 32",
                    field="api_keys",
                )


MIN_KEY_CHARS = 8  # A shorter key is guessed over the network.
