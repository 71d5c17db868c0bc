"""Offload: keeps computed KV in host memory for later requests."""

from baton.connectors.offload.connector import BatonOffloadConnector

__all__ = ["BatonOffloadConnector"]
