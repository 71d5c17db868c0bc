"""KV that nobody computed, to measure decoding at long contexts without waiting for prefill."""

from baton.connectors.decode_bench.connector import BatonDecodeBenchConnector

__all__ = ["BatonDecodeBenchConnector"]
