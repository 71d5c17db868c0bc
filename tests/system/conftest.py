"""Fixtures for tests of the whole system."""

from tests.system.engine_fixtures import expected, model

__all__ = ["expected", "model"]
