"""A deterministic world in which everything that can go wrong does, and the invariants are checked by name.

Never imported by production code. `baton sim pull --seed N` replays one world.
"""

from baton.sim.runs import GUARDS, MODES, Broken, Report, find_broken, replay, run_worlds
from baton.sim.seeds import FAILED_ONCE

__all__ = ["FAILED_ONCE", "GUARDS", "MODES", "Broken", "Report", "find_broken", "replay", "run_worlds"]
