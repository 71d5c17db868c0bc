"""Members of a simulated router's fleet: a source that drops engines, or all of them, and names them again,
and changes of roles by an administrator. The orders are those of the real `Membership`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from baton.router.fleet.engine import Engine
from baton.router.fleet.notes import Drains, Joined
from baton.router.values.members import Join, Leave, Member, Membership, Order
from baton.router.values.settings import Role
from lab.sim.host.processes import Process
from lab.sim.kernel.world import World

SOURCE = "source"
LOOK_S = 1.0
DRAIN_S = 20.0
CHANGES = 0.25  # Share of worlds with changes.


class Members:
    """Members of one start of a router, in its coordinator."""

    def __init__(
        self,
        world: World,
        hub: Process,
        membership: type[Membership],
        on_joined: Callable[[Engine], None],
    ) -> None:
        self._world, self._hub, self._on_joined = world, hub, on_joined
        self._membership = membership([SOURCE], [engine.member for engine in hub.fleet.engines])
        self._is_looking = False

    def name(self, members: frozenset[Member]) -> None:
        self._carry_out(self._membership.hear(SOURCE, members, self._world.now, self._serving))

    def change_role(self, url: str, role: Role) -> None:
        self._carry_out(self._membership.change_role(url, role, self._world.now, self._serving))

    @property
    def _serving(self) -> set[tuple[Role, str]]:
        return {engine.key for engine in self._hub.fleet.engines if engine.is_eligible}

    def _look(self) -> None:
        self._is_looking = False
        if self._hub.is_alive:
            self._carry_out(self._membership.look(self._world.now, self._serving))

    def _carry_out(self, orders: list[Order]) -> None:
        fleet, now = self._hub.fleet, self._world.now
        for order in orders:
            self._world.count(f"member: {type(order).__name__}")
            match order:
                case Join(member):
                    is_new = fleet.find(member.key) is None
                    engine = fleet.join(member, now)
                    fleet.tell(Joined(member))
                    if is_new:
                        self._on_joined(engine)
                case Leave(key):
                    if (leaving := fleet.find(key)) is not None:
                        fleet.drain(leaving, now + DRAIN_S, is_leaving=True)
                        fleet.tell(Drains(key, DRAIN_S, is_leaving=True))
        if self._membership.held and not self._is_looking:
            self._is_looking = True
            self._world.after(LOOK_S, self._look)


def schedule_changes(
    world: World,
    members: frozenset[Member],
    end_s: float,
    name: Callable[[frozenset[Member]], None],
    change_role: Callable[[str, Role], None],
    can_do_both: Callable[[Member], bool],
) -> None:
    """Schedule some changes. All is as before at `end_s`."""
    rng = world.rng_of_members
    if rng.random() >= CHANGES:
        return
    ordered = sorted(members, key=lambda member: member.key)
    for _ in range(rng.choice([1, 2, 4])):
        gone = rng.choice([[rng.choice(ordered)], ordered])
        at_s = rng.uniform(0, end_s)
        world.after(at_s, partial(name, members.difference(gone)))
        world.after(min(end_s, at_s + rng.choice([0.1, 3.0, 8.0])), partial(name, members))
    movable = [one for one in ordered if can_do_both(one) and _num_of(one.role, ordered) > 1]
    if movable and rng.random() < 0.5:
        moved = rng.choice(movable)
        other: Role = "decode" if moved.role == "prefill" else "prefill"
        world.after(rng.uniform(0, end_s), partial(change_role, moved.url, other))
        world.after(end_s, partial(change_role, moved.url, moved.role))


def _num_of(role: Role, members: list[Member]) -> int:
    return sum(one.role == role for one in members)
