"""Alternating loads: each system gets the same prompts, one system after the other, round after round.

round 1    vllm   nixl   baton
round 2    nixl   baton  vllm           the order rotates, so that no system is always first
...                                     as many rounds as the time allows, at least two
"""

import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lab.bench.compare.journal import Journal
from lab.bench.compare.load import LoadClient, LoadError, LoadResult
from lab.bench.compare.prompts import CHUNK_TOKENS, FreshPrompts, Prompt, offset_chunks
from lab.bench.compare.running import RunningSystem, resumed

ROUNDS_MIN = 2  # One round does not show noise.
WARM_UP_TOKENS = (64, 700)
REPLAY_EXTRA_S = 300.0  # Time that a slow system has after the last request has arrived.
UTF8_BYTES_MAX = 4  # Per character.
LOAD_TIMEOUT_S = 240.0  # Limits a load that hangs; others take seconds.


@dataclass(frozen=True, slots=True)
class Setting:
    """One load: `num_prompts` new prompts, `concurrency` of them at a time."""

    num_prompts: int
    prompt_tokens: int
    answer_tokens: int
    concurrency: int = 1

    @property
    def name(self) -> str:
        return f"{self.prompt_tokens} tokens, {self.concurrency} at once"


@dataclass(frozen=True, slots=True)
class Target:
    """A URL to send prompts to. `name`: its name in the report."""

    name: str
    system: RunningSystem
    url: str


class Deadline:
    """Deadline of a part: after the first two rounds, no round starts that would probably end later.

    Only the first round starts after the end of the session.
    """

    def __init__(self, budget_s: float, session_end_s: float = math.inf) -> None:
        self._end_s = time.monotonic() + budget_s
        self._session_end_s = session_end_s
        self._longest_s = 0.0
        self._began_s: float | None = None

    def begins_round(self, number: int, rounds_max: int) -> bool:
        now_s = time.monotonic()
        if self._began_s is not None:
            self._longest_s = max(self._longest_s, now_s - self._began_s)
        self._began_s = now_s
        probable_end_s = now_s + self._longest_s
        if number < ROUNDS_MIN:
            return number == 0 or probable_end_s <= self._session_end_s
        return number < rounds_max and probable_end_s <= min(self._end_s, self._session_end_s)


