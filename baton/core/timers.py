"""Every duration of the handoff protocol, and the inequalities between them (docs/protocol.md).

Durations are seconds. They cross the wire; points in time never do.
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
    """Durations in seconds. Raises ConfigError if they contradict each other."""

    ttl_s: float = 30.0  # P: validity of a lease after each renewal.
    renewals_per_ttl: int = 4  # A lease survives renewals_per_ttl - 2 lost renewals in a row.
    drift_max: float = 0.01  # Relative rate error between any two clocks.
    round_trip_max_s: float = 1.0  # Slower answers count as lost.
    deadline_s: float = 120.0  # D: longest handoff, from start to outcome.
    loan_max_s: float = 180.0  # P: longest loan, however often it is renewed.
    grant_every_s: float = 2.0  # D: heartbeat of a push that it waits for.
    silence_s: float = 6.0  # D: gives up a producer that has not answered for this long.
    hold_s: float = 30.0  # P: forgets a consumer not heard from for this long; also how long a leg waits.

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ConfigError("must be positive", field=f"timers.{name}")
        if not 0 <= self.drift_max < 1:
            raise ConfigError("must be in [0, 1)", field="timers.drift_max")
        if self.renewals_per_ttl < 3:
            raise ConfigError(
                "must be at least 3, so that one lost packet loses no lease", field="timers.renewals_per_ttl"
            )
        if not self.renew_every_s + self.round_trip_max_s < self.believed_ttl_s:
            raise ConfigError(
                f"must be longer: ttl_s / renewals_per_ttl + round_trip_max_s must be below "
                f"ttl_s * (1 - drift_max), which is {self.believed_ttl_s:g} s",
                field="timers.ttl_s",
            )
        if self.loan_max_s * (1 - self.drift_max) < self.deadline_s + self.ttl_s:
            raise ConfigError(
                f"must be at least (deadline_s + ttl_s) / (1 - drift_max), "
                f"{(self.deadline_s + self.ttl_s) / (1 - self.drift_max):g} s, "
                "or it cuts off a consumer that keeps its deadline",
                field="timers.loan_max_s",
            )

        if self.silence_s < 2 * self.grant_every_s + self.round_trip_max_s:
            raise ConfigError(
                "must be at least 2 * grant_every_s + round_trip_max_s, "
                "so that a push survives one lost answer",
                field="timers.silence_s",
            )
        if self.hold_s < self.silence_s * (1 + self.drift_max):
            raise ConfigError(
                "must be at least silence_s * (1 + drift_max), so that P remembers waiting consumers",
                field="timers.hold_s",
            )

    @property
    def renew_every_s(self) -> float:
        return self.ttl_s / self.renewals_per_ttl

    @property
    def believed_ttl_s(self) -> float:
        """The TTL less the worst clock drift, which is what a consumer may rely on."""
        return self.ttl_s * (1 - self.drift_max)
