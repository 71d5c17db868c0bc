"""Engines whose scheduler is the test: real halves, ranks of the host in memory, a virtual clock, and wires.

An engine does what a scheduler does for a connector and nothing else: it hands out blocks, calls the hooks of
the scheduler half in order, and frees what is reported. Like vLLM it drops an output that reports nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.connectors.prompt_identity import RequestNames
from baton.connectors.pull import EngineIdentity, PullSchedulerHalf, PullWorkerHalf
from baton.connectors.pull.control.agent import PullAgent
from baton.connectors.pull.metadata import PullMetadata
from baton.contract import KVConnectorOutput, KVOutputAggregator
from baton.core.config import (
    CacheConfig,
    ClusterSecret,
    EngineConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
)
from baton.core.ids import Address, Epoch
from baton.engine.cache.block_pool import BlockPool
from baton.engine.request import RequestStatus
from baton.engine.step import SchedulerOutput
from baton.protocol.messages import Envelope, decode_envelope, encode_envelope
from baton.testing.host.config import model_config
from baton.testing.host.model import Words
from baton.testing.host.ranks import Ranks
from baton.testing.host.workers import WorkerSteps
from baton.transport.memory import MemoryNetwork, MemoryTransport

BLOCK = 4
LAYERS = 2
HEADS = 4
SECRET = ClusterSecret(b"sixteen bytes or more")


def engine_config(
    engine_id: str,
    *,
    role: str = "kv_both",
    tp: int = 1,
    policy: str = "recompute",
    num_blocks: int = 16,
    secret: ClusterSecret | None = SECRET,
    extra: dict[str, Any] | None = None,
    model: ModelConfig | None = None,
    connector: str = "BatonPullConnector",
) -> EngineConfig:
    return EngineConfig(
        model_config=model or model_config(),
        cache_config=CacheConfig(block_size=BLOCK, num_gpu_blocks=num_blocks),
        parallel_config=ParallelConfig(
            tensor_parallel_size=tp, executor="multiprocess" if tp > 1 else "inprocess"
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector,
            kv_role=role,  # type: ignore[arg-type]
            engine_id=engine_id,
            kv_connector_extra_config={"transports": ["memory"], **(extra or {})},
            kv_load_failure_policy=policy,  # type: ignore[arg-type]
        ),
        cluster_secret=secret,
        insecure_no_secret=secret is None,
    )


@dataclass(eq=False)
class FakeRequest:
    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None
    num_computed_tokens: int = 0
    prefilled_tokens: Any = None
    trace_headers: Any = None  # This field and the next three are vLLM's.
    lora_request: Any = None
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    status: RequestStatus = RequestStatus.WAITING

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    num_tokens = num_prompt_tokens


class FakeBlocks:
    def __init__(self, *tables: list[int]) -> None:
        """`tables`: block ids of each KV-cache group."""
        self._tables = tables

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self._tables


class Wire:
    """The control network: frames in flight, delivered when the test says so."""

    def __init__(self) -> None:
        self.stations: dict[str, Station] = {}  # The engine that answers at each url.
        self.is_cut = False  # Nothing arrives.
        self.drop: list[type] = []  # Messages of these types get lost.
        self.carried: list[Envelope] = []

    def deliver(self) -> bool:
        """One round; False if there was nothing to carry."""
        moved = False
        for station in list(self.stations.values()):
            for envelope, url in station.take():
                moved = True
                kept = tuple(m for m in envelope.messages if type(m) not in self.drop)
                target = self.stations.get(url or "")
                if self.is_cut or target is None or not kept:
                    continue
                envelope = decode_envelope(encode_envelope(msgspec.structs.replace(envelope, messages=kept)))
                self.carried.append(envelope)
                target.receive(envelope, station.url)
        return moved


class Station:
    """An engine's ControlPort on the wire."""

    def __init__(self, world: World, url: str, agent: PullAgent) -> None:
        self.url = url
        self.num_bad_frames = 0
        self.public_key = bytes(32)
        self.is_closed = False
        self._world = world
        self._agent = agent
        self._routes: dict[Address, str] = {}

    def start(self) -> None:
        self._world.wire.stations[self.url] = self

    def route(self, peer: Address, url: str, public_key: bytes | None) -> None:
        self._routes[peer] = url

    def flush(self) -> None:
        return

    def raise_if_dead(self) -> None:
        return

    def close(self, timeout_s: float) -> None:
        self.is_closed = True

    def take(self) -> list[tuple[Envelope, str | None]]:
        self._agent.wake(self._world.now)
        return [(envelope, self._routes.get(envelope.target)) for envelope in self._agent.take_envelopes()]

    def receive(self, envelope: Envelope, url: str) -> None:
        self._routes.setdefault(envelope.sender, url)
        self._agent.receive(envelope, self._world.now)


