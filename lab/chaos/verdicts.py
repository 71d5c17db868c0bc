"""Verdicts on the answers of a cell: pure functions without a clock.

right        complete, and equal to the single engine's answer
clear error  an error in OpenAI's form; any text before it is the beginning of the right answer
wrong        a token, a logprob or a text differs from the single engine's answer
unclear      ended in any other way: a cut connection, a stream without [DONE], an error without a message
hung         did not end
left         the client closed the connection; any text before that is the beginning of the right answer
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Literal

import msgspec

from lab.chaos.answers import Answer

LOGPROB_DIFFERENCE_MAX = 5e-3  # Two engines may compute one prompt in different batches.
DETAILS_MAX = 3  # Descriptions of bad answers that a record keeps.

Verdict = Literal["right", "clear error", "wrong", "unclear", "hung", "left"]


class Counts(msgspec.Struct, frozen=True):
    """Counts of one cell. Durations are seconds; None: there was no such answer."""

    requests: int
    right: int
    clear_errors: int
    wrong: int
    unclear: int
    hung: int
    left: int
    longest_wait_s: float
    median_wait_s: float | None  # Median of right answers that ended before the fault began.
    # Time from the fault's begin to the end of the last request that was open then.
    open_longest_s: float | None
    # Time from the fault's begin to the first right answer to a request sent after it.
    after_begin_s: float | None
    after_end_s: float | None  # The same from the fault's end.
    details: tuple[str, ...]
    # Streams that ended with an error after a token, although they could be continued.
    broken_streams: int = 0
    open_pause_s: float | None = None  # The longest pause of a right stream that was open at the begin.
    errors: tuple[str, ...] = ()  # Messages of clear errors, each once, most frequent first.


def verdict_on(answer: Answer, expected: Answer) -> Verdict:
    """Return the verdict on one answer. `expected` is the single engine's answer to the same question."""
    if not _begins_as(answer, expected):
        return "wrong"
    if answer.is_complete:
        is_whole = answer.token_ids == expected.token_ids and answer.text == expected.text
        return "right" if is_whole and len(answer.logprobs) == len(expected.logprobs) else "wrong"
    if answer.is_hung:
        return "hung"
    if answer.was_left:
        return "left"
    if answer.error is not None and answer.failure is None:
        return "clear error"
    return "unclear"


def _begins_as(answer: Answer, expected: Answer) -> bool:
    return (
        answer.token_ids == expected.token_ids[: len(answer.token_ids)]
        and expected.text.startswith(answer.text)
        and len(answer.logprobs) <= len(expected.logprobs)
        and all(
            abs(ours - theirs) <= LOGPROB_DIFFERENCE_MAX
            for ours, theirs in zip(answer.logprobs, expected.logprobs, strict=False)
        )
    )


def count(
    answers: Sequence[Answer],
    expected: Mapping[int, Answer],
    others: Mapping[int, Answer] = {},
    *,
    began_s: float,
    ended_s: float,
    whole: Set[int] = frozenset(),
) -> Counts:
    """Count the answers of one cell. `began_s` and `ended_s` are the instants of the fault.

    `others`: answers with other weights, which those that were open during the fault may be.
    `whole`: questions whose streams the fault must not break.
    """
    verdicts = []
    for answer in answers:
        verdict = verdict_on(answer, expected[answer.question])
        if verdict == "wrong" and others and began_s < answer.ended_s and answer.started_s < ended_s:
            verdict = verdict_on(answer, others[answer.question])
        verdicts.append((verdict, answer))
    tally = Counter(verdict for verdict, _ in verdicts)
    right = [answer for verdict, answer in verdicts if verdict == "right"]
    before = sorted(answer.waited_s for answer in right if answer.ended_s < began_s)
    return Counts(
        requests=len(answers),
        right=tally["right"],
        clear_errors=tally["clear error"],
        wrong=tally["wrong"],
        unclear=tally["unclear"],
        hung=tally["hung"],
        left=tally["left"],
        longest_wait_s=max((answer.waited_s for answer in answers), default=0.0),
        median_wait_s=before[len(before) // 2] if before else None,
        open_longest_s=max(
            (a.ended_s - began_s for a in answers if a.started_s < began_s < a.ended_s), default=None
        ),
        after_begin_s=_first_after(right, began_s),
        after_end_s=_first_after(right, ended_s),
        details=tuple(
            _detail(verdict, answer, expected[answer.question])
            for verdict, answer in verdicts
            if verdict in ("wrong", "unclear", "hung")
        )[:DETAILS_MAX],
        broken_streams=sum(
            verdict == "clear error" and bool(answer.token_ids) and answer.question in whole
            for verdict, answer in verdicts
        ),
        open_pause_s=max(
            (a.longest_pause_s for a in right if a.started_s < began_s < a.ended_s and a.last_event_s),
            default=None,
        ),
        errors=_messages([answer for verdict, answer in verdicts if verdict == "clear error"]),
    )


def _messages(answers: Sequence[Answer]) -> tuple[str, ...]:
    """Return the most frequent messages, with # for each digit, since equal kinds differ in digits."""
    kinds = Counter("".join("#" if c.isdigit() else c for c in a.error or "")[:200] for a in answers)
    return tuple(kind for kind, _ in kinds.most_common(DETAILS_MAX))


def _first_after(right: Sequence[Answer], instant_s: float) -> float | None:
    return min((a.ended_s - instant_s for a in right if a.started_s >= instant_s), default=None)


def _detail(verdict: Verdict, answer: Answer, expected: Answer) -> str:
    what = f"question {answer.question}, {verdict} after {answer.waited_s:.1f} s, HTTP {answer.status}"
    if verdict != "wrong":
        return f"{what}: {answer.failure or answer.error or 'the stream ended without [DONE]'}"[:300]
    for at, (ours, theirs) in enumerate(zip(answer.token_ids, expected.token_ids, strict=False)):
        if ours != theirs:
            return f"{what}: token {at} is {ours}, not {theirs}"
    if len(answer.token_ids) != len(expected.token_ids):
        return f"{what}: {len(answer.token_ids)} tokens, not {len(expected.token_ids)}"
    if answer.text != expected.text:
        return f"{what}: text {answer.text[:60]!r}, not {expected.text[:60]!r}"
    return f"{what}: logprobs {answer.logprobs[:4]}..., not {expected.logprobs[:4]}..."
