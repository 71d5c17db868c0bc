"""Push: the consumer reads while the producer computes. Safety comes from pull: the ticket and the lease."""

from baton.connectors.push.announcer import PrefillAnnouncer
from baton.connectors.push.connector import BatonPushConnector, PushIdentity
from baton.connectors.push.settings import PushSettings

__all__ = ["BatonPushConnector", "PrefillAnnouncer", "PushIdentity", "PushSettings"]
