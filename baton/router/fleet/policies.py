"""The choice of an engine for a request: pure functions of the engines' states.

A policy maps the states of one role's engines and a request to an index, or to None when none is eligible. It
never returns an engine that is not eligible. Round robin needs no memory: the request carries its `turn`.

An engine in slow start gets `share` of its requests: of its turns, of its prefixes, or of the load at which
the least busy engine is chosen. Without another eligible engine it gets all of them.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from baton.router.fleet.block_index import NO_MATCH, Match
from baton.router.fleet.cost import EXPECTED_OUTPUT, IDLE, Candidate, later_s, prefill_s
from baton.router.values.settings import PolicyName, Role

# Requests that the holder of a prefix may have more than the idlest engine, before another engine is chosen.
AFFINITY_SLACK = 4
GOLDEN_RATIO = 0.618034  # Multiples of it, modulo 1, are spread evenly.
LEAST_COST_S = 1e-3  # Added to each cost, so that an idle engine costs more in slow start than another one.


class EngineState(msgspec.Struct, frozen=True, gc=False):
    url: str
    is_eligible: bool  # The engine is up, and this request has not tried it before.
    in_flight: int = 0
    share: float = 1.0  # Share of its usual requests that it gets. Less than 1 in slow start, and never 0.
    role: Role = "decode"
    candidate: Candidate = IDLE
    is_home: bool = True  # The request's prefix belongs here; other engines get it if its homes are busy.


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    turn: int  # Counts the router's requests.
    prefix_key: bytes = b""  # Equal for prompts that begin alike.
    model: object = None  # Value in the client's body; None: the request names no model.
    num_tokens: int = 0  # Tokens of its prompt; an estimate for text.
    cached: Mapping[str, Match] = field(default_factory=dict)  # Cached tokens of it, by URL.
    num_output_tokens: float = EXPECTED_OUTPUT
    priority: int = 0  # Less is more urgent.
    home: int = 0  # See `block_index.home_key`.
    path: str | None = None  # The path that engines may lack; None: every engine has it.

    def cached_at(self, url: str) -> Match:
        return Match(*(min(count, self.num_tokens) for count in self.cached.get(url, NO_MATCH)))


Policy: TypeAlias = Callable[[Sequence[EngineState], RoutedRequest], int | None]


def choose_round_robin(states: Sequence[EngineState], request: RoutedRequest) -> int | None:
    """The first eligible engine at or after the request's turn."""
    eligible = [index for index, state in enumerate(states) if state.is_eligible]
    # Multiples of the golden ratio spread the turns of a share evenly.
    luck = request.turn // max(1, len(states)) * GOLDEN_RATIO % 1.0
    taking = [index for index in eligible if luck < states[index].share] or eligible
    return min(taking, key=lambda index: (index - request.turn) % len(states), default=None)


def choose_least_in_flight(states: Sequence[EngineState], request: RoutedRequest) -> int | None:
    """The idlest eligible engine; among equals, round robin."""
    eligible = [index for index, state in enumerate(states) if state.is_eligible]
    return min(
        eligible,
        key=lambda index: (
            (states[index].in_flight + 1) / states[index].share,
            (index - request.turn) % len(states),
        ),
        default=None,
    )


def choose_prefix_affinity(states: Sequence[EngineState], request: RoutedRequest) -> int | None:
    """The engine that earlier prompts with this prefix went to, unless it is much busier than the idlest.

    Rendezvous hashing: an engine that goes away moves only its own prefixes, and they come back with it.
    """
    eligible = [index for index, state in enumerate(states) if state.is_eligible]
    if not eligible:
        return None
    busiest = min(states[index].in_flight for index in eligible) + AFFINITY_SLACK
    free = [index for index in eligible if states[index].in_flight <= busiest]
    free = [index for index in free if states[index].is_home] or free
    weights = {index: _weight(states[index].url, request.prefix_key) for index in free}
    # Prefixes come back one by one in slow start: the last bytes of the weight decide when.
    taking = [index for index in weights if int.from_bytes(weights[index][-2:]) < states[index].share * 2**16]
    return max(taking or weights, key=weights.__getitem__)


def choose_least_cost(states: Sequence[EngineState], request: RoutedRequest) -> int | None:
    """The engine at which the prompt is computed first, or the answer is given fastest; see `cost`."""
    eligible = [index for index, state in enumerate(states) if state.is_eligible]

    def cost_s(index: int) -> float:
        state = states[index]
        if state.role == "prefill":
            return prefill_s(state.candidate, request.num_tokens)
        return later_s(state.candidate, request.num_output_tokens)

    return min(
        eligible,
        key=lambda index: (
            (cost_s(index) + LEAST_COST_S) / states[index].share,
            (index - request.turn) % len(states),
        ),
        default=None,
    )


def prefix_holder(urls: Sequence[str], request: RoutedRequest) -> str | None:
    """The engine that earlier prompts with this prefix went to, as far as costs allowed it."""
    return max(urls, key=lambda url: _weight(url, request.prefix_key), default=None)


def _weight(url: str, prefix_key: bytes) -> bytes:
    return hashlib.blake2b(url.encode(), key=prefix_key[:64], digest_size=16).digest()


POLICIES: dict[PolicyName, Policy] = {
    "round_robin": choose_round_robin,
    "least_in_flight": choose_least_in_flight,
    "prefix_affinity": choose_prefix_affinity,
    "cost": choose_least_cost,
}