class World:
    engine_kind: type[Engine]

    def __init__(self) -> None:
        self.now = 1000.0
        self.wire = Wire()
        self.network = MemoryNetwork()
        self.engines: list[Engine] = []
        self.names: dict[str, RequestNames] = {}  # Names for engines that start later, by engine id.
        self._urls: dict[str, str] = {}
        self._epochs = 0

    def engine(self, engine_id: str, **config: Any) -> Engine:
        """Starts an engine; a second one of the same id succeeds the first one, at the same url."""
        url = self._urls.setdefault(engine_id, f"tcp://127.0.0.1:{1001 + len(self._urls)}")
        self._epochs += 1
        engine = self.engine_kind(self, engine_config(engine_id, **config), url, Epoch(self._epochs))
        self.engines.append(engine)
        return engine

    def settle(self, rounds: int = 50) -> None:
        """Step and deliver until nothing moves. Takes no time."""
        for _ in range(rounds):
            moved = self.wire.deliver()
            moved = any([engine.step() for engine in self.engines if engine.is_alive]) or moved
            if not moved:
                return
        raise AssertionError("the world does not come to rest")

    def pass_time(self, seconds: float, *, every_s: float = 0.5) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + every_s)
            self.settle()

    def assert_whole(self) -> None:
        """I5: at rest every pool is full again and no loan is open."""
        for engine in self.engines:
            if engine.is_alive:
                engine.assert_whole()

    def assert_settles_whole(self) -> None:
        self.settle()
        self.assert_whole()

    def close(self) -> None:
        for engine in self.engines:
            engine.shutdown()


@dataclass
class Parked:
    request: FakeRequest
    block_ids: list[int]
    num_local: int
    num_external: int


@dataclass
class Outcome:
    """How a parked request came back."""

    block_ids: list[int]
    valid_tokens: int  # Local and loaded tokens up to the first invalid block.


