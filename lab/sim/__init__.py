"""Simulated worlds: one event queue, one seed, many faults, and a checker for each invariant.

    kernel     clock, faults, reads, wires, lies, the course of a world, campaigns
    hosts      fast: real scheduler halves alone; full: whole engines
    checkers   one for each invariant
    mutants    production with one guard taken away

Production code never imports this package. `python -m lab.sim pull --seed N` replays one world.
"""

from lab.sim.campaigns import FAILED_ONCE, FAST, GUARDS
from lab.sim.kernel.runs import MODES, Broken, Report

find_broken, replay, run_worlds = FAST.find_broken, FAST.replay, FAST.run_worlds

__all__ = ["FAILED_ONCE", "GUARDS", "MODES", "Broken", "Report", "find_broken", "replay", "run_worlds"]
