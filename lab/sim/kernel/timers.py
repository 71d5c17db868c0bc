"""Timers of all simulated engines. They are shorter than in production, so worlds are shorter."""

from baton.core.timers import Timers

SIM_TIMERS = Timers(
    ttl_s=5.0,
    renewals_per_ttl=4,
    drift_max=0.01,
    round_trip_max_s=0.5,
    deadline_s=12.0,
    loan_max_s=20.0,
    grant_every_s=1.0,
    silence_s=3.0,
    hold_s=5.0,
)
