"""Health of one engine: a circuit breaker that probes and requests drive.

    UNKNOWN --healthy probe | answer--> UP
    UNKNOWN, UP --refused | unhealthy | `failures_to_eject` failures | `silences_to_eject` silences--> DOWN
    DOWN --healthy probe after the back-off--> UP in slow start
    UP in slow start --`slow_start_s`--> UP
    UP in slow start --any failure--> DOWN, with a longer back-off
    UP --errors (`eject`)--> DOWN, for the given time

DOWN is an open breaker, slow start is a half-open one. In slow start an engine gets a share of its requests
that grows from SHARE_FIRST to 1. The back-off has a limit, so that an engine serves within two seconds of its
first healthy answer. An answer to a request does not close an open breaker: the request began before.
"""

from typing import Literal, NamedTuple

from baton.router.values.settings import ProbeSettings

Status = Literal["unknown", "up", "down"]
Breaker = Literal["closed", "half_open", "open"]
ProbeKind = Literal["healthy", "refused", "unhealthy", "broken", "silent", "slow"]

SHARE_FIRST = 0.1
BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 1.5


class Probe(NamedTuple):
    """The result of a question to an engine's /health.

    refused: no connection. unhealthy: an answer other than 200. broken: the connection broke. silent: no
    answer, and nothing else from the engine meanwhile. slow: no answer, but the engine answers requests.
    """

    kind: ProbeKind
    why: str = ""


class Health:
    def __init__(self, settings: ProbeSettings | None = None, *, status: Status = "unknown") -> None:
        self._settings = settings or ProbeSettings()
        self.status: Status = status
        self.failures_in_row = 0
        self.silences_in_row = 0
        self.probe_at_s = 0.0
        # Moment of the probe in each interval, as a share of it. None: one interval after the last probe.
        self.phase: float | None = None
        self._backoff_s = 0.0
        self._retry_at_s = 0.0  # Healthy probes before this time do not close the breaker.
        self._full_at_s = 0.0  # End of the slow start.

    @property
    def is_up(self) -> bool:
        return self.status != "down"

    @property
    def is_silent(self) -> bool:
        return self.silences_in_row >= self._settings.silences_to_eject

    def breaker(self, now_s: float) -> Breaker:
        if not self.is_up:
            return "open"
        return "half_open" if now_s < self._full_at_s else "closed"

    def share(self, now_s: float) -> float:
        """The share of its usual requests that the engine gets."""
        if now_s >= self._full_at_s:
            return 1.0
        left = (self._full_at_s - now_s) / self._settings.slow_start_s
        return max(SHARE_FIRST, 1.0 - left * (1.0 - SHARE_FIRST))

    def on_answer(self) -> None:
        """The engine has answered a request, with whatever status."""
        if self.is_up:
            self.status = "up"
            self.failures_in_row = self.silences_in_row = 0

    def on_failure(self, now_s: float, *, is_decisive: bool) -> bool:
        """A leg or a probe failed. True: this failure ejects the engine."""
        self.failures_in_row += 1
        is_decisive = is_decisive or self.failures_in_row >= self._settings.failures_to_eject
        if not self.is_up or not (is_decisive or self.breaker(now_s) == "half_open"):
            return False
        is_relapse = self.breaker(now_s) == "half_open"
        self._backoff_s = min(BACKOFF_MAX_S, 2 * self._backoff_s or BACKOFF_FIRST_S) if is_relapse else 0.0
        self.status, self._retry_at_s = "down", now_s + self._backoff_s
        self.probe_at_s = min(self.probe_at_s, now_s + self._settings.down_every_s)
        return True

    def eject(self, now_s: float, for_s: float) -> None:
        """Eject the engine because its answers are errors, even if /health is good."""
        self.status, self._retry_at_s = "down", now_s + for_s
        self.probe_at_s = min(self.probe_at_s, self._retry_at_s)

    def on_probe(self, probe: Probe, now_s: float) -> bool:
        """Note the result of a probe. True: it ejects the engine, or brings it back."""
        was_up = self.is_up
        match probe.kind:
            case "healthy":
                self.failures_in_row = self.silences_in_row = 0
                if not was_up and now_s >= self._retry_at_s:
                    self._full_at_s = now_s + self._settings.slow_start_s
                    self.status = "up"
                elif was_up:
                    self.status = "up"
            case "slow":
                self.silences_in_row = 0
            case "silent":
                self.silences_in_row += 1
                self.on_failure(now_s, is_decisive=self.is_silent)
            case "broken":
                self.on_failure(now_s, is_decisive=False)
            case "refused" | "unhealthy":
                self.on_failure(now_s, is_decisive=True)
        self.probe_at_s = self._next_probe_s(now_s)
        return self.is_up != was_up

    def _next_probe_s(self, now_s: float) -> float:
        if self.is_up:
            # The second probe follows at once after a silence, because the first one took a whole timeout.
            if self.silences_in_row:
                return now_s
            every_s = self._settings.every_s
            late_s = 0.0 if self.phase is None else (now_s - self.phase * every_s) % every_s
            return now_s + every_s - late_s
        at_s = now_s + self._settings.down_every_s
        return min(at_s, self._retry_at_s) if now_s < self._retry_at_s else at_s
