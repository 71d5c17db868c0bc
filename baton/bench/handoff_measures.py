"""Measures one mode: its prompt lengths one after the other, then what surrounds a handoff.

The three ways to ask take turns, each prompt used once. A turn during which other programs were at work is
taken again, for `patience_s` at each length; what counts in the end are the turns that were disturbed least,
whatever they measured. What is known is handed on at once (`on_result`): a run that is broken off was not in
vain.
"""

import re
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from statistics import median

import httpx
import psutil

from baton.bench.asking import REQUEST_TIMEOUT_S, Answer, AskingError, ask, lend
from baton.bench.handoff_goals import Lengthwise, Overheads, Turn
from baton.bench.handoff_system import Neighbours, Prompts, System, model_folder, running_system
from baton.cli.processes import Child

ANSWER_TOKENS = 8
DECODE_TOKENS = 48
IDLE_S = 5.0
SETTLE_S = 0.5  # After the last request, for what it left to do.
QUIET_CORES = 0.1  # Used by others: more is a disturbance.

OnResult = Callable[[Lengthwise | Overheads], None]


def measure(
    mode: str, tokens: Sequence[int], repeats: int, on_result: OnResult, *, patience_s: float = 0.0
) -> None:
    """Raises BatonError if the system does not start, or answers otherwise than it should."""
    with (
        running_system(mode, model_folder(), max(tokens) + 64) as system,
        httpx.Client(timeout=REQUEST_TIMEOUT_S, trust_env=False) as client,
    ):
        bench = _Bench(client, system, mode, repeats, patience_s)
        bench.warm_up(tokens)
        first = bench.ask(system.router, tokens[0])
        rows = []
        for num_tokens in tokens:
            rows.append(bench.at_length(num_tokens))
            on_result(rows[-1])
        on_result(bench.overheads(first, rows[0]))


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

    def ask(self, url: str, num_tokens: int, max_tokens: int = ANSWER_TOKENS) -> Answer:
        return ask(self._client, url, self._prompts.of(num_tokens), max_tokens=max_tokens)

    def warm_up(self, tokens: Sequence[int]) -> None:
        """First kernels, first allocations; the engines one by one, so that the pair stays a new one."""
        for url in (self._system.producer, self._system.consumer, self._system.single):
            for num_tokens in (tokens[0], tokens[-1]):
                self.ask(url, num_tokens, max_tokens=4)

    def at_length(self, num_tokens: int) -> Lengthwise:
        copied_s, num_copies = self._copies()
        turns, num_disturbed = self._turns(num_tokens)
        copied_after_s, num_after = self._copies()
        if num_after == num_copies:
            raise AskingError("the consumer has counted no handoff: it computes what it should fetch")
        return Lengthwise(
            self._mode,
            num_tokens,
            tuple(turns),
            copy_s=(copied_after_s - copied_s) / (num_after - num_copies),
            num_disturbed=num_disturbed,
            date=_now(),
        )

    def overheads(self, first: Answer, later: Lengthwise) -> Overheads:
        neighbours = Neighbours()
        usual_s = median(turn.handoff_s + turn.second_gap_s for turn in later.turns)
        return Overheads(
            self._mode,
            new_pair_s=first.first_token_s + first.second_gap_s - usual_s,
            idle_share=_idle_share(self._system.producer_process),
            idle_loan_share=self._idle_with_loan(),
            decode_ratio=self._decode_ratio(),
            others_cores=neighbours.cores(),
            date=_now(),
        )

    def _turns(self, num_tokens: int) -> tuple[list[Turn], int]:
        """(those that count, how many do not)."""
        give_up_at = time.monotonic() + self._patience_s
        turns: list[Turn] = []
        while True:
            turns.append(self._turn(num_tokens))
            num_quiet = sum(turn.others_cores <= QUIET_CORES for turn in turns)
            is_over = len(turns) >= self._repeats and time.monotonic() >= give_up_at
            if num_quiet >= self._repeats or is_over:
                turns.sort(key=lambda turn: turn.others_cores)
                return turns[: self._repeats], len(turns) - self._repeats

    def _turn(self, num_tokens: int) -> Turn:
        neighbours = Neighbours()
        single = self.ask(self._system.single, num_tokens)
        handoff = self.ask(self._system.router, num_tokens)
        late = self.ask(self._system.late_router, num_tokens)
        return Turn(
            single.first_token_s,
            median(single.later_gaps_s),
            handoff.first_token_s,
            handoff.second_gap_s,
            late.first_token_s,
            neighbours.cores(),
        )

    def _copies(self) -> tuple[float, int]:
        """(seconds on the wire, number of handoffs) of the consumer since its start."""
        text = self._client.get(f"{self._system.consumer}/metrics").text
        return _metric(text, "kv_transfer_wire_seconds_sum"), int(
            _metric(text, "kv_transfer_wire_seconds_count")
        )

    def _idle_with_loan(self) -> float:
        lend(self._client, self._system.producer, self._prompts.of(256), f"bench-{secrets.token_hex(4)}")
        return _idle_share(self._system.producer_process)

    def _decode_ratio(self) -> float:
        """Time per token of an engine with a connector, asked directly, over one without."""
        ratios = []
        for _ in range(self._repeats):
            single = self.ask(self._system.single, 64, DECODE_TOKENS)
            loaded = self.ask(self._system.consumer, 64, DECODE_TOKENS)
            ratios.append(median(loaded.later_gaps_s) / median(single.later_gaps_s))
        return median(ratios)


def _metric(text: str, name: str) -> float:
    """The sum over its labels."""
    return sum(
        float(value)
        for value in re.findall(rf"^baton:{name}(?:\{{[^}}]*\}})? (\S+)", text, flags=re.MULTILINE)
    )


def _idle_share(child: Child) -> float:
    """CPU seconds per second of a process and its children."""
    process = psutil.Process(child.pid)
    tree = [process, *process.children(recursive=True)]
    time.sleep(SETTLE_S)
    before = sum(sum(member.cpu_times()[:2]) for member in tree)
    time.sleep(IDLE_S)
    return (sum(sum(member.cpu_times()[:2]) for member in tree) - before) / IDLE_S


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
