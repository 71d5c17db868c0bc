"""Runs the kit under pytest, from an author's own tests:

from baton.testing import connector_suite

TestMine = connector_suite("my.module:MyConnector", extra_config={"path": "/tmp/kv"})
"""

from typing import Any

from baton.testing.contract.case import ConnectorCase
from baton.testing.contract.check import EXAMPLES, check_connector


def connector_suite(
    path: str | type[Any], *, examples: int = EXAMPLES, seed: int | None = 0, **case: Any
) -> type:
    """Return a test class for pytest to collect. `case`: fields of ConnectorCase."""
    if isinstance(path, type):
        path = f"{path.__module__}:{path.__qualname__}"
    of_connector = ConnectorCase(path=path, **case)

    class ConnectorSuite:
        def test_it_keeps_the_contract(self) -> None:
            check_connector(of_connector, examples=examples, seed=seed).raise_if_broken()

    ConnectorSuite.__qualname__ = ConnectorSuite.__name__ = f"Test{of_connector.name}"
    return ConnectorSuite
