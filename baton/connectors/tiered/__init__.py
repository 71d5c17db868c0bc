"""KV in several tiers: host memory, files, buckets, Redis."""

from baton.connectors.tiered.connector import BatonTieredConnector

__all__ = ["BatonTieredConnector"]
