"""The host of a handoff, and the keys of its tickets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from baton.connectors.host_view import HostView
from baton.connectors.pull.settings import PullSettings
from baton.core.config import ClusterSecret
from baton.core.errors import ConfigError

TICKET_KEY_PURPOSE = "baton.ticket.1"


class EngineIdentity(HostView, frozen=True, kw_only=True):
    has_peers: ClassVar[bool] = True
    settings_kind: ClassVar[type[PullSettings]] = PullSettings

    settings: PullSettings
    does_push: bool = False  # The connector understands introductions.

    @classmethod
    def parse(cls, extra: Mapping[str, Any], secret: ClusterSecret | None) -> PullSettings:
        return cls.settings_kind.parse(extra, secret)

    def __post_init__(self) -> None:
        if self.buffer_device not in (None, "cpu", self.device):
            raise ConfigError(
                f"must be cpu or {self.device}, where the KV cache lies; is {self.buffer_device!r}",
                field="kv_transfer_config.kv_buffer_device",
            )

    @property
    def has_host_mirror(self) -> bool:
        """Whether peers see a copy of the cache in host memory (`host_mirror`)."""
        return self.buffer_device == "cpu" and self.device != "cpu"

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(group.window for group in self.groups)

    @property
    def state_groups(self) -> tuple[int, ...]:
        """Indices of the groups of layers with a recurrent state."""
        return tuple(index for index, group in enumerate(self.groups) if group.is_state)

    @property
    def ticket_key(self) -> bytes | None:
        """Signs tickets and introductions."""
        return self.secret.derive(TICKET_KEY_PURPOSE) if self.secret is not None else None

    @property
    def previous_ticket_key(self) -> bytes | None:
        """Ticket key of the secret that is being replaced: it is accepted, and signs nothing."""
        if self.secret is None or self.secret.previous is None:
            return None
        return self.secret.derive_all(TICKET_KEY_PURPOSE)[1]
