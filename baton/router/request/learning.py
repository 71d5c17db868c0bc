"""Samples of engines' speeds, from the legs of requests. Pure: time is an argument.

prefill   tokens that an engine has computed, and the time in which it was busy with prompts
decode    time of a step, from SAMPLE_CHUNKS chunks of a stream while the engine computes no prompt
wire      tokens that D has loaded, and its leg's time to the first byte; in pull only, because KV moves
          while P computes it in push
"""

from baton.router.fleet.notes import Outcome
from baton.router.fleet.view import FleetView
from baton.router.request.answers import LegAnswer, num_computed, num_transferred
from baton.router.request.events import Doubt, Leg
from baton.router.values.rates import SAMPLE_TOKENS_MAX, Rate, Window

SAMPLE_CHUNKS = 16
SAMPLE_EVERY_S = 0.25  # Least time between two samples of an engine, so that they are of different loads.
LOADED_TOKENS_MIN = 64


def note_start(leg: Leg, now_s: float, *, shows_first: bool) -> None:
    """Note that a leg begins. Its tokens are not counted in its engine's queue yet.

    `shows_first`: its answer begins with the first token.
    """
    if not leg.num_queued_tokens:
        return
    engine = leg.engine
    engine.busy.start(now_s, is_idle=not engine.queued_tokens)
    if not shows_first:
        engine.busy.spoil()


def note_answer(leg: Leg, answer: LegAnswer, now_s: float) -> None:
    """Note that a leg's answer has begun. Its tokens are still counted in its engine's queue."""
    if not leg.num_queued_tokens:
        return
    engine = leg.engine
    if answer.status != 200 or engine.elsewhere.num_queued_tokens:
        return engine.busy.spoil()
    exact = num_computed(answer)
    is_last = engine.num_queued_tokens == leg.num_queued_tokens
    sample = engine.busy.end(leg.num_queued_tokens if exact is None else exact, now_s, is_last=is_last)
    if sample is not None:
        engine.prefill_rate.note(*sample)
    return None


def note_outpaced(leg: Leg, now_s: float) -> None:
    """Another engine has computed the prompt first. This engine is at most as fast as its queue shows.

    An engine whose prompts are always hedged would count as fast as its peers without this sample.
    """
    num_tokens, took_s = leg.num_tokens_before + leg.num_queued_tokens, now_s - leg.started_at_s
    if took_s > 0.0:
        leg.engine.prefill_rate.note(num_tokens / took_s, min(num_tokens, SAMPLE_TOKENS_MAX))


def note_closed(leg: Leg, outputs: Rate) -> None:
    """Note that a leg has ended. `outputs`: the lengths of streams."""
    if leg.num_queued_tokens:
        leg.engine.busy.spoil()
    if leg.role == "decode":
        outputs.note(leg.num_chunks_before + leg.num_chunks)


def note_chunks(leg: Leg, now_s: float) -> None:
    """Note a sample of decode steps. SAMPLE_CHUNKS or more chunks have come since the last call."""
    engine, before, num_chunks = leg.engine, leg.window, leg.num_chunks
    now = Window(now_s, engine.load, not engine.queued_tokens)
    leg.window, leg.num_chunks = now, 0
    leg.num_chunks_before += num_chunks
    if before is None or not (before.is_clear and now.is_clear) or now_s < engine.next_step_sample_s:
        return
    engine.next_step_sample_s = now_s + SAMPLE_EVERY_S
    num_others = max(0.0, (before.num_running + now.num_running) / 2 - 1)
    engine.steps.note(num_others, (now_s - before.since_s) / num_chunks)


def loaded(leg: Leg, answer: LegAnswer, now_s: float) -> tuple[int, float]:
    """Tokens that D has loaded, and the time of the load in seconds. (0, 0.0): no sample."""
    num_tokens, engine = num_transferred(answer), leg.engine
    took_s = now_s - leg.started_at_s - engine.steps.at(engine.load)
    if num_tokens < LOADED_TOKENS_MIN or took_s <= 0.0 or leg.num_tokens_before or engine.queued_tokens:
        return 0, 0.0
    return num_tokens, took_s


def settle(view: FleetView, doubt: Doubt, now_s: float) -> Outcome:
    """Settle a doubt after both engines were asked again. Unlike weights are no fault of the pair."""
    if doubt.has_other_weights:
        return "other_weights"
    view.note_handoff(doubt.lent.engine, doubt.used.engine, doubt.outcome, now_s)
    return doubt.outcome
