"""Pairs of prefill and decode engines that hand over to each other.

    mismatch_of   why two engines cannot hand over, by their introductions
    Pairs         outcomes of pairs. A pair that hands nothing over is stopped for a while: D computes alone.

        USED --FAILURES_TO_STOP prompts in a row that D computed itself--> STOPPED
        STOPPED --back-off over--> USED, and the next failure stops it for twice as long
        any --a prompt was handed over--> USED, and all failures are forgotten

Time is an argument. Nothing here knows HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.core.identity import KVIdentity, differences, differs_in_weights_only
from baton.router.fleet.cost import LOAD_TOKENS_PER_S
from baton.router.fleet.engine import Engine
from baton.router.values.rates import Line

FAILURES_TO_STOP = 3  # A single failure may have its own reason: a lease that expired, a full pool.
BACKOFF_FIRST_S = 5.0
BACKOFF_MAX_S = 300.0
LEAST_TOKENS_GAP = 256.0  # Least difference of two loads from which the router learns the time of a token.


def mismatch_of(producer: Engine, consumer: Engine, lent: KVIdentity | None = None) -> str | None:
    """Why two engines cannot hand over. None: they match, or one of them does not report enough to compare.

    `lent`: identity of the KV that the producer has lent; the producer's weights may have changed since.
    """
    if consumer.names and producer.names and set(consumer.names).isdisjoint(producer.names):
        return "different models: they have no name in common"
    ours, theirs = consumer.introduction, producer.introduction
    if ours is None or theirs is None:
        return None
    kv, lent = ours.kv_identity, lent or theirs.kv_identity
    if kv is not None and lent is not None and (different := differences(kv, lent)):
        what = "other weights" if differs_in_weights_only(kv, lent) else "different models"
        return f"{what}: " + "; ".join(different)
    if "" not in (ours.text_id, theirs.text_id) and ours.text_id != theirs.text_id:
        return (
            "different tokenizers, chat templates, or tokens that end an answer: they read a text differently"
        )
    if ours.secret_ids is None or theirs.secret_ids is None or ours.secret_ids == theirs.secret_ids:
        return None
    if not theirs.secret_ids or not ours.secret_ids:
        return "one engine has a cluster secret, the other has none"
    if theirs.secret_ids[0] not in ours.secret_ids:
        return "different cluster secrets: the decode engine does not accept what the prefill engine signs"
    return None


def new_load_line() -> Line:
    """Line of load times by loaded tokens: seconds from D's leg to its answer, without the decode step."""
    return Line(1 / LOAD_TOKENS_PER_S, LEAST_TOKENS_GAP)


@dataclass(slots=True)
class PairState:
    num_handed_over: int = 0
    num_computed: int = 0  # Prompts that D computed although P had lent them.
    failures_in_row: int = 0
    stopped_until_s: float = 0.0
    backoff_s: float = 0.0  # Length of the last stop; 0: no stop since the last handoff.
    why: str | None = None
    loads: Line = field(default_factory=new_load_line)


class Pairs:
    """Outcomes and load times of all pairs. Not thread-safe: only the router's loop uses it."""

    def __init__(self) -> None:
        self._states: dict[tuple[Engine, Engine], PairState] = {}
        self._loads = new_load_line()  # Loads of all pairs, for a pair without loads of its own.

    def load_s(self, producer: Engine, consumer: Engine, num_tokens: int) -> float:
        """Time in which D loads so many tokens from P, learned from the pair's loads, or from all pairs'."""
        state = self._states.get((producer, consumer))
        loads = self._loads if state is None or state.loads.base_s is None else state.loads
        return loads.at(num_tokens) if num_tokens else 0.0

    def note_load(self, producer: Engine, consumer: Engine, num_tokens: int, took_s: float) -> None:
        self._state(producer, consumer).loads.note(num_tokens, took_s)
        self._loads.note(num_tokens, took_s)

    def why_not(
        self, producer: Engine, consumer: Engine, now_s: float, lent: KVIdentity | None = None
    ) -> str | None:
        """Why the pair may not be used now. None: it may. `lent`: see `mismatch_of`."""
        if (mismatch := mismatch_of(producer, consumer, lent)) is not None:
            return mismatch
        state = self._states.get((producer, consumer))
        return state.why if state is not None and now_s < state.stopped_until_s else None

    def note_handed_over(self, producer: Engine, consumer: Engine) -> None:
        state = self._state(producer, consumer)
        state.num_handed_over += 1
        state.failures_in_row, state.backoff_s, state.stopped_until_s, state.why = 0, 0.0, 0.0, None

    def note_computed(self, producer: Engine, consumer: Engine, why: str, now_s: float) -> bool:
        """Note that D computed a prompt that P had lent. True: this failure stops the pair."""
        state = self._state(producer, consumer)
        state.num_computed += 1
        state.failures_in_row += 1
        state.why = why
        if now_s < state.stopped_until_s or (
            not state.backoff_s and state.failures_in_row < FAILURES_TO_STOP
        ):
            return False
        state.backoff_s = min(BACKOFF_MAX_S, 2 * state.backoff_s or BACKOFF_FIRST_S)
        state.stopped_until_s = now_s + state.backoff_s
        return True

    def forget(self, engine: Engine) -> None:
        for pair in [pair for pair in self._states if engine in pair]:
            del self._states[pair]

    def snapshot(self, engines: Sequence[Engine], now_s: float) -> list[dict[str, Any]]:
        """State of the pairs that had a handoff or a failure, or that cannot hand over, for operators."""
        shown = []
        for producer in (engine for engine in engines if engine.role == "prefill"):
            for consumer in (engine for engine in engines if engine.role == "decode"):
                state = self._states.get((producer, consumer))
                why = self.why_not(producer, consumer, now_s)
                if state is None and why is None:
                    continue
                state = state or PairState()
                shown.append(
                    {
                        "prefill": producer.url,
                        "decode": consumer.url,
                        "usable": why is None,
                        "reason": why,
                        "handed_over": state.num_handed_over,
                        "computed": state.num_computed,
                        **_load_speed(state.loads),
                        "retry_in_s": round(max(0.0, state.stopped_until_s - now_s), 1),
                    }
                )
        return shown

    def _state(self, producer: Engine, consumer: Engine) -> PairState:
        return self._states.setdefault((producer, consumer), PairState())


def _load_speed(loads: Line) -> dict[str, float | None]:
    """Learned speed of a pair's loads, for operators. None: not learned."""
    is_known = loads.base_s is not None
    rate = 1 / loads.slope_s if is_known and loads.slope_s else None
    return {"load_base_s": loads.base_s, "load_tokens_per_s": rate}
