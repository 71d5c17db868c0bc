"""Legs in either order, preemptions, aborts, deaths and losses at random: no wrong token, no lost block."""

import random
from collections.abc import Iterator

import pytest

from baton.protocol.messages import Announced, Finished, Released, Renewed, Want, Welcome, Withdraw
from tests.connectors.pull_world import BLOCK, FakeRequest, Status
from tests.connectors.push_world import PushEngine, PushWorld

KINDS = [Want, Announced, Finished, Withdraw, Renewed, Released, Welcome]


class Life:
    """One seed's world: two producers and two consumers that get whatever chance has for them."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.world = PushWorld()
        self.tp = self.chance.choice([1, 2])
        self.stream = self.chance.choice(["off", "chunk", "layer", "layer"])
        self.producers = [self.start("p0"), self.start("p1")]
        self.consumers = [self.start("d0"), self.start("d1")]
        self.requests: dict[str, tuple[PushEngine, FakeRequest, int]] = {}
        self.waiting_legs: list[tuple[str, list[int], PushEngine]] = []  # The other leg has been sent.
        self.num_delivered = self.count = 0

    def start(self, engine_id: str) -> PushEngine:
        return self.world.engine(engine_id, tp=self.tp, num_blocks=64, stream=self.stream)

    def act(self) -> None:
        actions = [self.send_legs, self.send_late_leg, self.compute, self.preempt, self.abort_prefill]
        actions += [self.abort, self.fault, self.restart, self.wait]
        self.chance.choices(actions, [4, 3, 8, 1, 0.4, 0.7, 1.5, 0.2, 3])[0]()
        for engine in (*self.producers, *self.consumers):
            if self.chance.random() < 0.7:
                engine.step()
        if self.chance.random() < 0.7:
            self.world.wire.deliver()
        self.harvest()

    def send_legs(self) -> None:
        """A router's dispatch; one of the legs may take its time, or the other way round, or get lost."""
        p = self.chance.choice(self.producers)
        tokens = [self.chance.randrange(5) for _ in range(self.chance.randrange(1, 5 * BLOCK))]
        self.count += 1
        name = f"t{self.count}"
        order = self.chance.random()
        if order < 0.6:
            self.send_prefill(name, tokens, p)
        if order > 0.4:
            self.send_decode(name, tokens, p)
        if not 0.4 < order < 0.6 and self.chance.random() < 0.9:
            self.waiting_legs.append((name, tokens, p))

    def send_late_leg(self) -> None:
        if not self.waiting_legs:
            return
        name, tokens, p = self.waiting_legs.pop(self.chance.randrange(len(self.waiting_legs)))
        was_prefill = name in p.prefills or name in p.finished
        if not p.is_alive:
            return
        if was_prefill:
            self.send_decode(name, tokens, p)
        else:
            self.send_prefill(name, [*tokens, 1] if self.chance.random() < 0.05 else tokens, p)

    def send_prefill(self, name: str, tokens: list[int], p: PushEngine) -> None:
        p.begin(name, tokens, name)

    def send_decode(self, name: str, tokens: list[int], p: PushEngine) -> None:
        d = self.chance.choice(self.consumers)
        if len(d.free_blocks) * BLOCK <= len(tokens) + BLOCK:
            return
        num_local = self.chance.randrange(len(tokens) // BLOCK + 1) * BLOCK
        request = d.follow(f"d-{name}", tokens, p, name)
        if d.admit(request, num_local=num_local):
            self.requests[request.request_id] = (d, request, num_local)

    def compute(self) -> None:
        for p in self.producers:
            for name, prefill in p.prefills.items():
                left = len(prefill.request.prompt_token_ids) - prefill.num_computed
                if len(p.free_blocks) * BLOCK <= left + 2 * BLOCK or self.chance.random() < 0.3:
                    continue
                cached = 0
                if not prefill.block_ids and not prefill.is_known:
                    cached = self.chance.randrange(0, (left - 1) // BLOCK + 1) * BLOCK
                p.schedule(name, self.chance.randint(1, left - cached), num_cached=cached)
            p.on_layer = self.read_along

    def read_along(self, layer: int) -> None:
        if self.chance.random() < 0.5:
            self.world.wire.deliver()
            for d in self.consumers:
                d.step()

    def preempt(self) -> None:
        p = self.chance.choice(self.producers)
        running = [name for name, prefill in p.prefills.items() if prefill.block_ids and name not in p.chunks]
        if running:
            p.preempt(self.chance.choice(running))

    def abort_prefill(self) -> None:
        p = self.chance.choice(self.producers)
        names = [name for name in p.prefills if name not in p.chunks and name not in p.preempted]
        if names:
            p.end_prefill(self.chance.choice(names), Status.FINISHED_ABORTED)

    def abort(self) -> None:
        parked = [(d, r) for d, r, _ in self.requests.values() if d.is_alive and r.request_id in d.parked]
        if parked:
            d, request = self.chance.choice(parked)
            del self.requests[request.request_id]
            d.abort(request)

    def fault(self) -> None:
        wire, network = self.world.wire, self.world.network
        match self.chance.choice(["drop", "cut", "hold", "fail", "heal", "heal"]):
            case "drop":
                wire.drop = self.chance.sample(KINDS, 3)
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
        self.world.now += self.chance.choice([0.1, 1.0, 4.0])

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


@pytest.mark.parametrize("life", range(60), indirect=True)
def test_a_random_world_ends_whole_and_true(life: Life) -> None:
    for _ in range(150):
        life.act()
    life.heal()
    for p in life.producers:
        for name in list(p.prefills):
            p.chunks.pop(name, None)
            p.preempted.discard(name)
            p.end_prefill(name, Status.FINISHED_ABORTED)
    for _ in range(150):
        life.wait()
        life.world.settle()
        life.harvest()
    assert not life.requests, "a request never ended"
    life.world.assert_whole()
    p, d = life.producers[0], life.consumers[0]
    probe = d.follow("probe", [1] * 9, p, "probe")
    d.admit(probe)
    p.begin("probe", [1] * 9, "probe")
    p.prefill_in_chunks("probe", 5, 4)
    life.world.settle()
    assert d.outcomes["probe"].valid_tokens == 9
    d.read_out(probe)
    life.world.settle()
    life.world.assert_whole()
