"""A simulated engine: continuous batching with chunked prefill, and a prefix cache. Steps take modelled time.

A step computes one token for each running answer, and prompt tokens up to a budget. Its time is

    STEP_S + prompt tokens / PREFILL_TOKENS_PER_S + running answers * TOKEN_S

An engine may pause: a step that would end in the pause ends with it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.core.kv_events import BlockRemoved, BlockStored, KVCacheEvent

BLOCK = 512  # Tokens, as in the traces.
# Speeds in the order of a 70B model on a node of eight H100; only ratios between policies are published.
PREFILL_TOKENS_PER_S = 12_000.0
STEP_S, TOKEN_S = 0.015, 0.000_15
LOAD_TOKENS_PER_S = 75_000.0  # 320 KiB a token over 200 Gbit/s.
BUDGET = 2048  # Prompt tokens of a step beside answers.
RUNNING_MAX = 256
CACHE_BLOCKS = 1500


@dataclass(eq=False)
class Job:
    """One request at one engine."""

    num_tokens: int
    blocks: Sequence[int]  # One name for each whole block; equal names mean equal prefixes.
    num_output: int  # Tokens that this engine gives.
    on_first: Callable[[float, int], None]  # Time, and tokens that were cached.
    on_end: Callable[[float], None]
    is_loaded: bool = False  # True: the request's KV comes from another engine.
    on_token: Callable[[float], None] = lambda now_s: None
    num_computed: int = 0
    is_cancelled: bool = False
    num_cached: int = field(default=0, init=False)
    num_given: int = field(default=0, init=False)


class Engine:
    def __init__(
        self,
        name: str,
        at: Callable[[float, Callable[[], None]], None],
        on_events: Callable[[str, list[KVCacheEvent]], None],
        cache_blocks: int = CACHE_BLOCKS,
        slowness: float = 1.0,
    ) -> None:
        """`slowness`: how much longer its steps take than those of others."""
        self.name, self._at, self._on_events, self._cache_blocks = name, at, on_events, cache_blocks
        self.cache: OrderedDict[int, None] = OrderedDict()  # Blocks; the least recently used one first.
        self.waiting: deque[Job] = deque()
        self.filling: list[Job] = []
        self.running: list[Job] = []
        self._slowness = slowness
        self._is_stepping = False
        self._paused_until_s = 0.0

    def pause(self, until_s: float) -> None:
        self._paused_until_s = until_s

    def cancel(self, job: Job) -> None:
        """What has been computed of its prompt is lost."""
        job.is_cancelled = True
        for jobs in (self.waiting, self.filling):
            if job in jobs:
                jobs.remove(job)

    def num_cached(self, blocks: Sequence[int]) -> int:
        """Tokens."""
        count = 0
        for block in blocks:
            if block not in self.cache:
                break
            count += 1
        return count * BLOCK

    def submit(self, job: Job, now_s: float) -> None:
        self.waiting.append(job)
        if not self._is_stepping:
            self._step(now_s)

    def _admit(self) -> None:
        while self.waiting and len(self.filling) + len(self.running) < RUNNING_MAX:
            job = self.waiting.popleft()
            if job.is_loaded:
                self._keep(job)
                self.running.append(job)
                continue
            job.num_cached = min(self.num_cached(job.blocks), job.num_tokens - 1)
            job.num_computed = job.num_cached
            self._touch(job.blocks[: job.num_cached // BLOCK])
            self.filling.append(job)

    def _step(self, now_s: float) -> None:
        self._admit()
        self._is_stepping = bool(self.filling or self.running)
        if not self._is_stepping:
            return
        budget, chunks = BUDGET, []
        for job in self.filling:
            if not budget:
                break
            chunk = min(budget, job.num_tokens - job.num_computed)
            chunks.append((job, chunk))
            budget -= chunk
        running = list(self.running)
        num_filled = sum(chunk for _, chunk in chunks)
        took_s = STEP_S + num_filled / PREFILL_TOKENS_PER_S + len(running) * TOKEN_S
        took_s *= self._slowness
        begins_s = max(now_s, self._paused_until_s)
        self._at(begins_s + took_s, lambda: self._end_step(begins_s + took_s, chunks, running))

    def _end_step(self, now_s: float, chunks: list[tuple[Job, int]], running: list[Job]) -> None:
        if (until_s := self._paused_until_s) > now_s:
            self._at(until_s, lambda: self._end_step(until_s, chunks, running))
            return
        for job, chunk in chunks:
            if job.is_cancelled:
                continue
            job.num_computed += chunk
            if job.num_computed == job.num_tokens:
                self.filling.remove(job)
                self._keep(job)
                job.on_first(now_s, job.num_cached)
                self.running.append(job)
                self._give(job, now_s)
        for job in running:
            self._give(job, now_s)
        self._step(now_s)

    def _give(self, job: Job, now_s: float) -> None:
        job.num_given += 1
        job.on_token(now_s)
        if job.num_given >= job.num_output:
            self.running.remove(job)
            job.on_end(now_s)

    def _keep(self, job: Job) -> None:
        """Enter the job's prompt into the cache."""
        events: list[KVCacheEvent] = []
        for number, block in enumerate(job.blocks):
            if block in self.cache:
                continue
            self.cache[block] = None
            events.append(
                BlockStored(
                    block_hashes=[block],
                    parent_block_hash=job.blocks[number - 1] if number else None,
                    token_ids=[block] * BLOCK,
                    block_size=BLOCK,
                    medium="GPU",
                )
            )
        self._touch(job.blocks)
        while len(self.cache) > self._cache_blocks:
            block, _ = self.cache.popitem(last=False)
            events.append(BlockRemoved(block_hashes=[block], medium="GPU"))
        if events:
            self._on_events(self.name, events)

    def _touch(self, blocks: Sequence[int]) -> None:
        """Make the blocks the youngest. The tail of a prompt is evicted before its head, as in vLLM."""
        for block in reversed(blocks):
            self.cache.move_to_end(block)
