"""Settings of the pull connector: `kv_connector_extra_config`, typed and checked once.

{"host": "10.0.0.7", "port": 14600, "transports": ["local", "tcp"], "timers": {"ttl_s": 20},
 "turns": {"ttl_s": 480}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import msgspec

from baton.connectors.extra_config import FIELD, check_positive, parse_extra
from baton.core.config import ClusterSecret
from baton.core.errors import ConfigError
from baton.core.hosts import is_loopback
from baton.core.timers import Timers
from baton.transport.tcp.sealing import Integrity
from baton.transport.tcp.transport import TcpOptions

LOOPBACK = "127.0.0.1"


class TurnSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decode engine keeps what it has computed for the next turn's prefill. Needs kv_both on both sides."""

    ttl_s: float = 480.0  # Time from the end of an answer to the next question.
    min_tokens: int = 64  # Fewer are computed faster than fetched.
    pool_share_max: float = 0.5  # Share of the blocks; beyond it the oldest are given up.

    def __post_init__(self) -> None:
        if not self.ttl_s > 0:
            raise ConfigError("must be positive", field=f"{FIELD}.turns.ttl_s")
        if self.min_tokens < 1:
            raise ConfigError("must be at least 1", field=f"{FIELD}.turns.min_tokens")
        if not 0 < self.pool_share_max <= 1:
            raise ConfigError("must be in (0, 1]", field=f"{FIELD}.turns.pool_share_max")


class PullSettings(msgspec.Struct, frozen=True, kw_only=True):
    host: str = LOOPBACK  # Where the control channel and the data servers listen.
    port: int = 0  # Port of the control channel; 0: any free one. Peers learn it from tickets.
    advertise_host: str | None = (
        None  # The address for peers, if `host` is not reachable: NAT, or host 0.0.0.0.
    )
    advertise_port: int = 0  # What peers dial for the control channel; 0: the port that it listens on.
    # Port of the tcp transport: rank r listens on data_port + r. 0: each rank takes any free port.
    data_port: int = 0
    # What peers dial for `data_port` through a proxy or NAT: they reach rank r at data_advertise_port + r.
    data_advertise_host: str | None = None  # None: advertise_host, or host.
    data_advertise_port: int = 0  # 0: the port that the rank listens on.
    # Transports that this engine offers; as a reader it prefers the first. None: all that work here, best
    # first.
    transports: tuple[str, ...] | None = None
    # Protection of the tcp transport: "mac" notices changed bytes, "encrypt" also hides them, "off" (loopback
    # only) does neither. None: "mac" on the loopback, "encrypt" beyond it. The stronger setting of both ends
    # holds.
    integrity: Integrity | None = None
    convert_dtype: bool = True  # Read caches of another dtype, with a declared loss; false: refuse them.
    timers: Timers = Timers()
    # Let the host keep a block of all layers in one piece, where it can: fewer and longer runs to read.
    cross_layer_blocks: bool = False
    turns: TurnSettings | None = None  # None: nothing is kept for a next turn.
    shutdown_timeout_s: float = 5.0  # How long `shutdown` of a half waits for its threads.
    raises_user_errors: bool | None = None  # None: as the host can bear (see PullSchedulerHalf).

    def __post_init__(self) -> None:
        for name in ("port", "advertise_port", "data_port", "data_advertise_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ConfigError("must be in [0, 65535]", field=f"{FIELD}.{name}")
        names = self.transports
        if names is not None and (not names or len(set(names)) < len(names)):
            raise ConfigError("must name at least one transport, each once", field=f"{FIELD}.transports")
        check_positive(self, "shutdown_timeout_s")
        if self.advertise_host is None and self.host in ("0.0.0.0", "::"):
            raise ConfigError("is needed when host is a wildcard address", field=f"{FIELD}.advertise_host")

    def url_of_peer(self, host: str, port: int) -> str | None:
        """The control URL of a peer that a client has named; None, because clients may not name one here."""
        return None

    @property
    def reports_layers(self) -> bool:
        """Whether each layer of a step is announced as soon as it is computed. Only push does that."""
        return False

    def tcp_options(self, rank: int) -> TcpOptions:
        """Options of this rank. Raises ConfigError if its port is above 65535."""
        return TcpOptions(
            host=self.host,
            port=self.data_port + rank if self.data_port else 0,
            advertise_host=self.data_advertise_host or self.advertise_host,
            advertise_port=self.data_advertise_port + rank if self.data_advertise_port else 0,
            integrity=self.integrity,
        )

    @classmethod
    def parse(cls, extra: Mapping[str, Any], secret: ClusterSecret | None) -> Self:
        """Raises ConfigError naming the key."""
        if "checksum" in extra:
            raise ConfigError(
                "is now integrity: mac (default on the loopback), encrypt (default beyond it) or off",
                field=f"{FIELD}.checksum",
            )
        settings = parse_extra(cls, extra)
        if (secret is None or secret.is_generated) and not is_loopback(settings.host):
            why = "no other host has the generated secret of this user" if secret else "there is no secret"
            raise ConfigError(
                f"{settings.host!r} is reachable from other hosts, and {why}; set BATON_SECRET to the same "
                "value on all engines",
                field=f"{FIELD}.host",
            )
        return settings
