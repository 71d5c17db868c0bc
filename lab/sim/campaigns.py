"""The campaign of simulated worlds, and the seeds that failed once."""

from lab.sim.host.scenario import Scenario
from lab.sim.kernel.runs import Campaign
from lab.sim.mutants.guards import MUTANTS

WORLDS = Campaign(Scenario, MUTANTS)
FAILED: dict[str, dict[int, str]] = {
    "pull": {
        0: "a loan kept the blocks that the last chunk of its prompt saw in a window, for no reader",
        169: "an engine that continued another one's answer did not name its weights, which were others",
    },
    "push": {
        245: "an engine that continued another one's answer did not name its weights, which were others",
        1153: "P announced a cached block that another prompt of the same step had still to compute",
    },
}
"""Every seed whose world failed, with its reason. A change of the world gives a seed another world."""
