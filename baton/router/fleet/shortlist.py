"""The engines that a choice looks at: all of a small pool, a few of a large one.

    drawn   at random: a choice among a few of them is nearly as good as one among all (M. Mitzenmacher, The
            Power of Two Choices in Randomized Load Balancing, 2001)
    idle    without a request, the one that was looked at longest ago first: a draw at high load often has
            none (Y. Lu et al., Join-Idle-Queue, 2011)
    homes   for the prompt's prefix: the next ones on a ring of hashes (D. Karger et al., Consistent Hashing
            and Random Trees, 1997). An engine that leaves moves only its own prefixes

The draw is a function of the request's turn. The routers' processes have different turns, so they do not send
their requests to the same engine.
"""

from array import array
from bisect import bisect
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from typing import Generic, Protocol, TypeVar

SMALL = 16  # Largest pool of which all engines are looked at.
NUM_DRAWN, NUM_IDLE, NUM_HOMES = 8, 4, 4
_NUM_POINTS = 8  # Points of each engine on the ring.


class Listed(Protocol):
    """Attributes of an engine that a shortlist reads."""

    url: str
    is_removed: bool

    @property
    def load(self) -> int: ...


Engine = TypeVar("Engine", bound=Listed)


class Pool(Generic[Engine]):
    """The engines of one role that may serve a model."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines
        self.is_small = len(engines) <= SMALL

    def draw(self, turn: int) -> list[Engine]:
        """Engines drawn at random, some perhaps twice; all engines of a small pool."""
        if self.is_small:
            return list(self.engines)
        numbers = array("H", blake2b(turn.to_bytes(8, signed=True), digest_size=2 * NUM_DRAWN).digest())
        return [self.engines[number % len(self.engines)] for number in numbers]

    def homes(self, prefix_key: bytes) -> Sequence[Engine]:
        """The engines that get the prompts with this prefix; all engines of a small pool."""
        if self.is_small:
            return self.engines
        start = bisect(self._ring, (int.from_bytes(blake2b(prefix_key, digest_size=8).digest()), 0))
        around = [*self._ring[start : start + NUM_HOMES], *self._ring[:NUM_HOMES]]
        return [self.engines[number] for _, number in around[:NUM_HOMES]]

    @cached_property
    def _ring(self) -> list[tuple[int, int]]:
        """Points in order, with the indices of their engines."""
        hashes = [blake2b(one.url.encode(), digest_size=8 * _NUM_POINTS).digest() for one in self.engines]
        return sorted((point, number) for number, found in enumerate(hashes) for point in array("Q", found))


class Idle(Generic[Engine]):
    """Engines of one role that had no request when they were added."""

    def __init__(self, engines: Iterable[Engine]) -> None:
        self._engines: OrderedDict[Engine, None] = OrderedDict.fromkeys(engines)

    def add(self, engine: Engine) -> None:
        self._engines[engine] = None

    def look(self) -> list[Engine]:
        """Some engines that have no request now. It drops the engines that have one, or are removed."""
        found = []
        for engine in list(islice(self._engines, NUM_IDLE)):
            if engine.load or engine.is_removed:
                del self._engines[engine]
            else:
                self._engines.move_to_end(engine)
                found.append(engine)
        return found
