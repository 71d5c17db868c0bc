"""Hedged prefill: the time after which another engine computes a late prompt as well. Pure.

An engine that pauses (garbage collection, a stopped process, a clogged link) delays its prompts until it
continues, or until probes find it silent. The router predicts how long a prompt takes. If it takes much
longer, a second engine computes it too, and the first answer counts. (Dean and Barroso, The Tail at Scale.)

Predictions are too short where the router underestimates the tokens of a text, or does not see all of an
engine's queue. So the router corrects predicted times by the times that earlier prompts took.
"""

from collections import deque

FACTOR = 2.0  # A prompt is late after this multiple of the time that nearly all prompts take.
LEAST_S = 0.5  # A prompt that takes no longer than this is not late.
NUM_REMEMBERED = 64
SHARE = 0.9  # Share of the remembered prompts that took no longer than the usual time.


class Lateness:
    """Ratio of the time that prompts take to the predicted time."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._usual = 1.0

    def note(self, expected_s: float, took_s: float) -> None:
        """Note the predicted and the real time of a computed prompt."""
        # The constant part of a short prompt's time tells nothing about a long prompt's time.
        self._ratios.append(took_s / max(expected_s, LEAST_S / FACTOR))
        ordered = sorted(self._ratios)
        self._usual = max(1.0, ordered[int(SHARE * len(ordered))])

    def late_after_s(self, expected_s: float) -> float:
        """Seconds after a prefill leg's start at which its prompt is late."""
        return max(LEAST_S, FACTOR * self._usual * expected_s)
