"""Interface of eviction policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Admitted(Generic[K]):
    """The key was admitted."""

    evicted: K | None = None  # The key that was evicted for it.


class EvictionPolicy(ABC, Generic[K]):
    """Holds up to `capacity` keys. Keys enter by `admit`; they leave by another's `admit` or by `discard`.

    Between calls `capacity` may be changed, but not below the number of keys that are held.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self.capacity = capacity

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

    @abstractmethod
    def admit(self, key: K, can_leave: Callable[[K], bool], parent: K | None = None) -> Admitted[K] | None:
        """Admits a new key. None: the tier is full and no key can leave, so nothing changes.

        `parent`: the key before it in its prompt, without which it cannot be found.
        """

    @abstractmethod
    def use(self, key: K) -> None:
        """A key that is held was used again."""

    @abstractmethod
    def refresh(self, keys: Iterable[K]) -> None:
        """Makes the keys that are held stay longest, the last one longest. Not counted as a use."""

    @abstractmethod
    def discard(self, key: K) -> None:
        """Removes a key that is held, without remembering it."""