class Engine:
    def __init__(self, world: World, config: EngineConfig, url: str, epoch: Epoch) -> None:
        self.world = world
        self.config = config
        self.is_alive = True
        self.tp = config.parallel_config.tensor_parallel_size
        self.half = self.make_half(config, url, epoch)
        self.ranks = Ranks(config)
        self.workers = [self._worker(rank, Epoch(epoch * 100 + rank)) for rank in range(self.tp)]
        self.half.set_xfer_handshake_metadata(
            {rank: worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}  # type: ignore[misc]
        )
        self.worker_steps = WorkerSteps(
            self.workers,
            KVOutputAggregator.from_connector(self.half, self.tp),
            caches=[memory.kv_caches for memory in self.ranks.memories],
        )
        num_blocks = config.cache_config.num_gpu_blocks
        self.pool = BlockPool(num_blocks, BLOCK, enable_caching=False)
        blocks = self.pool.get_new_blocks(num_blocks)
        random.Random(epoch).shuffle(blocks)  # Two engines give a prompt different blocks.
        self.pool.free_blocks(blocks)
        self.lent: dict[str, list[int]] = {}
        self.parked: dict[str, Parked] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.held: dict[str, list[int]] = {}  # Blocks of requests that were aborted while loading.
        self.recomputed: set[str] = set()
        self.stats: list[dict[str, Any]] = []
        self.version: str | None = None  # The engine's weights; None: those of its start.

    def make_half(self, config: EngineConfig, url: str, epoch: Epoch) -> PullSchedulerHalf:
        return PullSchedulerHalf(
            self.named(EngineIdentity.of_engine(config)),
            epoch=epoch,
            clock=lambda: self.world.now,
            control=lambda agent, lock: Station(self.world, url, agent),
        )

    def named(self, identity: EngineIdentity) -> EngineIdentity:
        names = self.world.names.get(identity.engine_id, identity.names)
        return msgspec.structs.replace(identity, names=names)

    def make_worker(self, config: EngineConfig, epoch: Epoch, **parts: Any) -> PullWorkerHalf:
        return PullWorkerHalf(EngineIdentity.of_engine(config), epoch=epoch, **parts)

    def _worker(self, rank: int, epoch: Epoch) -> PullWorkerHalf:
        of_rank = msgspec.structs.replace(self.config.parallel_config, rank=rank)
        worker = self.make_worker(
            msgspec.structs.replace(self.config, parallel_config=of_rank),
            epoch,
            transports=lambda address: {"memory": MemoryTransport(address, self.world.network)},
            run_in_background=lambda job: job(),
            clock=lambda: self.world.now,
        )
        worker.register_kv_caches(self.ranks.memories[rank].kv_caches)
        return worker

    # --- Blocks --------------------------------------------------------------------------------

    def allocate(self, num_tokens: int) -> list[int]:
        return [block.block_id for block in self.pool.get_new_blocks(-(-num_tokens // BLOCK))]

    def give_back(self, block_ids: Sequence[int]) -> None:
        self.pool.free_blocks(self.pool.blocks[block_id] for block_id in block_ids)

    def compute(self, tokens: Sequence[int], block_ids: Sequence[int]) -> None:
        """Write the KV of these tokens, the same on whatever engine with the same weights."""
        self.ranks.write((block_ids,), 0, self.kv_of(tokens[: len(block_ids) * BLOCK]))

    def kv_of(self, tokens: Sequence[int]) -> Words:
        return self.ranks.model.kv(tokens, self.version, 0)

    def holds(self, tokens: Sequence[int], block_ids: Sequence[int], *, blocks: range | None = None) -> bool:
        """Every byte of these tokens' blocks is what their KV has to be."""
        blocks = blocks if blocks is not None else range(len(block_ids))
        kv = self.kv_of(tokens[: blocks.stop * BLOCK])
        return self.ranks.holds(0, block_ids, kv, blocks.start * BLOCK)

    # --- P -------------------------------------------------------------------------------------

    def prefill(self, request_id: str, tokens: list[int], **request: Any) -> dict[str, Any]:
        """Compute a prompt and lend it. Returns the kv_transfer_params of the answer."""
        params = self.finish_prefill(request_id, tokens, **request)
        assert params is not None, "nothing was lent"
        return params

    def finish_prefill(
        self,
        request_id: str,
        tokens: list[int],
        *,
        status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED,
        params: dict[str, Any] | None = None,
        **request: Any,
    ) -> dict[str, Any] | None:
        asked = FakeRequest(request_id, tokens, params or {"do_remote_decode": True}, **request)
        return self.end_prompt(asked, self.compute_prompt(asked), status)

    def compute_prompt(self, asked: FakeRequest) -> list[int]:
        """A prefill leg arrives and computes. Returns its blocks."""
        tokens = asked.prompt_token_ids
        self.half.on_new_request(asked)
        assert self.half.get_num_new_matched_tokens(asked, 0) == (0, False)
        block_ids = self.allocate(len(tokens) + 1)
        self.half.update_state_after_alloc(asked, FakeBlocks(block_ids), 0)
        self.compute(tokens, block_ids)
        asked.num_computed_tokens = len(tokens)
        return block_ids

    def end_prompt(
        self,
        asked: FakeRequest,
        block_ids: list[int],
        status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED,
    ) -> dict[str, Any] | None:
        """Ends the request. Returns the kv_transfer_params of its answer."""
        asked.status = status
        delay_free, answer = self.half.request_finished(asked, block_ids)
        if delay_free:
            self.lent[asked.request_id] = block_ids
        else:
            self.give_back(block_ids)
        return answer

    def set_weights(self, version: str | None, *, weights: str | None = None) -> None:
        """The weights have changed between two steps. `weights`: see `KVIdentity.updated`."""
        assert self.half.set_weights(weights, version)
        self.version = self.half._identity.kv_identity.version or None

    # --- D -------------------------------------------------------------------------------------

    def submit(
        self, request_id: str, tokens: list[int], params: dict[str, Any] | None, **request: Any
    ) -> FakeRequest:
        asked = FakeRequest(request_id, tokens, params, **request)
        self.half.on_new_request(asked)
        return asked

    def admit(self, request: FakeRequest, *, num_local: int = 0) -> bool:
        """Allocate. True: it waits for its load. False: it computes its prompt here."""
        num_external, is_async = self.half.get_num_new_matched_tokens(request, num_local)
        assert num_external is not None
        assert is_async == (num_external > 0)
        block_ids = self.allocate(len(request.prompt_token_ids))
        local = [index for index in range(num_local // BLOCK)]
        self.compute(request.prompt_token_ids, [block_ids[index] for index in local])
        self.half.update_state_after_alloc(request, FakeBlocks(block_ids), num_external)
        if num_external:
            self.parked[request.request_id] = Parked(request, block_ids, num_local, num_external)
            return True
        self.recomputed.add(request.request_id)
        self.finish(request, block_ids)
        return False

    def fetch(
        self,
        request_id: str,
        tokens: list[int],
        params: dict[str, Any],
        *,
        num_local: int = 0,
        **request: Any,
    ) -> FakeRequest:
        asked = self.submit(request_id, tokens, params, **request)
        self.admit(asked, num_local=num_local)
        return asked

    def abort(self, request: FakeRequest) -> None:
        parked = self.parked.pop(request.request_id)
        request.status = RequestStatus.FINISHED_ABORTED
        assert self.half.request_finished(request, parked.block_ids) == (False, None)
        self.held[request.request_id] = parked.block_ids

    def finish(self, request: FakeRequest, block_ids: list[int]) -> None:
        """Ends a request that ran here, and frees its blocks."""
        self.half.update_state_after_alloc(request, FakeBlocks(block_ids), 0)  # The host schedules it.
        request.status = RequestStatus.FINISHED_STOPPED
        assert self.half.request_finished(request, block_ids) == (False, None)
        self.give_back(block_ids)

    def read_out(self, request: FakeRequest) -> Outcome:
        """How the load ended; the request ends with it."""
        outcome = self.outcomes.pop(request.request_id)
        self.finish(request, outcome.block_ids)
        return outcome

    # --- Step ----------------------------------------------------------------------------------

    def step(self) -> bool:
        """One engine step without tokens. True if anything was ordered or reported."""
        output = SchedulerOutput()
        return self._take_report(output, self.worker_steps.step(self.half, output))

    def _take_report(self, step: SchedulerOutput, report: KVConnectorOutput | None) -> bool:
        if report is not None:
            self._take(report)
        stats = self.half.get_kv_connector_stats()
        if stats is not None:
            self.stats.append(stats.to_dict())
        assert isinstance(step.kv_connector_metadata, PullMetadata)
        return bool(step.kv_connector_metadata.orders) or report is not None

    def _take(self, output: KVConnectorOutput) -> None:
        invalid = output.invalid_block_ids
        for request_id in output.finished_recving or ():
            if request_id in self.held:
                self.give_back(self.held.pop(request_id))
                continue
            parked = self.parked.pop(request_id)  # Unknown ids kill a real host: so they do here.
            bad = [index for index, block_id in enumerate(parked.block_ids) if block_id in invalid]
            valid = min(bad) * BLOCK if bad else parked.num_local + parked.num_external
            self.outcomes[request_id] = Outcome(parked.block_ids, valid)
        for request_id in output.finished_sending or ():
            self.give_back(self.lent.pop(request_id))

    # --- Ends ----------------------------------------------------------------------------------

    def counted(self, name: str) -> Any:
        """The count over all steps: a number, or {reason or peer: number}, or all records."""
        values = [stats[name] for stats in self.stats]
        if name in ("transfers", "failed", "loans"):
            return [record for value in values for record in value]
        if name in ("failures", "refused", "peer_failures", "lost_links"):
            total: dict[str, int] = {}
            for value in values:
                for reason, count in value.items():
                    total[reason] = total.get(reason, 0) + count
            return total
        return sum(values)

    def kill(self) -> None:
        """kill -9: it does not answer, and its memory cannot be reached."""
        self.is_alive = False
        for url, station in list(self.world.wire.stations.items()):
            if station._agent is self.half._agent:
                del self.world.wire.stations[url]
        self.kill_ranks()

    def kill_ranks(self) -> None:
        for worker in self.workers:
            self.kill_rank(worker)

    def kill_rank(self, worker: PullWorkerHalf) -> None:
        metadata: Any = worker.get_handshake_metadata()
        engine_id = self.half._agent.address.engine_id
        self.world.network.kill(Address(engine_id, metadata.card.epoch))

    def assert_whole(self) -> None:
        assert not self.parked
        assert not self.held
        assert not self.lent
        self.pool.assert_empty()
        assert self.half.num_open_loans == 0
        assert self.half.num_open_fetches == 0
        for worker in self.workers:
            assert worker._links is not None
            assert worker._links.num_open == 0

    def shutdown(self) -> None:
        self.half.shutdown()
        for worker in self.workers:
            worker.shutdown()


World.engine_kind = Engine


__all__ = ["BLOCK", "Engine", "FakeRequest", "World", "engine_config"]
