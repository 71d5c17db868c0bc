"""The campaign of fast worlds, and the seeds that failed once."""

from lab.sim.hosts.fast.scenario import FastScenario
from lab.sim.kernel.runs import Campaign
from lab.sim.mutants.fast import MUTANTS

GUARDS = MUTANTS
FAST = Campaign(FastScenario, MUTANTS)
FAILED_ONCE: dict[tuple[str, int], str] = {
    ("pull", 37): "room was found for a request that had just failed, and never freed",
    ("push", 1): "a machine took the second PeerReady of one peer for a mistake",
    ("push", 6250): "a member's false Welcome made its peer refuse it for good: the world has to restart it",
    ("push", 3112): "a prefill in a healed world was drawn to take longer than the deadline",
}
"""Every seed whose world failed, with its reason. A change of the world gives a seed another world."""
