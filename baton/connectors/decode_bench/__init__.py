"""Synthetic KV, to measure decoding with long contexts without waiting for prefill."""

from baton.connectors.decode_bench.connector import BatonDecodeBenchConnector

__all__ = ["BatonDecodeBenchConnector"]
