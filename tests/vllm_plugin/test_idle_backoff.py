"""An empty step waits only while a producer computes."""

import dataclasses
import threading
from collections.abc import Iterator

import msgspec
import pytest

from baton.connectors.pull import PullSchedulerHalf
from baton.connectors.push import PrefillAnnouncer, PushIdentity
from baton.core.config import EngineConfig
from baton.core.ids import Epoch
from baton.engine.step import SchedulerOutput
from baton.hosts.vllm.host_policy import vllm_policy
from baton.hosts.vllm.idle_backoff import IdleBackoff
from tests.connectors.pull_world import Station, World
from tests.connectors.push_world import PushEngine, PushWorld

TOKENS = list(range(10, 21))


class Rested(IdleBackoff):
    """Counts the waits instead of waiting."""

    count = 0

    def take(self) -> None:
        self.count += 1


class VllmPushEngine(PushEngine):
    def __init__(self, world: World, config: EngineConfig, url: str, epoch: Epoch) -> None:
        self.rest = Rested()
        super().__init__(world, config, url, epoch)
        self.half.bind_gpu_block_pool(self.pool)

    def make_half(self, config: EngineConfig, url: str, epoch: Epoch) -> PullSchedulerHalf:
        policy = dataclasses.replace(vllm_policy(), idle_wait=self.rest)
        return PullSchedulerHalf(
            msgspec.structs.replace(PushIdentity.of_engine(config), policy=policy),
            epoch=epoch,
            clock=lambda: self.world.now,
            control=lambda agent, lock: Station(self.world, url, agent),
            announcer=PrefillAnnouncer,
        )


class VllmPushWorld(PushWorld):
    engine_kind = VllmPushEngine


@pytest.fixture
def world() -> Iterator[VllmPushWorld]:
    world = VllmPushWorld()
    yield world
    world.close()


@pytest.fixture
def d(world: VllmPushWorld) -> VllmPushEngine:
    engine = world.engine("d")
    assert isinstance(engine, VllmPushEngine)
    engine.half._control_wakes = True  # The engine has a control thread of its own.
    return engine


def test_an_engine_without_remote_prefills_does_not_wait(d: VllmPushEngine) -> None:
    d.half.build_connector_meta(SchedulerOutput())
    assert d.rest.count == 0


def test_an_engine_that_waits_for_a_prefill_waits_in_empty_steps_only(
    world: VllmPushWorld, d: VllmPushEngine
) -> None:
    p = world.engine("p")
    d.admit(d.follow("r", TOKENS, p))
    world.settle()
    rested = d.rest.count
    assert rested > 0
    d.half.build_connector_meta(
        SchedulerOutput(num_scheduled_tokens={"other": 1}, total_num_scheduled_tokens=1)
    )
    assert d.rest.count == rested
    d.half.build_connector_meta(SchedulerOutput())
    assert d.rest.count == rested + 1


def test_an_engine_with_running_reads_does_not_wait(world: VllmPushWorld, d: VllmPushEngine) -> None:
    p = world.engine("p")
    request = d.follow("r", TOKENS, p)
    d.admit(request)
    d.admit(d.follow("waits", TOKENS[::-1], p, "another"))
    world.settle()
    p.begin("r", TOKENS)
    p.prefill_in_chunks("r", len(TOKENS))
    world.wire.deliver()
    d.rest.count = 0
    while not d.outcomes:
        assert d.half._fetches.num_streams == 1
        world.wire.deliver()
        d.step()
    assert d.rest.count == 0
    d.read_out(request)


def test_news_end_a_wait_even_before_it_has_begun() -> None:
    rest = IdleBackoff()
    rest.end()
    assert rest._has_news.is_set()
    rest.take()
    assert not rest._has_news.is_set()
    resting = threading.Thread(target=rest.take)
    resting.start()
    rest.end()
    resting.join(60)
    assert not resting.is_alive()
