"""Measurements of one mode: its prompt lengths one after the other, then the overheads around a handoff.

The three kinds of request alternate, and each prompt is used once. A trial during which other programs ran
is repeated, for `patience_s` at each length; in the end the least disturbed trials count, whatever they
measured. Each result is passed to `on_result` at once, so that an interrupted run keeps its results.
"""

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from statistics import median, quantiles
from typing import Any

import httpx
import psutil

from baton.cli.processes import Child
from lab.bench.handoff.asking import REQUEST_TIMEOUT_S, Answer, AskingError, ask, lend
from lab.bench.handoff.goals import Lengthwise, Overheads, Trial
from lab.bench.handoff.system import Neighbours, Prompts, System, model_folder, running_system

ANSWER_TOKENS = 8
DECODE_TOKENS = 48
LENT_TOKENS = 256  # Length of the prompt whose loan an idle producer has.
BESIDE_TOKENS = 128  # Length of an answer whose time between tokens is measured beside other requests.
NEW_PAIRS = 3
IDLE_S = 5.0
SETTLE_S = 0.5  # Pause after the last request, for its remaining work.
QUIET_CORES = 0.1  # More use by other programs counts as a disturbance.

OnResult = Callable[[Lengthwise | Overheads], None]


def measure(
    mode: str, tokens: Sequence[int], repeats: int, on_result: OnResult, *, patience_s: float = 0.0
) -> None:
    """Measure one mode. Raises BatonError if the system does not start or answers wrongly."""
    firsts_s = []  # A pair is new once, so further systems are started for it.
    for _ in range(NEW_PAIRS - 1):
        with _bench(mode, tokens, repeats, patience_s) as bench:
            bench.warm_up(tokens[:1])
            firsts_s.append(bench.second_token_s(tokens[0]))
    with _bench(mode, tokens, repeats, patience_s) as bench:
        bench.warm_up(tokens)
        firsts_s.append(bench.second_token_s(tokens[0]))
        rows = []
        for num_tokens in tokens:
            rows.append(bench.at_length(num_tokens))
            on_result(rows[-1])
        on_result(bench.overheads(median(firsts_s), rows[0]))


@contextmanager
def _bench(mode: str, tokens: Sequence[int], repeats: int, patience_s: float) -> Iterator["_Bench"]:
    with (
        running_system(mode, model_folder(), max(*tokens, LENT_TOKENS) + 64) as system,
        httpx.Client(timeout=REQUEST_TIMEOUT_S, trust_env=False) as client,
    ):
        yield _Bench(client, system, mode, repeats, patience_s)


