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
from lab.sim.kernel.updates import Updates

if TYPE_CHECKING:
    from lab.sim.hosts.full.cluster import Cluster

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


class EngineUpdates(Updates):
    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster.world, cluster.hosts)
        self._engines = cluster.hosts

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
