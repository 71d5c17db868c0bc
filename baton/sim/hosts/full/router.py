"""The router: the real policies choose, and the legs go the way of `baton.router.machine`, without HTTP.

    pull    ask --> prefill leg on P --ticket--> decode leg on D --> client
    push    ask --> prefill leg on P, and decode leg on D with P's introduction, at once --> client

    P unreachable, broken, late:       once more on another P with a new transfer id, else D prefills
    D never saw the request:           the same ticket on another D
    D refuses ticket or introduction:  once more without
    D failed before its first token:   both legs again, with a new transfer id
    D failed after it:                 an error

In push a leg that fails takes the other one with it. Introductions are as old as the router's last look.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from baton.core.transfer_params import OFFLOAD_CHOICES
from baton.engine.api import EngineOutput, EngineRequest, SamplingParams
from baton.router.policies import POLICIES, EngineState, RoutedRequest
from baton.sim.hosts.full.clients import Ask
from baton.sim.hosts.full.cluster import Cluster
from baton.sim.hosts.full.legs import Leg

Role = Literal["prefill", "decode"]

PREFILL_S = 20.0
FIRST_TOKEN_S = 30.0
IMPATIENT_S = 0.5
ATTEMPTS = 2
DOWN_S = 1.0  # Until a probe finds it again.
INTRODUCTION_MAX_S = 2.0  # How old what a router knows of an engine may be.
PULL_AMONG_PUSH = 0.2  # One pair of engines serves both kinds of routers.
PARAMS = "kv_transfer_params"


@dataclass(slots=True, eq=False)
class _Journey:
    """One ask on its way through the router."""

    ask: Ask
    routed: RoutedRequest
    is_push: bool
    tried: dict[Role, list[str]] = field(default_factory=lambda: {"prefill": [], "decode": []})
    is_prefilled: bool = False  # Or will not be: D does what is left.
    ticket: dict[str, Any] | None = None
    legs: list[Leg] = field(default_factory=list)
    has_begun: bool = False  # The client has heard something of D.


class Router:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.world = cluster, cluster.world
        rng = self.world.rng
        self._policy = POLICIES[rng.choice(sorted(POLICIES))]
        self.in_flight = dict.fromkeys(cluster.specs, 0)
        self.on_params: Callable[[Role, dict[str, Any], Ask], None] = lambda role, params, ask: None
        self._down_until = dict.fromkeys(cluster.specs, 0.0)
        self._introductions: dict[str, tuple[float, str, str]] = {}  # Looked up when, engine id, text.
        self._turns: dict[str, dict[str, Any]] = {}  # What D keeps, by session.
        self._journeys: dict[str, _Journey] = {}
        self._num_turns = self._num_requests = 0

    # --- Clients ----------------------------------------------------------------------------------

    def ask(self, ask: Ask) -> None:
        self._num_turns += 1
        prefix = repr((ask.salt, ask.prompt[:8])).encode()
        is_push = self.cluster.mode == "push" and not self.world.chance(PULL_AMONG_PUSH)
        journey = _Journey(ask, RoutedRequest(self._num_turns, prefix), is_push)
        self._journeys[ask.name] = journey
        self.world.note("client", f"asks {ask.name} with {len(ask.prompt)} tokens")
        self._advance(journey)

    def hang_up(self, ask: Ask) -> None:
        journey = self._journeys.pop(ask.name, None)
        if journey is None:
            return
        self.world.note("client", f"hangs up on {ask.name}")
        self.world.count("hung up")
        self._close_legs(journey)
        ask.end("gone")

    # --- The way ----------------------------------------------------------------------------------

    def _advance(self, journey: _Journey) -> None:
        if journey.ask.name not in self._journeys:
            return
        self._close_legs(journey)
        if self._choose("decode", journey) is None:
            self._end(journey, "error", "no decode engine can take the request")
        elif journey.is_prefilled:
            self._decode(journey, journey.ticket)
        else:
            self._prefill(journey)

    def _choose(self, role: Role, journey: _Journey) -> str | None:
        if len(journey.tried[role]) >= ATTEMPTS:
            return None
        names = self.cluster.of_role(role)
        if journey.ask.way is not None:
            names = [journey.ask.way[role == "decode"]]
        states = [
            EngineState(
                name,
                self._down_until[name] <= self.world.now and name not in journey.tried[role],
                self.in_flight[name],
            )
            for name in names
        ]
        index = self._policy(states, journey.routed)
        if index is None:
            if any(not state.is_eligible and state.url not in journey.tried[role] for state in states):
                journey.ask.causes.add("an engine is down")
            return None
        return names[index]

    def _prefill(self, journey: _Journey) -> None:
        name = self._choose("prefill", journey)
        if name is None:
            self.world.count("local prefill")
            journey.is_prefilled, journey.ticket = True, None
            self._advance(journey)
            return
        journey.tried["prefill"].append(name)
        transfer_id = f"{self.world.rng.getrandbits(128):032x}"
        last_turn = self._turns.pop(journey.ask.session, {})
        self.world.count("turns resumed", bool(last_turn))
        params = {
            **last_turn,
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer_id,
        }

        def failed(kind: str, was_sent: bool) -> None:
            self._note_failure(journey, name, kind)
            self._take_prefill(journey, None)

        def take_output(output: EngineOutput) -> None:
            if output.finish_reason is None or output.finish_reason == "abort":
                return
            if output.error is not None:
                self._note_error(journey, name, output)
                self._take_prefill(journey, None)
                return
            if output.new_token_ids[:1] != journey.ask.expected[:1]:
                journey.ask.hear(output.new_token_ids)  # Which the checker will not like.
            self._take_prefill(journey, output)

        if last_turn:
            self.on_params("prefill", params, journey.ask)
        introduction = self._introduction(name) if journey.is_push else None
        leg = self.leg(name, journey.ask, params, PREFILL_S, take_output, failed, max_tokens=1)
        journey.legs.append(leg)
        if introduction is None:
            return
        engine_id, text = introduction
        stream = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": engine_id,
            "transfer_id": transfer_id,
            "baton_introduction": text,
        }
        self.on_params("prefill", params, journey.ask)
        self.on_params("decode", stream, journey.ask)
        self._decode(journey, stream)

    def _take_prefill(self, journey: _Journey, output: EngineOutput | None) -> None:
        if journey.ask.name not in self._journeys or journey.has_begun:
            return
        is_streaming = len(journey.legs) > 1
        if output is None:
            self._advance(journey)  # Another P, or none.
        elif not is_streaming:
            journey.is_prefilled, journey.ticket = True, output.kv_transfer_params
            if journey.ticket is not None:
                self.on_params("decode", journey.ticket, journey.ask)
            self._advance(journey)

    def _decode(self, journey: _Journey, params: dict[str, Any] | None) -> None:
        name = self._choose("decode", journey)
        assert name is not None
        journey.tried["decode"].append(name)

        def again(*, without_params: bool = False) -> None:
            journey.is_prefilled, journey.ticket = without_params, None
            if not without_params:
                journey.tried["prefill"].clear()
            self._advance(journey)

        def failed(kind: str, was_sent: bool) -> None:
            self._note_failure(journey, name, kind)
            if journey.has_begun:
                self._end(journey, "error", f"the decode engine failed in the middle of the answer ({kind})")
            elif was_sent or not journey.is_prefilled:
                again()  # The ticket may be in use; a new dispatch gets a new one.
            else:
                self._advance(journey)

        def take_output(output: EngineOutput) -> None:
            ask = journey.ask
            if output.error is not None and not journey.has_begun:
                if params is not None and output.error.is_users and _blames_params(output):
                    self.world.count("ticket refused with an error")
                    journey.tried["decode"].remove(name)
                    again(without_params=True)
                else:
                    self._note_error(journey, name, output)
                    again()
                return
            journey.has_begun = journey.has_begun or bool(output.new_token_ids)
            ask.num_transferred = max(ask.num_transferred, output.num_transferred_tokens)
            ask.hear(output.new_token_ids)
            if output.error is not None:
                self._note_error(journey, name, output)
                self._end(journey, "error", output.error.message)
            elif output.finish_reason is not None:
                if output.kv_transfer_params is not None and ask.session:
                    self._turns[ask.session] = output.kv_transfer_params
                self._end(journey, "answered")

        journey.legs.append(self.leg(name, journey.ask, params, FIRST_TOKEN_S, take_output, failed))

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
        world = self.world
        self._num_requests += 1
        step_s = world.rng.uniform(-1e3, 1e3) if world.chance(world.faults.wall_steps) else 0.0
        request = EngineRequest(
            request_id=f"{ask.name}-{self._num_requests}",
            prompt_token_ids=ask.prompt,
            sampling_params=SamplingParams(max_tokens=max_tokens or ask.max_tokens, temperature=0.0),
            arrival_time_s=max(0.0, world.now + step_s),
            priority=ask.priority,
            cache_salt=ask.salt,
            kv_transfer_params=params,
        )
        if world.rng_of_models.random() < 0.1:
            choice = world.rng_of_models.choice(list(OFFLOAD_CHOICES))
            request = msgspec.structs.replace(
                request, kv_transfer_params={**(params or {}), "baton_offload": choice}
            )
        if world.chance(world.faults.router_retry):
            first_s = IMPATIENT_S
        return Leg(
            self.cluster,
            self.in_flight,
            name,
            request,
            first_s=first_s,
            on_output=on_output,
            on_failure=on_failure,
        )

    def _introduction(self, name: str) -> tuple[str, str] | None:
        now = self.world.now
        looked_up = self._introductions.get(name)
        if looked_up is None or now - looked_up[0] > INTRODUCTION_MAX_S:
            engine = self.cluster.hosts[name]
            text = engine.half.introduction() if engine.is_alive else None
            if text is None:
                return None
            looked_up = self._introductions[name] = (now, engine.engine_id, text)
        return looked_up[1], looked_up[2]

    # --- Ends -------------------------------------------------------------------------------------

    def _close_legs(self, journey: _Journey) -> None:
        for leg in journey.legs:
            leg.close()
        journey.legs.clear()

    def _end(self, journey: _Journey, outcome: str, message: str = "") -> None:
        del self._journeys[journey.ask.name]
        self._close_legs(journey)
        self.world.count(f"client: {outcome}")
        self.world.note("client", f"{journey.ask.name}: {outcome} {message}")
        journey.ask.end(outcome, message)

    def _note_failure(self, journey: _Journey, name: str, kind: str) -> None:
        self.world.count(f"leg: {kind}")
        journey.ask.causes.add(f"{name}: {kind}")
        if kind == "unreachable":
            self._down_until[name] = self.world.now + DOWN_S

    def _note_error(self, journey: _Journey, name: str, output: EngineOutput) -> None:
        """An engine that may fail loads may do so; nothing else in this world gives it a reason."""
        assert output.error is not None
        if self.cluster.specs[name].policy == "fail" and output.error.load_failure is not None:
            journey.ask.causes.add(f"{name}: load failed")


def _blames_params(output: EngineOutput) -> bool:
    return output.error is not None and (output.error.field or "").startswith(PARAMS)
