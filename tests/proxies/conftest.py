"""Fixtures for tests of proxies."""

from tests.system.engine_fixtures import expected, model

__all__ = ["expected", "model"]
