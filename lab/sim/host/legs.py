"""One request to one engine, over a connection that may break, lose things, or stay silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.engine.api import EngineOutput, EngineRequest
from baton.router.values.errors import FailureKind
from lab.sim.host.clients import Ask
from lab.sim.host.cluster import Cluster
from lab.sim.host.engine import Engine

IDLE_S = 20.0
REPORTS_DEATH = 0.8  # How often the network reports the death of the other end; otherwise a timeout does.


class Leg:
    def __init__(
        self,
        cluster: Cluster,
        name: str,
        request: EngineRequest,
        ask: Ask,
        *,
        first_s: float,
        on_output: Callable[[EngineOutput], None],
        on_failure: Callable[[FailureKind, bool], None],
    ) -> None:
        """`on_failure(kind, whether the engine may have seen the request)`."""
        self._cluster, self._world = cluster, cluster.world
        self._name, self._request, self.ask = name, request, ask
        self._on_output, self._on_failure = on_output, on_failure
        self._engine: Engine | None = None  # The one that has the request.
        self._is_open = True
        self._arrives_at = 0.0
        self._num_answered = 0
        self._watch(first_s)
        world = self._world
        if not world.chance(world.faults.leg_loss):
            world.after(world.spread(world.faults.leg_delay_s), self._arrive)

    def _arrive(self) -> None:
        if not self._is_open:
            return
        engine = self._cluster.hosts[self._name]
        if not engine.is_alive or engine.is_draining:
            self._fail("unreachable", was_sent=False)
            return
        self._engine = engine
        engine.submit(self._request, self)

    # --- Listener ---------------------------------------------------------------------------------

    def say(self, output: EngineOutput) -> None:
        if not self._is_open:
            return
        if output.finish_reason is not None:
            self._engine = None  # Nothing is left to abort there.
        world = self._world
        if world.chance(world.faults.leg_loss):
            world.count("answers lost")
            self._fail("broken", was_sent=True)  # A stream without one of its parts is no stream.
            return
        at = world.now + world.spread(world.faults.leg_delay_s)
        self._arrives_at = max(self._arrives_at, at)
        world.at(self._arrives_at, lambda: self._hear(output))

    def break_off(self) -> None:
        self._engine = None
        world = self._world
        if world.chance(REPORTS_DEATH):
            self._arrives_at = max(self._arrives_at, world.now + world.spread(0.01))
            world.at(self._arrives_at, lambda: self._fail("broken", was_sent=True))

    @property
    def params(self) -> dict[str, Any]:
        return self._request.kv_transfer_params or {}

    def cut(self) -> None:
        self._fail("broken", was_sent=True)

    def note_weights(self, weights: int, *, is_mixed: bool = False) -> None:
        self.ask.weights.add(weights)
        self.ask.is_mixed |= is_mixed

    # --- The router's end -------------------------------------------------------------------------

    def close(self) -> None:
        """Hang up. The engine sees it, and aborts what it still does for us."""
        if not self._is_open:
            return
        self._is_open = False
        engine = self._engine
        if engine is not None:
            delay_s = self._world.spread(self._world.faults.leg_delay_s)
            request_id = self._request.request_id
            self._world.after(delay_s, lambda: engine.when_awake(lambda: engine.abort(request_id)))

    def _hear(self, output: EngineOutput) -> None:
        if not self._is_open:
            return
        self._num_answered += 1
        if output.finish_reason is not None:
            self.close()
        else:
            self._watch(IDLE_S)
        self._on_output(output)

    def _watch(self, for_s: float) -> None:
        num_answered = self._num_answered

        def check() -> None:
            if self._is_open and self._num_answered == num_answered:
                self._fail("timeout", was_sent=True)

        self._world.after(for_s, check)

    def _fail(self, kind: FailureKind, *, was_sent: bool) -> None:
        if self._is_open:
            self.close()
            self._on_failure(kind, was_sent)
