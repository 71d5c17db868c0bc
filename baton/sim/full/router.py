"""The router: the real policies choose, and the legs go the way of `baton.router.proxy`, without HTTP.

ask --> prefill leg on P --ticket--> decode leg on D --> client

P unreachable, broken, late:         once more on another P with a new transfer id, else D prefills by itself
D never saw the request:             the same ticket on another D
D refuses the ticket:                once more without it
D failed before its first token:     both legs again, with a new transfer id
D failed behind it:                  an error
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from baton.engine.api import EngineOutput, EngineRequest, SamplingParams
from baton.router.policies import POLICIES, EngineState, RoutedRequest
from baton.sim.full.clients import Ask
from baton.sim.full.cluster import Cluster
from baton.sim.full.engine import Engine

Role = Literal["prefill", "decode"]

PREFILL_S = 20.0
FIRST_TOKEN_S = 30.0
IDLE_S = 20.0
IMPATIENT_S = 0.5
ATTEMPTS = 2
DOWN_S = 1.0  # Until a probe finds it again.
PARAMS = "kv_transfer_params"


class Leg:
    """One request to one engine, over a connection that may break, lose things, or stay silent."""

    def __init__(
        self,
        router: Router,
        name: str,
        request: EngineRequest,
        *,
        first_s: float,
        on_output: Callable[[EngineOutput], None],
        on_failure: Callable[[str, bool], None],
    ) -> None:
        self._router, self._name, self._request = router, name, request
        self._on_output, self._on_failure = on_output, on_failure
        self._engine: Engine | None = None
        self._is_open = True
        self._arrives_at = 0.0
        self._num_said = 0
        router.in_flight[name] += 1
        clockwork = router.clockwork
        self._watch(first_s)
        if not clockwork.chance(clockwork.faults.leg_loss):
            clockwork.after(clockwork.spread(clockwork.faults.leg_delay_s), self._arrive)

    def _arrive(self) -> None:
        engine = self._router.cluster.engines[self._name]
        if not self._is_open:
            return
        if not engine.is_alive:
            self._fail("unreachable", was_sent=False)
            return
        self._engine = engine
        engine.submit(self._request, self)

    # --- Listener ---------------------------------------------------------------------------------

    def say(self, output: EngineOutput) -> None:
        if not self._is_open:
            return
        clockwork = self._router.clockwork
        if clockwork.chance(clockwork.faults.leg_loss):
            clockwork.count("answers lost")
            self._engine = None if output.finish_reason is not None else self._engine
            self._fail("broken", was_sent=True)  # A stream without one of its parts is no stream.
            return
        at = clockwork.now + clockwork.spread(clockwork.faults.leg_delay_s)
        self._arrives_at = max(self._arrives_at, at)
        if output.finish_reason is not None:
            self._engine = None  # Nothing is left to abort there.
        clockwork.after(self._arrives_at - clockwork.now, lambda: self._hear(output))

    def break_off(self) -> None:
        self._engine = None
        clockwork = self._router.clockwork
        if clockwork.chance(0.8):  # Else the network says nothing, and a timeout has to.
            self._arrives_at = max(self._arrives_at, clockwork.now + clockwork.spread(0.01))
            clockwork.after(self._arrives_at - clockwork.now, lambda: self._fail("broken", was_sent=True))

    # --- The router's end -------------------------------------------------------------------------

    def close(self) -> None:
        """Hang up. The engine sees it, and aborts what it still does for us."""
        if not self._is_open:
            return
        self._is_open = False
        self._router.in_flight[self._name] -= 1
        engine = self._engine
        if engine is not None:
            clockwork = self._router.clockwork
            delay_s = clockwork.spread(clockwork.faults.leg_delay_s)
            request_id = self._request.request_id
            clockwork.after(delay_s, lambda: engine.when_awake(lambda: engine.abort(request_id)))

    def _hear(self, output: EngineOutput) -> None:
        if not self._is_open:
            return
        self._num_said += 1
        if output.finish_reason is not None:
            self.close()
        else:
            self._watch(IDLE_S)
        self._on_output(output)

    def _watch(self, for_s: float) -> None:
        num_said = self._num_said

        def check() -> None:
            if self._is_open and self._num_said == num_said:
                self._fail("timeout", was_sent=True)

        self._router.clockwork.after(for_s, check)

    def _fail(self, kind: str, *, was_sent: bool) -> None:
        if self._is_open:
            self.close()
            self._on_failure(kind, was_sent)


@dataclass(slots=True, eq=False)
class _Journey:
    """One ask on its way through the router."""

    ask: Ask
    routed: RoutedRequest
    tried: dict[Role, list[str]] = field(default_factory=lambda: {"prefill": [], "decode": []})
    is_prefilled: bool = False
    ticket: dict[str, Any] | None = None
    leg: Leg | None = None
    has_begun: bool = False  # The client has heard something.


class Router:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.clockwork = cluster, cluster.clockwork
        rng = self.clockwork.rng
        self._policy_name = rng.choice(sorted(POLICIES))
        self.in_flight = dict.fromkeys(cluster.machines, 0)
        self.tickets: list[tuple[dict[str, Any], Ask]] = []  # All that were ever seen here.
        self.on_ticket: Callable[[dict[str, Any], Ask], None] = lambda ticket, ask: None
        self._down_until = dict.fromkeys(cluster.machines, 0.0)
        self._journeys: dict[str, _Journey] = {}
        self._num_turns = self._num_requests = 0

    # --- Clients ----------------------------------------------------------------------------------

    def ask(self, ask: Ask) -> None:
        self._num_turns += 1
        prefix = repr((ask.salt, ask.prompt[:8])).encode()
        journey = _Journey(ask, RoutedRequest(self._num_turns, prefix))
        self._journeys[ask.name] = journey
        self.clockwork.note("client", f"asks {ask.name} with {len(ask.prompt)} tokens")
        self._advance(journey)

    def hang_up(self, ask: Ask) -> None:
        journey = self._journeys.pop(ask.name, None)
        if journey is None:
            return
        self.clockwork.note("client", f"hangs up on {ask.name}")
        self.clockwork.count("hung up")
        if journey.leg is not None:
            journey.leg.close()
        ask.end("gone")

    # --- The way ----------------------------------------------------------------------------------

    def _advance(self, journey: _Journey) -> None:
        if journey.ask.name not in self._journeys:
            return
        if self._choose("decode", journey) is None:
            self._end(journey, "error", "no decode engine can take the request")
        elif journey.is_prefilled:
            self._decode(journey)
        else:
            journey.tried["prefill"].clear()
            self._prefill(journey)

    def _choose(self, role: Role, journey: _Journey) -> str | None:
        if len(journey.tried[role]) >= ATTEMPTS:
            return None
        names = self.cluster.of_role(role)
        states = [
            EngineState(
                name,
                self._down_until[name] <= self.clockwork.now and name not in journey.tried[role],
                self.in_flight[name],
            )
            for name in names
        ]
        index = POLICIES[self._policy_name](states, journey.routed)
        if index is None:
            if any(not state.is_eligible and state.url not in journey.tried[role] for state in states):
                journey.ask.causes.add("an engine is down")
            return None
        return names[index]

    def _prefill(self, journey: _Journey) -> None:
        name = self._choose("prefill", journey)
        if name is None:
            self.clockwork.count("local prefill")
            journey.is_prefilled, journey.ticket = True, None
            self._advance(journey)
            return
        journey.tried["prefill"].append(name)
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": f"{self.clockwork.rng.getrandbits(128):032x}",
        }

        def failed(kind: str, was_sent: bool) -> None:
            self._note_failure(journey, name, kind)
            self._prefill(journey)

        def said(output: EngineOutput) -> None:
            if output.finish_reason is None:
                return
            if output.error is not None:
                self._note_error(journey, name, output)
                self._prefill(journey)
                return
            if output.finish_reason == "abort":
                return
            if output.new_token_ids[:1] != journey.ask.expected[:1]:
                journey.ask.hear(output.new_token_ids)  # Which P nobody would believe.
            journey.is_prefilled, journey.ticket = True, output.kv_transfer_params
            if journey.ticket is not None:
                self.on_ticket(journey.ticket, journey.ask)
            self._advance(journey)

        journey.leg = self.leg(name, journey.ask, params, PREFILL_S, said, failed, max_tokens=1)

    def _decode(self, journey: _Journey) -> None:
        name = self._choose("decode", journey)
        assert name is not None
        journey.tried["decode"].append(name)
        ticket = journey.ticket

        def failed(kind: str, was_sent: bool) -> None:
            self._note_failure(journey, name, kind)
            if journey.has_begun:
                self._end(journey, "error", f"the decode engine failed in the middle of the answer ({kind})")
                return
            if was_sent:
                journey.is_prefilled = False  # The ticket may be in use; a new dispatch gets a new one.
            self._advance(journey)

        def said(output: EngineOutput) -> None:
            ask = journey.ask
            if output.error is not None and not journey.has_begun:
                blames_ticket = output.error.is_users and (output.error.field or "").startswith(PARAMS)
                if ticket is not None and blames_ticket:
                    self.clockwork.count("ticket refused with an error")
                    journey.ticket = None
                    journey.tried["decode"].remove(name)
                else:
                    self._note_error(journey, name, output)
                    journey.is_prefilled = False
                self._advance(journey)
                return
            journey.has_begun = journey.has_begun or bool(output.new_token_ids)
            ask.num_transferred = max(ask.num_transferred, output.num_transferred_tokens)
            ask.hear(output.new_token_ids)
            if output.error is not None:
                self._note_error(journey, name, output)
                self._end(journey, "error", output.error.message)
            elif output.finish_reason is not None:
                self._end(journey, "answered")

        journey.leg = self.leg(name, journey.ask, ticket, FIRST_TOKEN_S, said, failed)

    def leg(
        self,
        name: str,
        ask: Ask,
        params: dict[str, Any] | None,
        first_s: float,
        on_output: Callable[[EngineOutput], None],
        on_failure: Callable[[str, bool], None],
        *,
        max_tokens: int | None = None,
    ) -> Leg:
        clockwork = self.clockwork
        self._num_requests += 1
        step_s = clockwork.rng.uniform(-1e3, 1e3) if clockwork.chance(clockwork.faults.wall_steps) else 0.0
        request = EngineRequest(
            request_id=f"{ask.name}-{self._num_requests}",
            prompt_token_ids=ask.prompt,
            sampling_params=SamplingParams(max_tokens=max_tokens or ask.max_tokens, temperature=0.0),
            arrival_time_s=max(0.0, clockwork.now + step_s),
            priority=ask.priority,
            cache_salt=ask.salt,
            kv_transfer_params=params,
        )
        if clockwork.chance(clockwork.faults.router_retry):
            first_s = IMPATIENT_S
        return Leg(self, name, request, first_s=first_s, on_output=on_output, on_failure=on_failure)

    # --- Ends -------------------------------------------------------------------------------------

    def _end(self, journey: _Journey, outcome: str, message: str = "") -> None:
        del self._journeys[journey.ask.name]
        self.clockwork.count(f"client: {outcome}")
        self.clockwork.note("client", f"{journey.ask.name}: {outcome} {message}")
        journey.ask.end(outcome, message)

    def _note_failure(self, journey: _Journey, name: str, kind: str) -> None:
        self.clockwork.count(f"leg: {kind}")
        journey.ask.causes.add(f"{name}: {kind}")
        if kind == "unreachable":
            self._down_until[name] = self.clockwork.now + DOWN_S

    def _note_error(self, journey: _Journey, name: str, output: EngineOutput) -> None:
        """An engine that may fail loads may do so; nothing else in this world gives it a reason."""
        assert output.error is not None
        if self.cluster.machines[name].policy == "fail" and "could not be loaded" in output.error.message:
            journey.ask.causes.add(f"{name}: load failed")
