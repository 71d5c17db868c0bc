"""Every duration of the handoff protocol, and the inequalities between them (docs/protocol.md).

Durations are seconds. They cross the wire; instants never do.
"""

import msgspec

from baton.core.errors import ConfigError

_POSITIVE = (
    "ttl_s",
    "round_trip_max_s",
    "deadline_s",
    "loan_max_s",
    "grant_every_s",
    "silence_s",
    "hold_s",
)


class Timers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raises ConfigError when the durations contradict each other."""

    ttl_s: float = 30.0  # P's promise after each renewal.
    renewals_per_ttl: int = 4  # Survives renewals_per_ttl - 2 lost renewals in a row.
    drift_max: float = 0.01  # Relative rate error between any two clocks.
    round_trip_max_s: float = 1.0  # Slower answers count as lost.
    deadline_s: float = 120.0  # D: one handoff, from start to outcome.
    loan_max_s: float = 180.0  # P: one loan, however often it is renewed.
    grant_every_s: float = 2.0  # D: heartbeat of a push that it waits for.
    silence_s: float = 6.0  # D: a producer that answers nothing for so long is given up.
    hold_s: float = 30.0  # P: a consumer that is not heard of for so long is forgotten; either leg's wait.

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ConfigError("must be positive", field=f"timers.{name}")
        if not 0 <= self.drift_max < 1:
            raise ConfigError("must be in [0, 1)", field="timers.drift_max")
        if self.renewals_per_ttl < 3:
            raise ConfigError(
                "must be at least 3: below, one lost packet loses the lease", field="timers.renewals_per_ttl"
            )
        if not self.renew_every_s + self.round_trip_max_s < self.believed_ttl_s:
            raise ConfigError(
                f"must be longer: ttl_s / renewals_per_ttl + round_trip_max_s has to stay below "
                f"ttl_s * (1 - drift_max), which is {self.believed_ttl_s:g} s",
                field="timers.ttl_s",
            )
        if self.loan_max_s * (1 - self.drift_max) < self.deadline_s + self.ttl_s:
            raise ConfigError(
                f"must be at least (deadline_s + ttl_s) / (1 - drift_max), "
                f"{(self.deadline_s + self.ttl_s) / (1 - self.drift_max):g} s, "
                "or it cuts off an honest consumer",
                field="timers.loan_max_s",
            )

        if self.silence_s < 2 * self.grant_every_s + self.round_trip_max_s:
            raise ConfigError(
                "must be at least 2 * grant_every_s + round_trip_max_s, or one lost answer ends a push",
                field="timers.silence_s",
            )
        if self.hold_s < self.silence_s * (1 + self.drift_max):
            raise ConfigError(
                "must be at least silence_s * (1 + drift_max), or P forgets consumers that still wait",
                field="timers.hold_s",
            )

    @property
    def renew_every_s(self) -> float:
        return self.ttl_s / self.renewals_per_ttl

    @property
    def believed_ttl_s(self) -> float:
        """What a consumer may rely on: the TTL less the worst clock drift."""
        return self.ttl_s * (1 - self.drift_max)
