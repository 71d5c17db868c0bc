"""Offload: KV that an engine has computed, kept in host memory for when it is asked for again."""

from baton.connectors.offload.connector import BatonOffloadConnector

__all__ = ["BatonOffloadConnector"]