class _Bench:
    def __init__(
        self, client: httpx.Client, system: System, mode: str, repeats: int, patience_s: float
    ) -> None:
        self._client = client
        self._system = system
        self._mode = mode
        self._repeats = repeats
        self._patience_s = patience_s
        self._prompts = Prompts()

    def ask(
        self,
        url: str,
        prompt: int | Sequence[int],
        max_tokens: int = ANSWER_TOKENS,
        *,
        request_id: str | None = None,
    ) -> Answer:
        """`prompt`: its tokens, or their number: a prompt that no engine has computed."""
        if isinstance(prompt, int):
            prompt = self._prompts.of(prompt)
        return ask(self._client, url, prompt, max_tokens=max_tokens, request_id=request_id)

    def warm_up(self, tokens: Sequence[int]) -> None:
        """Run first kernels and allocations on each engine alone, so that the pair is still new."""
        for url in (self._system.producer, self._system.consumer, self._system.single):
            for num_tokens in sorted({tokens[0], tokens[-1]}):
                self.ask(url, num_tokens, max_tokens=4)

    def second_token_s(self, num_tokens: int) -> float:
        """Return the time to the second token of P and D, of a prompt that P has computed before.

        A prefill of seconds would hide what a new pair takes: its time varies by 2 %.
        """
        prompt = self._prompts.of(num_tokens)
        self.ask(self._system.producer, prompt, max_tokens=1)
        answer = self.ask(self._system.router, prompt)
        return answer.first_token_s + answer.second_gap_s

    def at_length(self, num_tokens: int) -> Lengthwise:
        copied_s, num_copies = self._copies()
        trials, num_disturbed = self._trials(num_tokens)
        copied_after_s, num_after = self._copies()
        if num_after == num_copies:
            raise AskingError("the consumer counted no handoff: it computes prompts instead of fetching KV")
        return Lengthwise(
            self._mode,
            num_tokens,
            tuple(trials),
            copy_s=(copied_after_s - copied_s) / (num_after - num_copies),
            num_disturbed=num_disturbed,
            date=_now(),
        )

    def overheads(self, first_s: float, later: Lengthwise) -> Overheads:
        """`first_s`: `second_token_s` of new pairs."""
        neighbours = Neighbours()
        usual_s = median(self.second_token_s(later.num_tokens) for _ in range(self._repeats))
        return Overheads(
            self._mode,
            new_pair_s=first_s - usual_s,
            idle_share=_idle_share(self._system.producer_process),
            idle_loan_share=self._idle_with_loan(),
            decode_ratio=self._decode_ratio(),
            others_cores=neighbours.cores(),
            date=_now(),
            **self._beside_p99_s(later.num_tokens),
        )

    def _trials(self, num_tokens: int) -> tuple[list[Trial], int]:
        """Return (the trials that count, the number of those that do not)."""
        give_up_at = time.monotonic() + self._patience_s
        trials: list[Trial] = []
        while True:
            trials.append(self._trial(num_tokens))
            num_quiet = sum(trial.others_cores <= QUIET_CORES for trial in trials)
            is_over = len(trials) >= self._repeats and time.monotonic() >= give_up_at
            if num_quiet >= self._repeats or is_over:
                trials.sort(key=lambda trial: trial.others_cores)
                return trials[: self._repeats], len(trials) - self._repeats

    def _trial(self, num_tokens: int) -> Trial:
        neighbours = Neighbours()
        single = self.ask(self._system.single, num_tokens)
        handoff, phases = self._handoff(num_tokens)
        late = self.ask(self._system.late_router, num_tokens)
        return Trial(
            single.first_token_s,
            median(single.later_gaps_s),
            handoff.first_token_s,
            handoff.second_gap_s,
            late.first_token_s,
            neighbours.cores(),
            phases,
        )

    def _handoff(self, num_tokens: int) -> tuple[Answer, dict[str, float]]:
        """Return (the answer, the phases of the gap before its second token)."""
        name = secrets.token_hex(8)
        sent_at_s = time.time()
        answer = self.ask(self._system.router, num_tokens, request_id=name)
        timelines = self._client.get(f"{self._system.consumer}/baton/requests/{name}").json()["timelines"]
        first_at_s, second_at_s = (sent_at_s + arrived_s for arrived_s in answer.arrived_s[:2])
        return answer, phases_of(timelines[-1], first_at_s, second_at_s) if timelines else {}

    def _copies(self) -> tuple[float, int]:
        """Return (seconds on the wire, number of handoffs) of the consumer since its start."""
        text = self._client.get(f"{self._system.consumer}/metrics").text
        return _metric(text, "kv_transfer_wire_seconds_sum"), int(
            _metric(text, "kv_transfer_wire_seconds_count")
        )

    def _idle_with_loan(self) -> float:
        prompt = self._prompts.of(LENT_TOKENS)
        lend(self._client, self._system.producer, prompt, f"bench-{secrets.token_hex(4)}")
        return _idle_share(self._system.producer_process)

    def _decode_ratio(self) -> float:
        """Return the time per token of an engine with a connector over that of one without."""
        ratios = []
        for _ in range(self._repeats):
            single = self.ask(self._system.single, 64, DECODE_TOKENS)
            loaded = self.ask(self._system.consumer, 64, DECODE_TOKENS)
            ratios.append(median(loaded.later_gaps_s) / median(single.later_gaps_s))
        return median(ratios)

    def _beside_p99_s(self, num_tokens: int) -> dict[str, float]:
        """Return the fields of `Overheads` for an answer of D while other requests run."""
        gaps_s: dict[str, list[float]] = {"beside_handoffs_p99_s": [], "beside_prompts_p99_s": []}
        urls = (self._system.router, self._system.single)
        with ThreadPoolExecutor(1) as pool:
            for _ in range(self._repeats):
                for gaps, url in zip(gaps_s.values(), urls, strict=True):
                    decoding = pool.submit(self.ask, self._system.consumer, 64, BESIDE_TOKENS)
                    while not decoding.done():
                        self.ask(url, num_tokens)
                    gaps += decoding.result().later_gaps_s
        return {name: quantiles(gaps, n=100)[98] for name, gaps in gaps_s.items()}


def phases_of(timeline: Mapping[str, Any], first_at_s: float, second_at_s: float) -> dict[str, float]:
    """Return where the gap between a client's first two tokens goes, in s by phase, in their order.

    Args:
        timeline: the request's timeline at D, as in `GET /baton/requests/{id}`.
        first_at_s: the client had the first token. Like `second_at_s`, on the clock of `arrived_at_s`.

    A phase that ended before the first token has 0, as most phases of push.
    """
    came_at_s, fetch = timeline["arrived_at_s"], timeline["fetch"] or {}
    ends = {
        "to D": 0.0,
        "admission": timeline["admitted_s"],
        "claim": fetch.get("claimed_s"),
        "handshake": fetch.get("ready_s"),
        "blocks": fetch.get("allocated_s"),
        "order": fetch.get("started_s"),
        "read": fetch.get("read_s"),
        "lease": fetch.get("ended_s"),
        "schedule": timeline["scheduled_s"],
    }
    phases, last_at_s = {}, first_at_s
    for name, end_s in ends.items():
        at_s = last_at_s if end_s is None else max(last_at_s, came_at_s + end_s)
        phases[name], last_at_s = at_s - last_at_s, at_s
    return phases | {"step": second_at_s - last_at_s}


def _metric(text: str, name: str) -> float:
    """Return the sum of a metric over its labels."""
    return sum(
        float(value)
        for value in re.findall(rf"^baton:{name}(?:\{{[^}}]*\}})? (\S+)", text, flags=re.MULTILINE)
    )


def _idle_share(child: Child) -> float:
    """Return CPU seconds per second of an idle process and its children."""
    process = psutil.Process(child.pid)
    tree = [process, *process.children(recursive=True)]
    time.sleep(SETTLE_S)
    before = sum(sum(member.cpu_times()[:2]) for member in tree)
    time.sleep(IDLE_S)
    return (sum(sum(member.cpu_times()[:2]) for member in tree) - before) / IDLE_S


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
