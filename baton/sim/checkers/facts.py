"""Facts that checkers of both kinds of worlds compare with what engines do."""

from collections.abc import Sequence
from typing import Protocol

from baton.core.timers import Timers
from baton.sim.kernel.world import World


class Pool(Protocol):
    @property
    def generation(self) -> Sequence[int]:
        """Of each block: how often it was freed. A block with another generation has another content."""

    def is_held(self, block_id: int) -> bool: ...


class Read(Protocol):
    """A copy under way."""

    @property
    def number(self) -> int: ...
    @property
    def consumer(self) -> "Host": ...
    @property
    def targets(self) -> Sequence[int]: ...
    @property
    def target_generations(self) -> Sequence[int]:
        """When it was posted."""


class Reads(Protocol):
    @property
    def live(self) -> Sequence[Read]:
        """Reads that can still write."""


class Cluster(Protocol):
    @property
    def reads(self) -> Reads: ...


class Host(Protocol):
    """One incarnation of an engine."""

    @property
    def name(self) -> str: ...
    @property
    def cluster(self) -> Cluster: ...
    @property
    def pool(self) -> Pool: ...
    @property
    def timers(self) -> Timers: ...
    @property
    def world(self) -> World: ...
