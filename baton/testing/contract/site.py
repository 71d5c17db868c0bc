"""Where an example happens: how its engines get their halves and ranks, and how time passes for them."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from baton.contract import KVConnectorRole
from baton.core.config import ClusterSecret, EngineConfig
from baton.engine.executor import Executor
from baton.testing.contract.arithmetic import NUM_MARKS, VOCAB, expected_tokens
from baton.testing.contract.case import (
    HEAD_DIM,
    WINDOWS,
    ConnectorCase,
    Shape,
    Windows,
    engine_config,
    knows_groups,
    make_half,
    new_secret,
    toy_model,
)
from baton.testing.contract.engine import KitEngine
from baton.testing.contract.ledger import Ledger
from baton.testing.contract.ranks import KitRanks
from baton.testing.contract.story import Story
from baton.testing.contract.watched_worker import WatchedWorker

FREE_LOOKS = 30  # Idle steps in a row that cost no time: a connector that only counts steps ends within them.
LOOK_EVERY_S = 0.002
LOOK_EVERY_MAX_S = 0.05
LOOK_MAX_S = 0.1  # What a look counts at most: one that took longer says that the machine was busy.


class Site(ABC):
    """Makes engines for one example after the other."""

    keeps_files = False  # What runs below the connector opens some in the first example, for all of them.
    steps_in_flight: tuple[int, ...] = (1, 2)  # What its engines can do.
    is_dear = False  # Starting engines takes seconds: every example has to be worth it.

    num_marks = NUM_MARKS

    def __init__(self, case: ConnectorCase) -> None:
        self.case = case
        self.windows: tuple[Windows, ...] = WINDOWS if knows_groups(case) else ((),)
        self.thread_patience_s = case.patience_s  # For those that a connector has told to end.
        self._last_mark = secrets.randbelow(NUM_MARKS)

    def new_mark(self) -> int:
        """The token that the next example's prompts begin with.

        What a connector keeps beyond an example, in a folder say, is of other prompts then: no story is about
        what an earlier example has left, or a run before this one, of the same connector with a fault.
        """
        self._last_mark += 1
        return VOCAB + self._last_mark % self.num_marks

    @abstractmethod
    def start(self, shape: Shape, story: Story, *, name: str, role: str) -> KitEngine:
        """Raises what the connector's constructors raise."""

    @abstractmethod
    def wait(self, engines: Sequence[KitEngine]) -> bool:
        """No step moves anything: let time pass. False when the connector has had time enough."""

    @abstractmethod
    def moved(self) -> None:
        """A step has moved something; `wait` begins anew."""

    def close(self) -> None:
        """After the last example."""
        return


class Patience:
    """Waits for work in the background: at length for the first that hangs, then as long as it had helped.

    Otherwise shrinking the story of a connector that hangs would take patience_s for each try. Time in which
    we did not run ourselves does not count: neither did the connector.
    """

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._longest_good_s = 0.0
        self._has_hung = False
        self._waited_s = 0.0
        self._looked_at_s = 0.0  # Of the clock.
        self._looks = 0

    def moved(self) -> None:
        self._longest_good_s = max(self._longest_good_s, self._waited_s)
        self._waited_s, self._looks = 0.0, 0

    def wait(self, engines: Sequence[KitEngine]) -> bool:
        self._looks += 1
        if self._looks <= FREE_LOOKS:
            return True
        now = self._clock()
        if self._looks > FREE_LOOKS + 1:
            self._waited_s += min(now - self._looked_at_s, LOOK_MAX_S)
        self._looked_at_s = now
        limit_s = self._patience_s
        if self._has_hung:
            limit_s = min(limit_s, 0.05 + 4 * self._longest_good_s)
        if self._waited_s >= limit_s:
            self._has_hung = True
            self._waited_s, self._looks = 0.0, 0
            return False
        pause_s = min(LOOK_EVERY_S * (self._looks - FREE_LOOKS), LOOK_EVERY_MAX_S)
        woken = engines[0].woken
        woken.wait(pause_s)
        for engine in engines:
            engine.woken.clear()
        return True


class ToySite(Site):
    """Ranks of the kit, in this process; the connector as its users configure it."""

    head_dim = HEAD_DIM

    def __init__(self, case: ConnectorCase) -> None:
        super().__init__(case)
        self.patience = Patience(case.patience_s)
        self._secret = new_secret()

    def start(self, shape: Shape, story: Story, *, name: str, role: str) -> KitEngine:
        model = toy_model(shape.windows, self.head_dim)
        config = engine_config(self.case, shape, engine_id=name, role=role, model=model, secret=self._secret)
        return KitEngine(
            config,
            story,
            make_half=self.make_scheduler_half,
            make_executor=self._make_ranks,
            expect=expected_tokens,
            name=name,
            checks_tokens=self.case.speaks_text,
        )

    def make_scheduler_half(self, config: EngineConfig) -> Any:
        return make_half(config, KVConnectorRole.SCHEDULER)

    def make_worker_half(self, config: EngineConfig, rank: int) -> Any:
        return make_half(config, KVConnectorRole.WORKER, rank)

    def _make_ranks(self, config: EngineConfig, ledger: Ledger, salts: dict[str, str | None]) -> Executor:
        def watched(config: EngineConfig, rank: int) -> WatchedWorker:
            return WatchedWorker(self.make_worker_half(config, rank), rank)

        return KitRanks(config, watched, ledger, salts)

    def moved(self) -> None:
        self.patience.moved()

    def wait(self, engines: Sequence[KitEngine]) -> bool:
        return self.patience.wait(engines)

    @property
    def secret(self) -> ClusterSecret:
        return self._secret