class AlternatingLoads:
    """Sends loads to targets and records the results of vLLM's client."""

    def __init__(
        self,
        client: LoadClient,
        journal: Journal,
        fresh: FreshPrompts,
        say: Callable[[str], None],
        session_end_s: float = math.inf,
    ) -> None:
        """`session_end_s`: a time of `time.monotonic`."""
        self._session_end_s = session_end_s
        self._client = client
        self._journal = journal
        self._fresh = fresh
        self._say = say

    def warm_up(self, targets: Sequence[Target]) -> None:
        """Run first kernels, allocations and handshakes. Raises LoadError."""
        for target in targets:
            prompts = [prompt for n in WARM_UP_TOKENS for prompt in self._fresh.take(1, n, 4)]
            with resumed(target.system):
                self._client.run(target.url, prompts, concurrency=1, timeout_s=LOAD_TIMEOUT_S)

    def rounds(
        self,
        part: str,
        targets: Sequence[Target],
        settings: Sequence[Setting],
        *,
        rounds_max: int,
        budget_s: float,
    ) -> None:
        """Run rounds of the settings. The answers of the first target are the reference."""
        deadline = Deadline(budget_s, self._session_end_s)
        for index in itertools.count():
            if not deadline.begins_round(index, rounds_max):
                return
            number = self._journal.next_round()
            for setting in settings:
                prompts = self._fresh.take(setting.num_prompts, setting.prompt_tokens, setting.answer_tokens)
                shift = index % len(targets)
                order = [*targets[shift:], *targets[:shift]]
                self.one_load(part, setting.name, order, targets[0], prompts, number, setting.concurrency)

    def replays(
        self,
        part: str,
        setting: str,
        targets: Sequence[Target],
        prompts: Sequence[Prompt],
        *,
        rounds_max: int,
        budget_s: float,
    ) -> None:
        """Run rounds of prompts with arrival times; each round has other tokens."""
        deadline = Deadline(budget_s, self._session_end_s)
        timeout_s = max(prompt.at_s for prompt in prompts) + REPLAY_EXTRA_S
        num_chunks = 1 + max(chunk for prompt in prompts for chunk in prompt.chunks)
        for index in itertools.count():
            if not deadline.begins_round(index, rounds_max):
                return
            number = self._journal.next_round()
            (first,) = self._fresh.take(1, num_chunks * CHUNK_TOKENS, 1)
            fresh = offset_chunks(prompts, first.chunks[0])
            shift = index % len(targets)
            order = [*targets[shift:], *targets[:shift]]
            self.one_load(part, setting, order, targets[0], fresh, number, None, timeout_s=timeout_s)

    def one_load(
        self,
        part: str,
        setting: str,
        order: Sequence[Target],
        reference: Target,
        prompts: Sequence[Prompt],
        number: int,
        concurrency: int | None,
        timeout_s: float = LOAD_TIMEOUT_S,
    ) -> None:
        """Send one load to each target in `order`. A failed load is recorded and skipped."""
        results: dict[str, LoadResult] = {}
        self._journal.samples("machine", part, "all", "load_1min", number, [os.getloadavg()[0]])
        for target in order:
            with resumed(target.system):
                before_s = target.system.cpu_s()
                try:
                    result = self._client.run(
                        target.url, prompts, concurrency=concurrency, timeout_s=timeout_s
                    )
                except LoadError as error:
                    self._journal.skipped(part, f"{target.name}: {setting}", str(error))
                    self._say(f"  {target.name}: {error}")
                    continue
                cpu_s = target.system.cpu_s() - before_s
            results[target.name] = result
            self._write(part, setting, target.name, number, result, cpu_s)
        if reference.name not in results:
            return
        wanted = results[reference.name]
        for name, result in results.items():
            both_good = set(wanted.good) & set(result.good)
            differing = sum(
                not is_same_answer(result.texts[i], wanted.texts[i], prompts[i].num_tokens) for i in both_good
            )
            self._journal.samples(part, setting, name, "differing_answers", number, [differing])

    def _write(
        self, part: str, setting: str, system: str, number: int, result: LoadResult, cpu_s: float
    ) -> None:
        def write(metric: str, values: Sequence[float]) -> None:
            self._journal.samples(part, setting, system, metric, number, values)

        good = result.good
        write("ttft_s", [result.ttft_s[i] for i in good])
        write("itl_s", [gap for i in good for gap in result.itl_s[i]])
        write("tpot_s", result.tpot_s)
        write("tokens_per_s", [result.tokens_per_s])
        write("cpu_s", [cpu_s])
        write("failed", [result.num_failed])
        write("answers", [len(result.errors)])
        medians = sorted(result.ttft_s[i] for i in good)
        shown = f"{medians[len(medians) // 2] * 1e3:7.0f} ms" if medians else "no answer"
        self._say(
            f"  {part}: {setting:24} {system:32} TTFT {shown}, {result.tokens_per_s:6.1f} tokens/s"
            + (f", {result.num_failed} failed: {_first_error(result)}" if result.num_failed else "")
        )


def is_same_answer(one: str, other: str, prompt_tokens: int) -> bool:
    """Return whether texts are equal, or one of them has the prompt's text before the other.

    vLLM 0.32 primes its detokenizer with the prompt. If the prompt ends within a character, as some of the
    client's random prompts do, the first piece of the answer's text includes the prompt's text.
    """
    short, long = sorted((one, other), key=len)
    prompt_chars_min = prompt_tokens // UTF8_BYTES_MAX  # Tokens of one byte each give the fewest characters.
    return short == long or (long.endswith(short) and len(long) - len(short) >= prompt_chars_min > 0)


def _first_error(result: LoadResult) -> str:
    return next(error for error in result.errors if error).strip().splitlines()[-1][:160]
