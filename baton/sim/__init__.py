"""A deterministic world in which everything that can go wrong does, and the invariants are checked by name.

Never imported by production code. `baton sim pull --seed N` replays one world.
"""

from baton.sim.mutants import MUTANTS
from baton.sim.runs import MODES, Broken, Report, find_broken, replay, run_worlds

__all__ = ["MODES", "MUTANTS", "Broken", "Report", "find_broken", "replay", "run_worlds"]
