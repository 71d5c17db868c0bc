"""Placement of a request with the least predicted cost. Pure functions.

    P, then D   the prompt waits for P's queue; D loads the KV while P's first token is on its way
    D alone     the prompt waits for D's queue, and the answers that D is giving wait for the prompt

Cost is in seconds: the time to the first token, the load, the steps of the answer, and what the request adds
to the time of the running requests. KV moves while P computes in push, so only the rest of the load counts.
The router takes each number of an engine from what it knows: queues of its own requests, cached tokens from
the index, speeds that it learns (`rates`), which start as those of a modelled engine.

A request waits for a busy engine that has its prefix if that takes less time than computing the prefix on
another engine. An engine has to load blocks that it has in host memory or in a store. This takes longer than
a hit in its cache, and never longer than computing them. An engine that computes a prompt reads the blocks
that another engine lends, if that takes less time.

A prompt that is handed over is in two caches afterwards. The caches of all engines hold more prompts if most
prompts are in one cache only. So each prompt has a home, by the hash of its beginning: either a producer, and
it is handed over, or a consumer, and it is not. The home decides as long as the difference in cost is small.

Costs do not choose between pull and push: `--mode` does. The first token comes at the same time in push, and
the second one never later.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

# Cost of a prompt on a decode engine for each answer that it delays, as a share of the prompt's time.
HARM = 0.05
# Cost of a placement away from the prompt's home, as a share of the prompt's time.
AWAY = 0.4
KEYS = 2**64
EXPECTED_OUTPUT = 300  # Tokens of an answer, as long as no stream has ended.
PREFILL_TOKENS_PER_S = 10_000.0  # Speed of an engine, as long as no engine's speed is known.
TOKEN_S = 0.000_15  # Time that one more answer adds to a step of the others, as long as it is not known.
LOAD_TOKENS_PER_S = 75_000.0  # Speed of KV from another engine, as long as no pair's is known.
# Speeds of an engine's own tiers: 20 and 2.5 GB/s, with 128 KiB for each token.
HOST_TOKENS_PER_S = 150_000.0
STORE_TOKENS_PER_S = 20_000.0
LEND_S = 0.02  # Time in which the router gets a loan of cached blocks from an engine.


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """An engine, as one request sees it."""

    num_queued_tokens: int = 0  # Prompt tokens that it has still to compute.
    num_running: int = 0  # Requests that it is answering.
    num_cached_tokens: int = 0  # Tokens of this prompt that it has, in all tiers.
    prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S
    step_s: float = 0.0  # Time of a step without other answers; 0: not known of any engine.
    token_s: float = TOKEN_S  # Time that one more answer adds to each step of the others.
    num_host_tokens: int = 0  # Cached tokens to load from host memory.
    num_stored_tokens: int = 0  # Cached tokens to load from a store.
    num_lent_tokens: int = 0  # Tokens that are not cached here, and that another engine lends.
    lent_load_s: float = 0.0  # Time to load the lent tokens.


IDLE = Candidate()


class Placement(msgspec.Struct, frozen=True, gc=False):
    """Engines for a request, and the cost. None for `producer`: the consumer computes the prompt."""

    producer: int | None  # Index among the producers.
    consumer: int  # Index among the consumers.
    ttft_s: float
    cost_s: float


LoadTime: TypeAlias = Callable[[int, int, int], float]  # Maps indices of P and D, and tokens, to seconds.


def usual_load_s(producer: object, consumer: object, num_tokens: int) -> float:
    return num_tokens / LOAD_TOKENS_PER_S


def prefill_s(candidate: Candidate, num_tokens: int) -> float:
    """Time from now to the first token, if this engine computes the prompt."""
    num_computed = max(1, num_tokens - candidate.num_cached_tokens - candidate.num_lent_tokens)
    computing_s = (candidate.num_queued_tokens + num_computed) / candidate.prefill_tokens_per_s
    return computing_s + tier_load_s(candidate) + candidate.lent_load_s


def tier_load_s(candidate: Candidate) -> float:
    """Time to load the prompt's blocks from the engine's tiers, or to compute them if that is faster."""
    rate = candidate.prefill_tokens_per_s
    return tier_s(candidate.num_host_tokens, candidate.num_stored_tokens, rate)


def tier_s(num_host_tokens: int, num_stored_tokens: int, least_tokens_per_s: float = 0.0) -> float:
    """Time to load from host memory and from a store into an engine's cache."""
    from_host_s = num_host_tokens / max(HOST_TOKENS_PER_S, least_tokens_per_s)
    return from_host_s + num_stored_tokens / max(STORE_TOKENS_PER_S, least_tokens_per_s)


def later_s(candidate: Candidate, num_output_tokens: float) -> float:
    """Time of the tokens after the first one: the engine's steps, and the delay by its queue."""
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
    """Placements on each consumer: alone, and with the producer that can compute the prompt soonest.

    `num_output_tokens`: the expected number. `home`: the prompt's key of 64 bits; 0: it has no home. Takes
    time in proportion to the number of engines, because the speeds of pairs do not change the choice of the
    producer.
    """
    found: list[Placement] = []
    times_s = [prefill_s(producer, num_tokens) for producer in producers]
    ttft_s, hidden_s = min(times_s, default=0.0), 0.0
    best = times_s.index(ttft_s) if times_s else None
    if best is not None and is_push:
        hidden_s = ttft_s - producers[best].num_queued_tokens / producers[best].prefill_tokens_per_s
    # The share of prompts whose home is a producer is the share of producers among the engines.
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
