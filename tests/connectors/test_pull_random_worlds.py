"""Requests, aborts, deaths, partitions and losses at random: tokens are never wrong, and no block is lost."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from baton.protocol.messages import Released, Renew, Renewed, Welcome
from tests.connectors.pull_world import BLOCK, Engine, FakeRequest, World


class Life:
    """One seed's world: two producers and two consumers that get whatever chance has for them."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.world = World()
        self.tp = self.chance.choice([1, 2])
        self.producers = [self.start("p0"), self.start("p1")]
        self.consumers = [self.start("d0"), self.start("d1")]
        self.requests: dict[str, tuple[Engine, FakeRequest, int]] = {}
        self.tickets: list[tuple[list[int], dict[str, Any]]] = []
        self.num_delivered = self.count = 0

    def start(self, engine_id: str) -> Engine:
        return self.world.engine(engine_id, tp=self.tp, num_blocks=48)

    def act(self) -> None:
        action = self.chance.choices(
            [self.prefill, self.fetch, self.abort, self.fault, self.restart, self.wait], [5, 6, 1, 2, 0.3, 4]
        )[0]
        action()
        for engine in (*self.producers, *self.consumers):
            if self.chance.random() < 0.7:
                engine.step()
        if self.chance.random() < 0.7:
            self.world.wire.deliver()
        self.harvest()

    def prefill(self) -> None:
        p = self.chance.choice(self.producers)
        tokens = [self.chance.randrange(5) for _ in range(self.chance.randrange(1, 4 * BLOCK))]
        if len(p.free_blocks) * BLOCK > len(tokens) + BLOCK:
            self.count += 1
            self.tickets.append((tokens, p.prefill(f"p{self.count}", tokens)))

    def fetch(self) -> None:
        if not self.tickets:
            return
        tokens, params = self.chance.choice(self.tickets)
        if self.chance.random() < 0.9:
            self.tickets.remove((tokens, params))  # Else it will be replayed.
        d = self.chance.choice(self.consumers)
        if len(d.free_blocks) * BLOCK <= len(tokens) + BLOCK:
            return
        num_local = self.chance.randrange(len(tokens) // BLOCK + 1) * BLOCK
        self.count += 1
        request = d.submit(f"d{self.count}", tokens, params)
        if d.admit(request, num_local=num_local):
            self.requests[request.request_id] = (d, request, num_local)

    def abort(self) -> None:
        parked = [(d, r) for d, r, _ in self.requests.values() if d.is_alive and r.request_id in d.parked]
        if parked:
            d, request = self.chance.choice(parked)
            del self.requests[request.request_id]
            d.abort(request)

    def fault(self) -> None:
        kind = self.chance.choice(["drop", "cut", "hold", "fail", "heal"])
        wire, network = self.world.wire, self.world.network
        match kind:
            case "drop":
                wire.drop = self.chance.sample([Renew, Renewed, Released, Welcome], 2)
            case "cut":
                wire.is_cut = True
            case "hold":
                network.hold()
            case "fail":
                network.fail_next("cable pulled")
            case "heal":
                self.heal()

    def heal(self) -> None:
        self.world.wire.drop, self.world.wire.is_cut = [], False
        self.world.network._failures.clear()
        self.world.network.release()

    def restart(self) -> None:
        side = self.chance.choice([self.producers, self.consumers])
        index = self.chance.randrange(2)
        dead = side[index]
        dead.kill()
        self.requests = {i: r for i, r in self.requests.items() if r[0] is not dead}
        side[index] = self.start(("p" if side is self.producers else "d") + str(index))

    def wait(self) -> None:
        self.world.now += self.chance.choice([0.1, 1.0, 8.0])

    def harvest(self) -> None:
        for request_id, (d, request, num_local) in list(self.requests.items()):
            if (outcome := d.outcomes.get(request_id)) is None:
                continue
            del self.requests[request_id]
            tokens = request.prompt_token_ids
            if outcome.valid_tokens == len(tokens):
                self.num_delivered += 1
                assert d.holds(tokens, outcome.block_ids), "delivered what are not this prompt's bytes"
            else:
                assert outcome.valid_tokens == num_local
            d.read_out(request)


@pytest.fixture
def life(request: pytest.FixtureRequest) -> Iterator[Life]:
    life = Life(request.param)
    yield life
    life.world.close()


@pytest.mark.parametrize("life", range(40), indirect=True)
def test_a_random_world_ends_whole_and_true(life: Life) -> None:
    for _ in range(120):
        life.act()
    life.heal()
    for _ in range(150):
        life.wait()
        life.world.settle()
        life.harvest()
    assert not life.requests, "a request never ended"
    life.world.assert_whole()
    life.tickets.clear()
    probe = life.consumers[0].fetch("probe", [1] * 9, life.producers[0].prefill("probe", [1] * 9))
    life.world.settle()
    assert life.consumers[0].outcomes["probe"].valid_tokens == 9
    life.consumers[0].read_out(probe)
    life.world.settle()
    life.world.assert_whole()
