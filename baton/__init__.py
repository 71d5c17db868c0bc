"""Baton moves KV caches between LLM inference engines, safely and at the speed of the wire."""

__version__ = "0.1.0"
