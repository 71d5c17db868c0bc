"""Processor time of the router by the size of the fleet: a choice, and a whole request without sockets.

    python -m lab.bench router-size     two minutes

Half of the engines are prefill engines, the others decode engines; two to thirty requests run at each. A
request is a machine of `machine.py` whose legs are answered at once. For `cost` each prompt has an engine
that holds it. The sizes take turns, so that a change of the machine's speed meets all of them. The last
columns are ratios to the smallest fleet.
"""

import json
import random
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from baton.router.fleet.block_index import Match
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.pairs import Pairs
from baton.router.fleet.policies import POLICIES, RoutedRequest
from baton.router.fleet.turns import TurnTable
from baton.router.fleet.view import FleetView
from baton.router.request.answers import LegAnswer
from baton.router.request.events import Closed, Event, Leg, Meet, Met, Opened
from baton.router.request.machine import Machine, Request
from baton.router.values.dialects import COMPLETIONS
from baton.router.values.rates import NUM_POINTS
from baton.router.values.settings import PolicyName, RouterSettings

SIZES = (2, 16, 128, 400)
ROUNDS, NUM_CALLS = 7, 200
PROMPT = "word " * 1_024
TICKET = {"do_remote_prefill": True, "baton_ticket": "ticket", "transfer_id": "id"}


def answer_to(leg: Leg) -> LegAnswer:
    body = {"choices": [{"text": "word", "finish_reason": "length"}], "usage": {"prompt_tokens": 1_280}}
    if leg.role == "prefill":
        body |= {"kv_transfer_params": TICKET}
    return LegAnswer(200, {"content-type": "application/json"}, json.dumps(body).encode())


class Subject:
    """A fleet of one size under load."""

    def __init__(self, num_engines: int, policy: PolicyName) -> None:
        rng = self._rng = random.Random(1)
        half = num_engines // 2
        urls = [tuple(f"http://{role}{number}:8000" for number in range(half)) for role in "pd"]
        settings = RouterSettings(prefill_urls=urls[0], decode_urls=urls[1], policy=policy)
        self.fleet = Fleet(settings)
        self._view = FleetView(settings, self.fleet, Pairs(), TurnTable(lambda engine, params: None))
        self._is_by_cost, self._num_asked = policy == "cost", 0
        for engine in self.fleet.engines:
            engine.was_asked = True
            if engine.role == "prefill":
                engine.prefill_rate.note(rng.uniform(9e3, 1.1e4))
            for load in range(NUM_POINTS):
                engine.steps.note(load, 0.015 + 0.000_15 * load)
            for _ in range(rng.randint(2, 30)):
                self.fleet.note_start(engine, rng.randint(0, 2_000) if engine.role == "prefill" else 0)

    def choose(self) -> None:
        self._num_asked += 1
        key, now_s = self._rng.randbytes(16), self._num_asked * 0.001
        cached = {}
        if self._is_by_cost:
            cached = {self._rng.choice(self.fleet.engines).url: Match.in_cache(512)}
        routed = RoutedRequest(self._num_asked, key, None, 1_280, cached)
        if self._view.place(routed, [], [], lambda engine: True, now_s) is None:
            self._view.choose("decode", routed, [], now_s)
        self._view.choose("prefill", routed, [], now_s)

    def request(self) -> None:
        self._num_asked += 1
        now_s = self._num_asked * 0.001
        body = {"model": "fake", "prompt": f"{self._num_asked} {PROMPT}", "max_tokens": 16}
        request = Request("id", body, dialect=COMPLETIONS, session=None, received_at_s=now_s)
        machine = Machine(self._view, request)
        effects = [*machine.begin(now_s)]
        while effects:
            effect, events = effects.pop(0), list[Event]()
            if isinstance(effect, Meet):
                events = [Met()]
            elif isinstance(effect, Leg):
                events = [Opened(effect, answer_to(effect)), Closed(effect)]
            for event in events:
                effects += machine.on(event, now_s)


def measure(calls: Sequence[Callable[[], None]]) -> list[float]:
    """The least processor time of each call, in microseconds."""
    least = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for number, call in enumerate(calls):
            began_s = time.process_time()
            for _ in range(NUM_CALLS):
                call()
            least[number] = min(least[number], (time.process_time() - began_s) / NUM_CALLS * 1e6)
    return least


def main() -> int:
    table = Table(
        "policy", "of", *(f"{size} engines, us" for size in SIZES), *(f"x {size}" for size in SIZES[1:])
    )
    for policy in POLICIES:
        subjects = [Subject(size, policy) for size in SIZES]
        for name in ("choose", "request"):
            found = measure([getattr(one, name) for one in subjects])
            ratios = [f"{one / found[0]:.2f}" for one in found[1:]]
            table.add_row(policy, name, *(f"{one:,.0f}" for one in found), *ratios)
    Console(width=140).print(table)
    return 0
