"""Settings of the push connector: those of pull, and how early a producer announces what is ready.

{"stream": "layer", "host": "10.0.0.7", "transports": ["local", "tcp"]}
{"allowed_peers": ["10.0.0.7:14600"]}
"""

from __future__ import annotations

from typing import Literal

from baton.connectors.extra_config import FIELD
from baton.connectors.pull.settings import PullSettings
from baton.core.errors import ConfigError, PeerError
from baton.core.hosts import bracketed
from baton.transport.control.channel import check_url

Stream = Literal["off", "chunk", "layer"]


class PushSettings(PullSettings, frozen=True, kw_only=True):
    """`stream` is for producers; a consumer reads whatever is announced.

    off: when the prefill has ended. chunk: after each step of it. layer: after each layer of each step, which
    costs the rank some ten microseconds a layer and is worth it where one step computes most of a prompt.
    """

    stream: Stream = "chunk"
    # Producers that a client may name (remote_host, remote_port) without a signature: "host:port" of their
    # control channels, an IPv6 address in brackets. A proxy of vLLM's push example needs it.
    allowed_peers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for peer in self.allowed_peers:
            try:
                check_url(f"tcp://{peer}")
            except PeerError as error:
                raise ConfigError(f"{peer!r} is no host:port", field=f"{FIELD}.allowed_peers") from error

    @property
    def reports_layers(self) -> bool:
        return self.stream == "layer"

    def url_of_peer(self, host: str, port: int) -> str | None:
        """The control URL of a peer that a client has named; None if the client may not name it."""
        peer = f"{bracketed(host)}:{port}"
        return f"tcp://{peer}" if peer in self.allowed_peers else None
