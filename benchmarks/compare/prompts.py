"""Prompts, as traces that `vllm bench serve --dataset-name timed_trace` replays. Pure, but for one writer.

A prompt is a list of numbered chunks; equal numbers at equal places are an equal prefix, and a number that is
new makes a prompt that no cache has seen. vLLM's client draws each chunk's tokens from its number, so all
systems get the same tokens.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

CHUNK_TOKENS = 512  # As in Mooncake's traces.


@dataclass(frozen=True, slots=True)
class Prompt:
    num_tokens: int
    answer_tokens: int
    chunks: tuple[int, ...]
    at_s: float = 0.0  # From the start of the load; only for loads that keep their own time.


class FreshPrompts:
    """Prompts that share nothing with any other. `base`: where a session's numbers begin."""

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
    """The first requests of a Mooncake trace that fit, in their order, scaled to a small machine.

    Prompts longer than `tokens_max` are left out rather than cut, so that the others share what they share in
    it. Answers are cut to `answer_share` of themselves, at most `answer_tokens_max`. The arrivals are spread
    over `duration_s`, with the trace's own gaps; those of one tick of its clock, in their order, over the
    tick. (If they came at one moment, chance would say who is served first, and whose TTFT has the others'.)
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
    """Equal times are taken for one tick of a clock that ticks as often as the smallest gap says."""
    ticks = Counter(times)
    tick = min((after - before for before, after in pairwise(sorted(ticks))), default=1.0)
    seen: Counter[float] = Counter()
    spread = []
    for at in times:
        spread.append(at + tick * seen[at] / ticks[at])
        seen[at] += 1
    return spread


def offset_chunks(prompts: Sequence[Prompt], offset: int) -> list[Prompt]:
    """The same prompts of other tokens: for another round, in which no cache may have seen them."""
    return [
        Prompt(p.num_tokens, p.answer_tokens, tuple(chunk + offset for chunk in p.chunks), p.at_s)
        for p in prompts
    ]


def shared_share(prompts: Sequence[Prompt]) -> float:
    """Share of the prompts' tokens that an endless prefix cache would have had already."""
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
