"""Connectors with one deliberate fault each, derived from the correct one; `rule` is the rule that they
break.
"""

from collections.abc import Callable
from typing import Any

from tests.testing.sound import MemoryConnector, MemoryScheduler
from tests.testing.sound_groups import GroupsConnector, GroupsScheduler
from tests.testing.sound_pair import PairConnector, PairScheduler

_BASES = {GroupsScheduler: GroupsConnector, PairScheduler: PairConnector}


def breaks(rule: str, **settings: Any) -> Callable[[type], Any]:
    """Replace a faulty half by the connector that has it. `settings`: of the connector, and of its search."""

    def connector(half: type) -> Any:
        base = next((base for kind, base in _BASES.items() if issubclass(half, kind)), MemoryConnector)
        side = "scheduler_kind" if issubclass(half, MemoryScheduler) else "worker_kind"
        members = {"__module__": half.__module__, "__doc__": half.__doc__, "rule": rule, side: half}
        return type(half.__name__, (base,), members | settings)

    return connector
