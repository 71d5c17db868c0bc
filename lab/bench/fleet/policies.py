"""Policies of the simulated fleet: this router's, and others' as they are published."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from baton.router.fleet import cost
from baton.router.fleet.block_index import Match
from baton.router.fleet.policies import POLICIES, EngineState, RoutedRequest
from baton.router.values.settings import PolicyName
from lab.bench.fleet.engine import LOAD_TOKENS_PER_S, PREFILL_TOKENS_PER_S, TOKEN_S
from lab.bench.fleet.world import Choose, Request, World, url_of

Pick = Callable[[World, Request, Sequence[str]], str]
EXPECTED_OUTPUT = 300  # Tokens; a router cannot know.
# Defaults of vllm-router 0.1.17 (`cache_aware`).
CACHE_THRESHOLD, BALANCE_ABS, BALANCE_REL = 0.3, 64, 1.5


def by_state(name: PolicyName, *, sees_outliers: bool = False) -> Pick:
    """`sees_outliers`: engines that are much slower than their peers get less."""
    policy = POLICIES[name]

    def pick(world: World, request: Request, names: Sequence[str]) -> str:
        fleet, routed = world.router.fleet, world.router.routed
        if sees_outliers:
            fleet.choice.judge_speeds(world.now_s)
        states = [
            EngineState(
                one,
                is_eligible=True,
                in_flight=world.seen[one].in_flight,
                share=routed[one].share(world.now_s) if sees_outliers else 1.0,
            )
            for one in names
        ]
        key = str(request.keys[:1]).encode()
        number = policy(states, RoutedRequest(world.num_routed, key))
        assert number is not None
        return names[number]

    return pick


def cache_aware() -> Pick:
    """vllm-router: the longest prefix in its own tree of what it has sent, unless loads are unbalanced."""
    trees: dict[str, set[int]] = {}

    def pick(world: World, request: Request, names: Sequence[str]) -> str:
        loads = {one: world.seen[one].in_flight for one in names}
        busiest, idlest = max(loads.values()), min(loads.values())
        if busiest - idlest > BALANCE_ABS and busiest > idlest * BALANCE_REL:
            chosen = min(names, key=loads.__getitem__)
        else:
            lengths = {one: _length(trees.get(one, set()), request.blocks) for one in names}
            chosen = max(names, key=lengths.__getitem__)
            if lengths[chosen] <= CACHE_THRESHOLD * max(1, len(request.blocks)):
                chosen = min(names, key=lambda one: len(trees.get(one, ())))
        trees.setdefault(chosen, set()).update(request.blocks)
        return chosen

    return pick


def _length(tree: set[int], blocks: Sequence[int]) -> int:
    count = 0
    for block in blocks:
        if block not in tree:
            break
        count += 1
    return count


def alone(pick: Pick) -> Choose:
    """Never disaggregate."""
    return lambda world, request: (None, pick(world, request, world.consumers))


def always(pick: Pick) -> Choose:
    """Always disaggregate: a producer by this policy, the consumer with the fewest requests."""
    return lambda world, request: (
        pick(world, request, world.producers),
        min(world.consumers, key=lambda one: world.seen[one].in_flight),
    )


def by_cost(*, without: str = "", is_learned: bool = True, is_hashed: bool = True) -> Choose:
    """`without`: "cache", "queue" or "home", a term of the cost that is left out.

    `is_hashed`: a prompt that is in no cache goes where others with its prefix go, if that costs no more.
    `is_learned`: the speeds are those that the router has learned, and not those of the model.
    """

    def choose(world: World, request: Request) -> tuple[str | None, str]:
        cached = {} if without == "cache" else world.cached(request)
        home = 0 if without in ("cache", "home") else request.home
        routed = RoutedRequest(
            world.num_routed,
            str(request.keys[:1]).encode() if is_hashed else b"",
            num_tokens=request.num_tokens,
            cached={url_of(name): Match.in_cache(count) for name, count in cached.items() if count},
        )

        def learned(names: Sequence[str]) -> list[cost.Candidate]:
            found = world.router.fleet.choice.candidates(
                [world.router.routed[name] for name in names], routed
            )
            return [replace(one, num_queued_tokens=0) for one in found] if without == "queue" else found

        def load_s(producer: int, consumer: int, num_tokens: int) -> float:
            first, second = (
                world.router.routed[world.producers[producer]],
                world.router.routed[world.consumers[consumer]],
            )
            return world.router.pairs.load_s(first, second, num_tokens)

        def candidate(name: str) -> cost.Candidate:
            seen = world.seen[name]
            return cost.Candidate(
                num_queued_tokens=0 if without == "queue" else seen.num_queued_tokens,
                num_running=seen.num_running,
                num_cached_tokens=cached.get(name, 0),
                prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
                token_s=TOKEN_S,
            )

        if is_learned:
            found = cost.placements(
                request.num_tokens,
                world.router.fleet.choice.expected_output,
                learned(world.producers),
                learned(world.consumers),
                load_s,
                home=home,
            )
        else:
            found = cost.placements(
                request.num_tokens,
                EXPECTED_OUTPUT,
                [*map(candidate, world.producers)],
                [*map(candidate, world.consumers)],
                lambda producer, consumer, num_tokens: num_tokens / LOAD_TOKENS_PER_S,
                home=home,
            )
        chosen = min(found, key=lambda one: one.cost_s)
        producer = None if chosen.producer is None else world.producers[chosen.producer]
        return producer, world.consumers[chosen.consumer]

    return choose
