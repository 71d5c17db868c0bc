"""What a tier asks of an eviction policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Admitted(Generic[K]):
    """The key is in."""

    left: K | None = None  # Who had to make room for it.


class EvictionPolicy(ABC, Generic[K]):
    """Up to `capacity` keys are in. They come by `admit`, and leave by another's `admit` or by `discard`."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self.capacity = capacity

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

    @abstractmethod
    def admit(self, key: K, can_leave: Callable[[K], bool]) -> Admitted[K] | None:
        """Let in a key that is not. None: everybody who is in has to stay, so nobody is added."""

    @abstractmethod
    def use(self, key: K) -> None:
        """A key that is in was asked for again."""

    @abstractmethod
    def refresh(self, keys: Iterable[K]) -> None:
        """Those of them that are in shall stay longest, the last one longest of all. Counts as no use."""

    @abstractmethod
    def discard(self, key: K) -> None:
        """A key that is in leaves for good: it is not remembered."""
