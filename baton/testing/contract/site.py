"""Environments of kit examples: how engines get their halves and ranks, and how waiting works."""

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from baton.contract import KVConnectorRole
from baton.core.config import EngineConfig, ModelConfig
from baton.engine.executor import Executor
from baton.testing.contract.arithmetic import NUM_MARKS, VOCAB, expected_tokens
from baton.testing.contract.case import (
    HEAD_DIM,
    INT8,
    INT8_AND_STATE,
    LATENTS,
    WINDOWS,
    WINDOWS_AND_STATES,
    ConnectorCase,
    Shape,
    Windows,
    engine_config,
    knows_groups,
    knows_states,
    make_half,
    new_secret,
    toy_model,
)
from baton.testing.contract.engine import Expect, KitEngine
from baton.testing.contract.ledger import Ledger
from baton.testing.contract.ranks import KitRanks
from baton.testing.contract.story import Story
from baton.testing.contract.watched_worker import WatchedWorker

FREE_LOOKS = 30  # Idle steps in a row before time counts; enough for a connector that only counts steps.
LOOK_EVERY_S = 0.002
LOOK_EVERY_MAX_S = 0.05
LOOK_MAX_S = 0.1  # The most that one look counts; a longer one means that this machine was busy.


class Patience:
    """Time limit for background work: `patience_s` for the first hang, later a multiple of what helped.

    Otherwise shrinking the story of a connector that hangs would take `patience_s` for each try. Time in
    which this process did not run is not counted, because the connector did not run either.
    """

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._longest_good_s = 0.0
        self._has_hung = False
        self._waited_s = 0.0
        self._looked_at_s = 0.0  # A reading of the clock.
        self._looks = 0

    def moved(self) -> None:
        """Note that a step made progress: `wait` starts from the beginning."""
        self._longest_good_s = max(self._longest_good_s, self._waited_s)
        self._waited_s, self._looks = 0.0, 0

    def wait(self, engines: Sequence[KitEngine]) -> bool:
        """Let time pass when no step makes progress. Returns False if the connector has had enough time."""
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


class ToySite:
    """Environment that starts engines for one example after the other. The ranks are the kit's own, in this
    process; sites with other halves or ranks derive from it.
    """

    keeps_files = False  # The runtime below the connector opens files in the first example that stay open.
    steps_in_flight: tuple[int, ...] = (1, 2)  # Numbers of steps in flight that its engines support.
    is_expensive = False  # Starting engines takes seconds, so there are few examples.
    executor: str | None = None  # Executor of the engines; None: the kit's ranks.
    num_marks = NUM_MARKS
    head_dim = HEAD_DIM

    def __init__(self, case: ConnectorCase) -> None:
        self.case = case
        self.windows: tuple[Windows, ...] = WINDOWS if knows_groups(case) else ((),)
        if knows_states(case):
            self.windows += WINDOWS_AND_STATES
        if case.plays_latents:
            self.windows += (LATENTS,)
        if case.plays_scales:
            self.windows += (*INT8, INT8_AND_STATE) if knows_states(case) else INT8
        self.patience = Patience(case.patience_s)
        self.thread_patience_s = case.patience_s  # Time for threads that a connector has asked to end.
        self._last_mark = secrets.randbelow(NUM_MARKS)
        self._secret = new_secret()

    def new_mark(self) -> int:
        """Return the token that the next example's prompts begin with.

        It keeps examples apart: what an earlier example or run has left in a connector's store (such as a
        folder) belongs to other prompts.
        """
        self._last_mark += 1
        return VOCAB + self._last_mark % self.num_marks

    def start(self, shape: Shape, story: Story, *, name: str, role: str) -> KitEngine:
        """Start one engine. Raises what the connector's constructors raise."""
        model, expect = self.model_of(shape)
        config = engine_config(
            self.case,
            shape,
            engine_id=name,
            role=role,
            model=model,
            executor=self.executor,
            secret=self._secret,
        )
        return KitEngine(
            config,
            story,
            make_half=self.make_scheduler_half,
            make_executor=self.start_executor,
            expect=expect,
            name=name,
            checks_tokens=self.case.speaks_text,
            final_notes=self.final_notes_folder(),
        )

    def model_of(self, shape: Shape) -> tuple[ModelConfig, Expect]:
        """Return the model, and its tokens without a connector."""
        return toy_model(shape.windows, self.head_dim), expected_tokens

    def make_scheduler_half(self, config: EngineConfig) -> Any:
        return make_half(config, KVConnectorRole.SCHEDULER)

    def make_worker_half(self, config: EngineConfig, rank: int) -> Any:
        return make_half(config, KVConnectorRole.WORKER, rank)

    def start_executor(self, config: EngineConfig, ledger: Ledger, salts: dict[str, str | None]) -> Executor:
        def watched(config: EngineConfig, rank: int) -> WatchedWorker:
            return WatchedWorker(self.make_worker_half(config, rank), rank)

        return KitRanks(config, watched, ledger, salts)

    def final_notes_folder(self) -> str | None:
        """Return a new folder for the final notes of ranks in processes of their own."""
        return None

    def close(self) -> None:
        """Release everything after the last example."""
        return
