"""Kills an engine during a load: counts what happens to the requests, and times the recovery.

    load ... kill -9 of all of the engine's processes ... the load continues to its end
         ... the system is asked without the engine ... the engine is restarted ... time to the first answer

Each answer is compared with that of the restarted engine alone: it has an empty cache, so it cannot repeat a
mistake of the handoff. A request without an answer has an error, or it hung: no byte for `HANG_S`.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import httpx

from lab.bench.compare.journal import Journal
from lab.bench.compare.running import RunningSystem
from lab.bench.compare.second_leg import Prompts
from lab.bench.compare.systems import Role
from lab.bench.handoff.asking import AskingError, ask

NUM_CLIENTS = 3
PROMPT_TOKENS = 400
ANSWER_TOKENS = 24
HANG_S = 40.0
ALONE_S = 15.0  # Limit for an answer of the rest of the system without the killed engine.
AGAIN_S = 60.0  # Limit for an answer after the engine's restart.
PROBE_TIMEOUT_S = 15.0

Ending = Literal["answered", "error", "hung"]


@dataclass(frozen=True, slots=True)
class Outcome:
    prompt: tuple[int, ...]
    sent_s: float  # Monotonic clock.
    ended_s: float
    ending: Ending
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class KillResult:
    """Result of one kill. Seconds are None if there was no answer in time."""

    outcomes: tuple[Outcome, ...]
    killed_s: float
    alone_s: float | None  # Time from the kill to the end of an answer to a request sent after it.
    restart_s: float  # Time from the start of the engine to its readiness.
    again_s: float | None  # Time from its readiness to the end of the first answer.
    num_wrong: int

    def count(self, ending: Ending) -> int:
        return sum(one.ending == ending for one in self.outcomes)


def measure(system: RunningSystem, role: Role, prompts: Prompts, num_requests: int) -> KillResult:
    """Run the load and the kill. Raises ChildDied or StartTimeout if the engine does not restart, AskingError
    if it then does not answer.
    """
    with httpx.Client(timeout=HANG_S, trust_env=False) as client:
        load = _Load(client, system.url, [prompts.of(PROMPT_TOKENS) for _ in range(num_requests)])
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            running = [pool.submit(load.work) for _ in range(NUM_CLIENTS)]
            load.wait_third(num_requests * HANG_S)
            system.kill(role)
            killed_s = time.monotonic()
            for future in running:
                future.result()
        alone = _first_answer(client, system.url, prompts, ALONE_S)
        alone_s = _earliest([one.ended_s for one in load.outcomes if _is_good_after(one, killed_s)], alone)
        started_s = time.monotonic()
        system.start_engine(role)
        restart_s = system.wait_engine(role, since_s=started_s)
        ready_s = time.monotonic()
        again = _first_answer(client, system.url, prompts, AGAIN_S)
        return KillResult(
            outcomes=tuple(load.outcomes),
            killed_s=killed_s,
            alone_s=None if alone_s is None else alone_s - killed_s,
            restart_s=restart_s,
            again_s=None if again is None else again - ready_s,
            num_wrong=_count_wrong(client, system.engine_url(role), load.outcomes),
        )


def write(journal: Journal, system: str, role: Role, number: int, damage: KillResult) -> None:
    setting = f"kill -9 of {'P' if role == 'prefill' else 'D'}"

    def note(metric: str, *values: float | None) -> None:
        journal.samples("faults", setting, system, metric, number, [v for v in values if v is not None])

    note("requests", len(damage.outcomes))
    note("right", damage.count("answered") - damage.num_wrong)
    note("wrong", damage.num_wrong)
    note("errors", damage.count("error"))
    note("hung", damage.count("hung"))
    note("alone_s", damage.alone_s)
    note("restart_s", damage.restart_s)
    note("again_s", damage.again_s)


class _Load:
    """Prompts that several clients take from."""

    def __init__(self, client: httpx.Client, url: str, prompts: Sequence[list[int]]) -> None:
        self._client = client
        self._url = url
        self._left = list(prompts)
        self._third = max(1, len(prompts) // 3)
        self._changed = threading.Condition()
        self.outcomes: list[Outcome] = []

    def work(self) -> None:
        while True:
            with self._changed:
                if not self._left:
                    return
                prompt = self._left.pop()
            outcome = _ask(self._client, self._url, prompt)
            with self._changed:
                self.outcomes.append(outcome)
                self._changed.notify_all()

    def wait_third(self, timeout_s: float) -> None:
        """Wait for a third of the answers; more requests are then running."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.outcomes) >= self._third, timeout_s)


def _ask(client: httpx.Client, url: str, prompt: Sequence[int]) -> Outcome:
    sent_s = time.monotonic()
    ending: Ending = "answered"
    token_ids: tuple[int, ...] = ()
    try:
        token_ids = ask(client, url, prompt, max_tokens=ANSWER_TOKENS).token_ids
    except AskingError as error:
        ending = "hung" if isinstance(error.__cause__, httpx.TimeoutException) else "error"
    return Outcome(tuple(prompt), sent_s, time.monotonic(), ending, token_ids)


def _first_answer(client: httpx.Client, url: str, prompts: Prompts, within_s: float) -> float | None:
    """Ask repeatedly; return the monotonic time of the first answer's end, or None if there was none."""
    deadline_s = time.monotonic() + within_s
    pause = threading.Event()
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            ask(client, url, prompts.of(PROMPT_TOKENS), max_tokens=2, timeout_s=min(left_s, PROBE_TIMEOUT_S))
        except AskingError:
            pause.wait(0.2)  # A refusal comes at once; this avoids thousands of requests.
        else:
            return time.monotonic()
    return None


def _is_good_after(outcome: Outcome, killed_s: float) -> bool:
    return outcome.ending == "answered" and outcome.sent_s > killed_s


def _earliest(instants: Sequence[float], other: float | None) -> float | None:
    return min([*instants, *([] if other is None else [other])], default=None)


def _count_wrong(client: httpx.Client, url: str, outcomes: Sequence[Outcome]) -> int:
    answered = [one for one in outcomes if one.ending == "answered"]
    wanted = [ask(client, url, one.prompt, max_tokens=ANSWER_TOKENS).token_ids for one in answered]
    return sum(one.token_ids != token_ids for one, token_ids in zip(answered, wanted, strict=True))
