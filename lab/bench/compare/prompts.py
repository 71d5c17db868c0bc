"""Prompts as traces that `vllm bench serve --dataset-name timed_trace` replays. Pure except for one writer.

A prompt is a list of numbered chunks. Equal numbers at equal positions are an equal prefix, and a new number
makes a prompt that no cache has seen. vLLM's client draws each chunk's tokens from its number, so all systems
get the same tokens.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

CHUNK_TOKENS = 512  # Chunk size of Mooncake's traces.


@dataclass(frozen=True, slots=True)
class Prompt:
    num_tokens: int
    answer_tokens: int
    chunks: tuple[int, ...]
    at_s: float = 0.0  # Time since the start of the load; only for loads with arrival times.


class FreshPrompts:
    """Makes prompts without common chunks. `base`: the first chunk number of a session."""

    def __init__(self, base: int = 1_000_000) -> None:
        self._next = base

    def take(self, count: int, num_tokens: int, answer_tokens: int) -> list[Prompt]:
        return [Prompt(num_tokens, answer_tokens, self._chunks(num_tokens)) for _ in range(count)]

    def _chunks(self, num_tokens: int) -> tuple[int, ...]:
        count = -(-num_tokens // CHUNK_TOKENS)
        first, self._next = self._next, self._next + count
        return tuple(range(first, first + count))


def slice_of_trace(
    lines: Iterable[str],
    *,
    num_requests: int,
    tokens_max: int,
    answer_tokens_max: int,
    answer_share: float,
    duration_s: float,
) -> list[Prompt]:
    """Return the first requests of a Mooncake trace that fit, in order, scaled to a small machine.

    Prompts longer than `tokens_max` are left out rather than cut, so that the others keep their common
    prefixes. Answers are cut to `answer_share` of their length, at most `answer_tokens_max`. Arrivals are
    spread over `duration_s` with the trace's own gaps; arrivals in one tick of its clock are spread over the
    tick, in order. (If they arrived together, the order of service would be random, and TTFT with it.)
    """
    chosen: list[tuple[float, int, int, tuple[int, ...]]] = []
    for line in lines:
        if len(chosen) == num_requests:
            break
        entry = json.loads(line)
        if entry["input_length"] <= tokens_max:
            answer = max(1, min(answer_tokens_max, round(entry["output_length"] * answer_share)))
            chosen.append((entry["timestamp"], entry["input_length"], answer, tuple(entry["hash_ids"])))
    if not chosen:
        return []
    times = _within_ticks([at for at, *_ in chosen])
    first, last = times[0], times[-1]
    scale = duration_s / (last - first) if last > first else 0.0
    return [
        Prompt(size, answer, chunks, (at - first) * scale)
        for at, (_, size, answer, chunks) in zip(times, chosen, strict=True)
    ]


def _within_ticks(times: Sequence[float]) -> list[float]:
    """Spread equal times over one tick; the tick is the smallest gap between times."""
    ticks = Counter(times)
    tick = min((after - before for before, after in pairwise(sorted(ticks))), default=1.0)
    seen: Counter[float] = Counter()
    spread = []
    for at in times:
        spread.append(at + tick * seen[at] / ticks[at])
        seen[at] += 1
    return spread


def offset_chunks(prompts: Sequence[Prompt], offset: int) -> list[Prompt]:
    """Return the same prompts with other tokens, for a round in which no cache has seen them."""
    return [
        Prompt(p.num_tokens, p.answer_tokens, tuple(chunk + offset for chunk in p.chunks), p.at_s)
        for p in prompts
    ]


def shared_share(prompts: Sequence[Prompt]) -> float:
    """Return the share of the prompts' tokens that an unlimited prefix cache would have."""
    seen: set[tuple[int, ...]] = set()
    shared = total = 0
    for prompt in prompts:
        total += prompt.num_tokens
        for index in range(len(prompt.chunks)):
            prefix = prompt.chunks[: index + 1]
            if prefix in seen:
                shared += min(CHUNK_TOKENS, prompt.num_tokens - index * CHUNK_TOKENS)
            seen.add(prefix)
    return shared / total if total else 0.0


def write_trace(prompts: Sequence[Prompt], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            entry = {
                "timestamp": prompt.at_s,
                "input_length": prompt.num_tokens,
                "output_length": prompt.answer_tokens,
                "hash_ids": list(prompt.chunks),
            }
            file.write(json.dumps(entry) + "\n")
