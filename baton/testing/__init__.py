"""The conformance kit: test suites for connectors and transports, Baton's own and others. Needs pytest."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.testing.contract.damage import cut_files
    from baton.testing.contract.suite import connector_suite

__all__ = ["connector_suite", "cut_files"]


def __getattr__(name: str) -> Any:
    """Loaded when asked for: the fuzzers beside it need neither torch nor Hypothesis."""
    if name == "connector_suite":
        from baton.testing.contract.suite import connector_suite

        return connector_suite
    if name == "cut_files":
        from baton.testing.contract.damage import cut_files

        return cut_files
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
