"""Updates of the weights: one engine at any moment, or all engines in a row.

Weights are a number. 0 is what all engines boot with. Each update takes new weights or goes back to earlier
ones, and names them as the world does: by digest, by version, by both, or not at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial

from lab.sim.kernel.process import Process
from lab.sim.kernel.world import World

UNNAMED = 0.2  # Updates to weights without a name.
ROLLBACKS = 0.4  # Updates to earlier weights, if there are any.
ROLLING = 0.5  # Updates of all engines.
GAPS_S = (0.0, 0.3, 2.0)  # Time between two engines.
AGAIN_S = 5.0  # Time after the faults between two attempts to bring an engine to the last weights.
LATE_S = 40.0  # An update of before may come so late, to an engine that stood still.


class Updates(ABC):
    first = "weights"  # Digest of weights 0.

    def __init__(self, world: World, hosts: Mapping[str, Process]) -> None:
        self._world, self._rng, self._hosts = world, world.rng_of_updates, hosts
        self.happen = world.faults.updates > 0
        self._naming = self._rng.choice(["digest", "version", "both"]) if self.happen else "digest"
        self._unnamed: set[int] = set()
        self._latest = 0
        self.at_boot = 0  # Weights in the folder that engines boot from.

    @abstractmethod
    def begin(self, name: str, weights: int) -> None:
        """The engine of this name is to take these weights, if it is alive."""

    @abstractmethod
    def is_at(self, name: str, weights: int) -> bool:
        """The engine has these weights, and no update is under way there."""

    def named(self, weights: int) -> tuple[str, str]:
        """(digest, version): digest of the weights, or of those before where only the version is known."""
        digest = f"weights {weights}" if weights else self.first
        if weights in self._unnamed:
            return self.first, f"unnamed {weights}"  # Random in production; equal in runs of a seed.
        if self._naming == "digest":
            return digest, ""
        return digest if self._naming == "both" else self.first, f"v{weights}"

    def schedule(self, end_s: float) -> None:
        for _ in range(self._world.faults.updates):
            self._world.after(self._rng.uniform(0, end_s), self._update)

    def settle(self) -> None:
        """The last update reaches all engines."""
        if self.happen:
            self.at_boot = self._rng.choice([n for n in range(self._latest + 1) if n not in self._unnamed])
            for name in self._hosts:
                self._settle(name, self._world.now + LATE_S)

    def roll(self, names: Sequence[str], weights: int, gap_s: float) -> None:
        for index, name in enumerate(names):
            self._world.after(index * gap_s, partial(self.begin, name, weights))

    def _update(self) -> None:
        rng, world = self._rng, self._world
        if self._latest and rng.random() < ROLLBACKS:
            weights, what = rng.randrange(self._latest), "rollback"
        else:
            self._latest = weights = self._latest + 1
            is_unnamed = rng.random() < UNNAMED
            what = "unnamed" if is_unnamed else "named"
            self._unnamed |= {weights} if is_unnamed else set()
        world.count(f"update: {what}")
        names = rng.sample(list(self._hosts), len(self._hosts))
        if rng.random() >= ROLLING:
            names = names[:1]
        elif weights not in self._unnamed:
            self.at_boot = rng.choice([self.at_boot, weights])
        self.roll(names, weights, rng.choice(GAPS_S))

    def _settle(self, name: str, until_s: float) -> None:
        is_due = not self.is_at(name, self.at_boot)
        if is_due:
            self.begin(name, self.at_boot)
        if is_due or self._world.now < until_s:
            self._world.after(AGAIN_S, partial(self._settle, name, until_s))
