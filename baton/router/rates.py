"""Speeds of engines, learned from the requests that pass."""

SHARE = 0.2  # Of a new sample in the average.
FAR = 4.0  # A sample that is so many times more or less than the average is strange.
STRANGE_MAX = 3  # So many strange samples in a row are a new speed.


class Rate:
    """A moving average without outliers. `value` is None until there is a sample."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._num_strange = 0

    def note(self, sample: float) -> None:
        if not 0.0 < sample < float("inf"):
            return
        if self.value is None:
            self.value = sample
            return
        if self.value / FAR <= sample <= self.value * FAR:
            self.value += SHARE * (sample - self.value)
            self._num_strange = 0
            return
        self._num_strange += 1
        if self._num_strange >= STRANGE_MAX:
            self.value, self._num_strange = sample, 0
