"""Speeds of engines and of pairs, learned from the router's requests. Outliers change little.

Rate       the median of the last samples, by their weight
Line       seconds as a base and a slope: of a decode step by the answers that run, of a load by its tokens
BusyTime   how fast an engine computes prompts, also while others wait there
"""

from collections import deque
from collections.abc import Sequence
from math import inf
from statistics import median
from typing import NamedTuple

NUM_SAMPLES = 31  # Samples of a rate.
NUM_POINTS = 48  # Points of a line.
BASE_POINTS_MIN = 4  # Least points to fit a base.
SLOPE_PAIRS_MIN = 8  # Least pairs of points that are far enough apart, to fit a slope.
SLOPE_SHARE = 0.2  # Weight of a newly fitted slope: one window of samples tells little about it.
SAMPLE_TOKENS_MIN = 64  # Least tokens of a sample: the time of a shorter prompt is that of its request.
SAMPLE_TOKENS_MAX = 4096  # Tokens that are a sample even if the engine stays busy.


OUTLIER_SAMPLES_MIN = 16  # Least samples of a rate that is compared with others.
OUTLIER_FACTOR = 4.0  # An outlier is slower than the median by at least this factor.
OUTLIER_PEERS_MIN = 2


def outliers(speeds: Sequence[float | None]) -> list[bool]:
    """Whether each engine is much slower than its peers; at most a third of them are.

    None in `speeds`: not known. (Envoy's outlier detection compares success rates of hosts in this way.)
    """
    known = [speed for speed in speeds if speed is not None]
    if len(known) <= OUTLIER_PEERS_MIN:
        return [False] * len(speeds)
    limit = median(known) / OUTLIER_FACTOR
    slow = sorted(speed for speed in known if speed < limit)[: len(known) // 3]
    return [speed is not None and bool(slow) and speed <= slow[-1] for speed in speeds]


class Window(NamedTuple):
    """Beginning of a sample of a stream."""

    since_s: float
    num_running: int
    is_clear: bool  # The engine has no prompt to compute.


class Rate:
    """The median of the last samples by weight. None until there is a sample.

    Samples and weights that are no positive numbers are dropped.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self._samples: deque[tuple[float, float]] = deque(maxlen=NUM_SAMPLES)

    @property
    def settled(self) -> float | None:
        """The value, if it has enough samples to be compared with others."""
        return self.value if len(self._samples) >= OUTLIER_SAMPLES_MIN else None

    def note(self, sample: float, weight: float = 1.0) -> None:
        if not (0.0 < sample < inf and 0.0 < weight < inf):
            return
        self._samples.append((sample, weight))
        left = sum(weight for _, weight in self._samples) / 2
        for value, weight in sorted(self._samples):
            left -= weight
            if left <= 0.0:
                self.value = value
                return


class Line:
    """Seconds = `base_s` + `slope_s` * x, both at least 0; fitted to the median of the last points.

    `base_s` is None until there are points. The slope starts as the given one and stays so while the x of
    the points differ by less than `least_gap`.
    """

    def __init__(self, slope_s: float, least_gap: float) -> None:
        self.base_s: float | None = None
        self.slope_s = slope_s
        self._least_gap = least_gap
        self._points: deque[tuple[float, float]] = deque(maxlen=NUM_POINTS)

    def note(self, x: float, seconds: float) -> None:
        """Note a point, in time proportional to NUM_POINTS. Drop a time that is not positive."""
        if not (0.0 < seconds < inf and 0.0 <= x < inf):
            return
        self._points.append((x, seconds))
        if len(self._points) < BASE_POINTS_MIN:
            return
        ordered = sorted(self._points)
        # Each point is in one pair only, so an outlier spoils one slope only.
        pairs = zip(ordered, ordered[(len(ordered) + 1) // 2 :], strict=False)
        slopes = [
            (late_s - early_s) / (far - near)
            for (near, early_s), (far, late_s) in pairs
            if far - near >= self._least_gap
        ]
        if len(slopes) >= SLOPE_PAIRS_MIN:
            self.slope_s += SLOPE_SHARE * (max(0.0, median(slopes)) - self.slope_s)
        base_s = median(seconds - self.slope_s * x for x, seconds in ordered)
        if base_s < 0.0:  # The slope alone gives longer times than the points have.
            self.slope_s = median(seconds / x for x, seconds in ordered if x > 0.0)
        self.base_s = max(0.0, base_s)

    def at(self, x: float) -> float:
        """Seconds at `x`. Without points the base is 0."""
        return (self.base_s or 0.0) + self.slope_s * x

    def speed_at(self, x: float) -> float | None:
        """1 / seconds at `x`, if there are enough points to be compared with others."""
        seconds = self.at(x)
        return 1.0 / seconds if len(self._points) >= OUTLIER_SAMPLES_MIN and seconds > 0.0 else None


class BusyTime:
    """Time in which an engine computes prompts without a pause, and the tokens that it computes in it.

    Prompts that end in one step are one sample, and those that wait for others count no waiting.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None  # None: not known until the engine has no prompt left.
        self._num_tokens = 0

    def start(self, now_s: float, *, is_idle: bool) -> None:
        """Note that a prompt leaves for the engine. `is_idle`: the engine has no other one to compute."""
        if is_idle:
            self._since_s, self._num_tokens = now_s, 0

    def end(self, num_tokens: int, now_s: float, *, is_last: bool) -> tuple[float, int] | None:
        """Note that a prompt is computed. Return a sample in tokens per second, and its weight.

        Short prompts weigh less, because a part of their time is that of a step without a prompt.
        """
        self._num_tokens += num_tokens
        least = SAMPLE_TOKENS_MIN if is_last else SAMPLE_TOKENS_MAX
        if self._since_s is None or self._num_tokens < least or now_s <= self._since_s:
            return None
        sample = self._num_tokens / (now_s - self._since_s), min(self._num_tokens, SAMPLE_TOKENS_MAX)
        self._since_s, self._num_tokens = now_s, 0
        return sample

    def spoil(self) -> None:
        """Drop the running sample, because the time of a prompt is not known.

        Its leg was closed early, or its answer does not show when the prompt was computed.
        """
        self._since_s = None
