"""Worlds in which nothing fails and most clients leave early: no loan has to wait for its end."""

import msgspec
import pytest

from lab.sim.campaigns import MODES
from lab.sim.checkers.violation import Violation
from lab.sim.host.scenario import EVENTS_MAX, Scenario
from lab.sim.kernel.faults import HEALTHY
from lab.sim.kernel.world import World

LEAVE_SHARE = 0.8
# The first worlds, and later ones that failed once.
SEEDS = {"pull": (*range(40), 247, 281, 430), "push": (*range(40), 41, 155, 202)}


class Storm(Scenario):
    takes_back_unseen = True

    def new_world(self, seed: int, *, traced: bool) -> World:
        world = World(seed, healthy=HEALTHY, events_max=EVENTS_MAX, traced=traced)
        world.faults = msgspec.structs.replace(HEALTHY, abort=LEAVE_SHARE)
        return world

    def begin(self) -> None:
        super().begin()
        for router in self.routers.all:
            router.takes_back_unseen = self.takes_back_unseen

    def schedule_faults(self) -> None:
        """There is none."""

    def check_rest(self) -> None:
        super().check_rest()
        # No router takes back a ticket that D refuses if D then finds the prompt in a store of its own.
        if self.cluster.can_hand_off and (num_expired := self.world.counts["loans expired"]):
            raise Violation("I5", f"{num_expired} loans of clients that have left expired")


class StormOfTickets(Storm):
    """The router takes back only what it has a ticket for."""

    takes_back_unseen = False


def play(kind: type[Storm], mode: str) -> int:
    """The number of clients that left. Raises Violation."""
    num_left = 0
    for seed in SEEDS[mode]:
        scenario = kind(mode, seed)
        scenario.run()
        num_left += scenario.world.counts["hung up"]
    return num_left


@pytest.mark.parametrize("mode", MODES)
def test_no_loan_of_clients_that_have_left_expires(mode: str) -> None:
    assert play(Storm, mode) > 2 * len(SEEDS[mode])


def test_without_their_ids_some_loans_are_taken_back_by_nobody() -> None:
    with pytest.raises(Violation, match="expired"):
        play(StormOfTickets, "pull")
