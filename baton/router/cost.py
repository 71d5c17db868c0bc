"""Where a request is computed: the placement with the least predicted cost. Pure functions.

    P, then D   the prompt waits for P's queue; D loads the KV while P's first token is on its way
    D alone     the prompt waits for D's queue, and the answers that D is giving wait for the prompt

Cost is in seconds: the time to the first token, the load, the steps of the answer, and what the request adds
to the time of those that run. In push KV moves while P computes, so only what is left of the load counts.
Every number of an engine is what the router knows: queues are of its own requests, cached tokens are the
index's, speeds are learned (`rates`) and start as those of a modelled engine.

A request waits for a busy engine that has its prefix if that is sooner than to compute the prefix elsewhere.
What the engine has in host memory or in a store it has to load: that takes longer than a hit in its cache,
and never longer than to compute it.
An engine that computes a prompt reads what another one has of it, and lends, if that is sooner.

A prompt that is handed over is in two caches afterwards. So that the caches of all engines together hold
more, each prompt has a home, by the hash of its beginning: some are handed over, the others are not, as long
as the difference in cost is small.

Pull or push is not weighed: `--mode` says which. Push has the first token at the same time and the second
one never later.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

# Of the time that a prompt takes on a decode engine, for each answer that it delays there.
HARM = 0.05
# Of the time that a prompt takes, for a placement away from its home.
AWAY = 0.4
KEYS = 2**64
EXPECTED_OUTPUT = 300  # Tokens of an answer, as long as no stream has ended.
PREFILL_TOKENS_PER_S = 10_000.0  # Of an engine, as long as no engine's speed is known.
TOKEN_S = 0.000_15  # That one more answer adds to each step of the others, as long as it is not known.
LOAD_TOKENS_PER_S = 75_000.0  # KV from another engine, as long as no pair's speed is known.
# Of an engine's own tiers: 20 and 2.5 GB/s, with 128 KiB for each token.
HOST_TOKENS_PER_S = 150_000.0
STORE_TOKENS_PER_S = 20_000.0
LEND_S = 0.02  # For the router to ask an engine for a loan of what it has.


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """An engine, as one request sees it."""

    num_queued_tokens: int = 0  # Of prompts that it has still to compute.
    num_running: int = 0  # Requests that it is answering.
    num_cached_tokens: int = 0  # Of this prompt, in all tiers: not to be computed.
    prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S
    step_s: float = 0.0  # Time of a step without other answers; 0: not known of any engine.
    token_s: float = TOKEN_S  # That one more answer adds to each step of the others.
    num_host_tokens: int = 0  # Of the cached ones, those to load from host memory,
    num_stored_tokens: int = 0  # and from a store.
    num_lent_tokens: int = 0  # Not cached: another engine lends them ...
    lent_load_s: float = 0.0  # ... in this time.


IDLE = Candidate()


class Placement(msgspec.Struct, frozen=True, gc=False):
    """`producer` and `consumer`: numbers of candidates. `producer` None: the consumer computes the prompt."""

    producer: int | None
    consumer: int
    ttft_s: float
    cost_s: float


LoadTime: TypeAlias = Callable[[int, int, int], float]  # Numbers of P and D, and tokens, to seconds.


def usual_load_s(producer: int, consumer: int, num_tokens: int) -> float:
    return num_tokens / LOAD_TOKENS_PER_S


def prefill_s(candidate: Candidate, num_tokens: int) -> float:
    """From now to the first token, if this engine computes the prompt."""
    num_computed = max(1, num_tokens - candidate.num_cached_tokens - candidate.num_lent_tokens)
    computing_s = (candidate.num_queued_tokens + num_computed) / candidate.prefill_tokens_per_s
    return computing_s + tier_load_s(candidate) + candidate.lent_load_s


def tier_load_s(candidate: Candidate) -> float:
    """What the engine has in its tiers and not in its cache. It computes what it computes faster."""
    rate = candidate.prefill_tokens_per_s
    return tier_s(candidate.num_host_tokens, candidate.num_stored_tokens, rate)


def tier_s(num_host_tokens: int, num_stored_tokens: int, least_tokens_per_s: float = 0.0) -> float:
    """From host memory and from a store into an engine's cache."""
    from_host_s = num_host_tokens / max(HOST_TOKENS_PER_S, least_tokens_per_s)
    return from_host_s + num_stored_tokens / max(STORE_TOKENS_PER_S, least_tokens_per_s)


def later_s(candidate: Candidate, num_output_tokens: float) -> float:
    """The tokens after the first one: the engine's steps, and what its queue adds to them."""
    busy_s = candidate.num_queued_tokens / candidate.prefill_tokens_per_s
    return num_output_tokens * (candidate.step_s + candidate.token_s * candidate.num_running) + HARM * busy_s


def placements(
    num_tokens: int,
    num_output_tokens: float,
    producers: Sequence[Candidate],
    consumers: Sequence[Candidate],
    load_s: LoadTime = usual_load_s,
    *,
    is_push: bool = False,
    home: int = 0,
) -> list[Placement]:
    """For each consumer: alone, and with the producer that computes the prompt first.

    `num_output_tokens`: expected. `home`: a key of 64 bits that is the prompt's; 0: it has no home. Takes
    time in proportion to all candidates together: how fast the pairs are does not change the choice of the
    producer.
    """
    found: list[Placement] = []
    times_s = [prefill_s(producer, num_tokens) for producer in producers]
    ttft_s, hidden_s = min(times_s, default=0.0), 0.0
    best = times_s.index(ttft_s) if times_s else None
    if best is not None and is_push:
        hidden_s = ttft_s - producers[best].num_queued_tokens / producers[best].prefill_tokens_per_s
    # As many prompts have their home with the producers as there are producers among the engines.
    is_alone_away = home < KEYS * len(producers) / max(1, len(producers) + len(consumers))
    for number, candidate in enumerate(consumers):
        busy_s = candidate.num_queued_tokens / candidate.prefill_tokens_per_s
        rest_s = later_s(candidate, num_output_tokens)
        alone_s = prefill_s(candidate, num_tokens)
        harm_s = HARM * candidate.num_running * (alone_s - busy_s)
        away_s = AWAY * num_tokens / candidate.prefill_tokens_per_s if home else 0.0
        away_alone_s, away_split_s = (away_s, 0.0) if is_alone_away else (0.0, away_s)
        found.append(Placement(None, number, alone_s, alone_s + harm_s + away_alone_s + rest_s))
        if best is not None:
            num_here = candidate.num_cached_tokens - candidate.num_host_tokens - candidate.num_stored_tokens
            num_loaded = max(0, num_tokens - num_here)
            left_s = max(0.0, load_s(best, number, num_loaded) - hidden_s)
            found.append(Placement(best, number, ttft_s, ttft_s + left_s + away_split_s + rest_s))
    return found
