"""Updates of the weights: the real core's code, between two steps of the simulated engine.

begin_update --commands--> staged --no request of the old weights holds blocks--> changed, or refused
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, cast, get_args

import msgspec

from baton.checkpoints.checkpoint import FilesState
from baton.core.config import EngineConfig
from baton.engine.api import EngineOutput
from baton.engine.core.engine_core import EngineCore
from baton.engine.core.weights_update import PauseMode, WeightsUpdate
from baton.engine.executor import Executor
from baton.engine.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from lab.sim.host.cluster import Cluster

FIRST = "weights"  # Digest of weights 0.
UNNAMED = 0.2  # Updates to weights without a name.
ROLLBACKS = 0.4  # Updates to earlier weights, if there are any.
ROLLING = 0.5  # Updates of all engines.
GAPS_S = (0.0, 0.3, 2.0)  # Time between two engines.
AGAIN_S = 5.0  # Time after the faults between two attempts to bring an engine to the last weights.
LATE_S = 40.0  # An update of before may come so late, to an engine that stood still.
TIMEOUTS_S = (0.5, 5.0, 60.0)
NO_FILES = cast(FilesState, None)


class Core(EngineCore):
    """The part of the real engine core that updates the weights. The simulated engine does the rest."""

    def __init__(self, config: EngineConfig, scheduler: Scheduler, executor: object) -> None:
        self.config, self.scheduler, self.executor = config, scheduler, cast(Executor, executor)
        self._event_publisher = self._update = self._update_end = None
        self._kept_back, self._late_outputs = {}, []

    def continue_update(self) -> list[EngineOutput]:
        """Continue the update between two steps. Returns the outputs of requests that waited for its end."""
        if self._update is not None and self._is_update_due(self._update):
            self._continue_update(self._update)
        late, self._late_outputs = self._late_outputs, []
        return late

    @property
    def mode(self) -> PauseMode | None:
        return None if self._update is None else self._update.mode

    def time_out(self, update: WeightsUpdate) -> None:
        """The time of this update is up. The core's own clock is not the world's."""
        if self._update is update:
            self._update_by_s = -inf


class Updates:
    """Updates of one engine at any moment, or of all engines in a row.

    Weights are a number. 0 is what all engines boot with. Each update takes new weights or goes back to
    earlier ones, and names them as the world does: by digest, by version, by both, or not at all.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._world, self._rng, self._engines = cluster.world, cluster.world.rng_of_updates, cluster.hosts
        self.happen = self._world.faults.updates > 0
        self._naming = self._rng.choice(["digest", "version", "both"]) if self.happen else "digest"
        self._unnamed: set[int] = set()
        self._latest = 0
        self.at_boot = 0  # Weights in the folder that engines boot from.

    def named(self, weights: int) -> tuple[str, str]:
        """(digest, version): digest of the weights, or of those before where only the version is known."""
        digest = f"weights {weights}" if weights else FIRST
        if weights in self._unnamed:
            return FIRST, f"unnamed {weights}"  # Random in production; equal in runs of a seed.
        if self._naming == "digest":
            return digest, ""
        return digest if self._naming == "both" else FIRST, f"v{weights}"

    def schedule(self, end_s: float) -> None:
        for _ in range(self._world.faults.updates):
            self._world.after(self._rng.uniform(0, end_s), self._update)

    def settle(self) -> None:
        """The last update reaches all engines."""
        if self.happen:
            self.at_boot = self._rng.choice([n for n in range(self._latest + 1) if n not in self._unnamed])
            for name in self._engines:
                self._settle(name, self._world.now + LATE_S)

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
        names = rng.sample(list(self._engines), len(self._engines))
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

    def roll(self, names: Sequence[str], weights: int, gap_s: float) -> None:
        mode = self._rng.choice(get_args(PauseMode))
        for index, name in enumerate(names):
            begin = partial(self._begin, name, weights, mode, self._rng.choice(TIMEOUTS_S))
            self._world.after(index * gap_s, begin)

    def begin(self, name: str, weights: int) -> None:
        self._begin(name, weights, self._rng.choice(get_args(PauseMode)), TIMEOUTS_S[-1])

    def is_at(self, name: str, weights: int) -> bool:
        engine = self._engines[name]
        return engine.ranks.weights == weights and engine.core.mode is None

    def _begin(self, name: str, weights: int, mode: PauseMode, timeout_s: float) -> None:
        engine = self._engines[name]
        digest, version = self.named(weights)
        model = msgspec.structs.replace(
            engine.core.config.model_config,
            model=str(weights),
            weights_digest=digest,
            weights_version=version,
        )
        update = WeightsUpdate(model, NO_FILES, mode, inf)
        engine.when_awake(lambda: engine.update_weights(update, timeout_s))
