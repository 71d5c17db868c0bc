"""One incarnation of an engine: the real scheduler, both real halves, fake ranks, the loop of a core process.

    turn:  take what arrived -> schedule -> bind the metadata on every rank
             ... as long as the step takes: frames arrive, reads go on, timers fire ...
    end:   compute, collect the ranks' reports, aggregate, update_from_output -> outputs to the front end

Requests and aborts are taken between steps only, as in `baton.engine.core.core_process`. An engine that has
nothing to compute sleeps until something happens to it, which is what polling it would see.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from baton.connectors.multi import MultiSchedulerHalf, MultiWorkerHalf
from baton.connectors.pull import EngineIdentity, PullSchedulerHalf, PullWorkerHalf
from baton.connectors.pull.control.agent import PullAgent
from baton.connectors.push import PrefillAnnouncer, PushIdentity
from baton.connectors.storage.memory.identity import OffloadIdentity
from baton.connectors.storage.memory.scheduler import OffloadSchedulerHalf
from baton.connectors.storage.memory.worker import OffloadWorkerHalf
from baton.contract import (
    KVConnectorSchedulerHalf,
    KVConnectorWorkerHalf,
    KVOutputAggregator,
)
from baton.core.config import (
    EngineConfig,
)
from baton.core.ids import Address, EngineId, Epoch
from baton.core.kv_groups import is_hybrid
from baton.engine.api import EngineOutput, EngineRequest
from baton.engine.core.weights_update import UpdateUnderWay, WeightsUpdate
from baton.engine.scheduling.remote_kv import Load
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.step import ModelRunnerOutput, SchedulerOutput
from baton.protocol.effects import FreeLoan
from baton.protocol.signed_frame import ProcessKey
from baton.testing.host.memory import RankMemory
from baton.testing.host.model import EOS_IDS
from baton.testing.host.ranks import Ranks
from baton.testing.host.workers import WorkerSteps
from lab.sim.checkers import bounded, contained, fenced, fresh, held, whole
from lab.sim.host.counts import count_stats, count_update
from lab.sim.host.host_spec import HostSpec, engine_config
from lab.sim.host.layers import LayerReports, Reporter
from lab.sim.host.offload import HostCopies, offload_identity
from lab.sim.host.pool import WatchedPool
from lab.sim.host.port import Port
from lab.sim.host.updates import Core
from lab.sim.host.wire import Station
from lab.sim.kernel.process import SOON_S, Process
from lab.sim.kernel.windows import shortened

if TYPE_CHECKING:
    from lab.sim.host.cluster import Cluster

EMPTY_STEP_S = 0.0002
NAP_S = 1.0  # Longest sleep without an event. Production sleeps less, which would show nothing more.
T = TypeVar("T")


class Listener(Protocol):
    """The front end's end of one request."""

    ask: Any

    @property
    def params(self) -> dict[str, Any]: ...
    def say(self, output: EngineOutput) -> None: ...
    def break_off(self) -> None: ...
    def cut(self) -> None:
        """The connection breaks."""

    def note_weights(self, weights: int, *, is_mixed: bool = False) -> None:
        """The engine computes with these. `is_mixed`: the answer has tokens of earlier ones, and goes on."""


class Engine(Process):
    def __init__(self, cluster: Cluster, spec: HostSpec, engine_id: EngineId) -> None:
        super().__init__(cluster.world, spec.name, spec.rate, spec.skew_s, spec.timers)
        self.lends, self.fetches_kv = spec.is_producer, spec.is_consumer
        self.cluster, self.spec, self.engine_id = cluster, spec, engine_id
        self.is_slow, self.num_ranks = spec.is_slow, spec.num_ranks
        self.is_draining = False
        self._commands: list[Callable[[], None]] = []
        self._listeners: dict[str, Listener] = {}
        self._left: set[str] = set()  # Requests whose client has left.
        self._is_stepping = False
        self._turn_is_due = False
        self._was_poked = False
        self._is_napping = False
        self.parked_at: dict[str, float] = {}  # Loads that are open, since when.
        self.claimed_at: dict[int, float] = {}  # Open claims, since when.
        # Streams by claim and by when D has last heard of them, since when that is so.
        self.heard_at: dict[tuple[int, float], float] = {}
        self._loaded: set[str] = set()  # Requests whose load was delivered.
        self._legs: set[str] = set()  # Requests that are computed for a consumer.
        self.held_at: dict[str, float] = {}  # Finished requests with blocks in use by a transfer.
        self._on_drained: Callable[[], None] | None = None
        self._output: SchedulerOutput | None = None  # Output of the step in flight.
        self._computed: ModelRunnerOutput | None = None  # Ahead of the step's end.
        self.hung_s = 0.0  # How long its steps have hung.
        self._build()

    # --- Parts ------------------------------------------------------------------------------------

    def _build(self) -> None:
        spec, rng = self.spec, self.world.rng
        config = engine_config(spec, self.cluster, self.engine_id)
        self.groups = config.kv_cache_groups
        key = self.cluster.parts.process_key(hashlib.sha256(b"%d" % rng.getrandbits(64)).digest())
        epoch = key.epoch
        self.address = Address(self.engine_id, epoch)
        self.layer_reports: LayerReports | None = None
        how: dict[str, Any] = {
            "epoch": epoch,
            "clock": self.clock,
            "control": lambda agent, lock: self._station(agent, lock, key),
            "machines": self.cluster.parts.machines,
        }
        if self.cluster.is_push:
            how["announcer"] = partial(PrefillAnnouncer, layer_reports=self._hear_layers)
        half = _with_methods(PullSchedulerHalf, self.cluster.parts.half)
        self.half = half(self._identity(config), **how)
        free = self.half._agent.on_free

        def free_checked(effect: FreeLoan, now: float) -> None:
            held.check_loan_ended(self, effect.loan_id)
            free(effect, now)

        self.half._agent.on_free = free_checked
        self.offload: OffloadSchedulerHalf | None = None
        self.connector: KVConnectorSchedulerHalf = self.half
        if spec.offload is not None:
            offload = _with_methods(OffloadSchedulerHalf, self.cluster.parts.offload_half)
            self.offload = offload(offload_identity(self, 0, config))
            multi = _with_methods(MultiSchedulerHalf, self.cluster.parts.multi_half)
            self.connector = multi(
                self._children(self.half, self.offload),
                block_tokens=spec.block_tokens,
                num_ranks=spec.num_ranks,
            )
        self.scheduler = Scheduler(config, self.connector)
        self.core = Core(config, self.scheduler, self)
        self.pool = WatchedPool(
            config.cache_config,
            num_groups=len(self.groups),
            has_null_block=is_hybrid(self.groups),
            on_taken=self._taken,
            on_freed=self._freed,
        )
        self.scheduler.kv_cache.block_pool = self.pool
        settle = self.scheduler.remote.settle

        def settle_checked(load: Load, *, is_continued: bool = False) -> bool:
            fresh.check_load(self, load)
            is_of_use = settle(load, is_continued=is_continued)
            if is_of_use:
                self._loaded.add(load.request.request_id)
            return is_of_use

        self.scheduler.remote.settle = settle_checked  # type: ignore[method-assign]
        self.ports: list[Port] = []
        self.rank_halves: list[KVConnectorWorkerHalf] = []  # Halves in the executor's order.
        self.reporters: list[Reporter] = []
        self.workers = [self._worker(config, rank) for rank in range(spec.num_ranks)]
        self.memories = [port.memory for port in self.ports]
        self.ranks = Ranks(config, self.cluster.model, self.memories)
        self.ranks.weights = self.cluster.updates.at_boot
        self.num_updates = 0  # Changes of the weights.
        handshakes = [half.get_handshake_metadata() for half in self.rank_halves]
        self.connector.set_xfer_handshake_metadata({r: h for r, h in enumerate(handshakes) if h is not None})
        self._worker_steps = WorkerSteps(
            self.rank_halves,
            KVOutputAggregator.from_connector(self.connector, spec.num_ranks),
            caches=[memory.kv_caches for memory in self.memories],
        )

    def _station(self, agent: PullAgent, lock: threading.Lock, key: ProcessKey) -> Station:
        self.station = Station(self, self.spec.url, agent, lock, key)
        return self.station

    def _worker(self, config: EngineConfig, rank: int) -> PullWorkerHalf:
        memory = RankMemory(config, rank, is_block_major=self.spec.is_block_major)

        def transports(address: Address) -> dict[str, Port]:
            port = Port(self, rank, memory, address)
            self.ports.append(port)
            return {port.name: port}

        of_rank = msgspec.structs.replace(config.parallel_config, rank=rank)
        how: dict[str, Any] = {
            "epoch": Epoch(self.world.rng.getrandbits(64)),
            "transports": transports,
            "run_in_background": self._in_background,
            "clock": self.clock,
        }
        identity = self._identity(msgspec.structs.replace(config, parallel_config=of_rank))
        reporter = self._reporter if self.cluster.is_push else None
        worker = PullWorkerHalf(identity, reporter=reporter, **how)
        half: KVConnectorWorkerHalf = worker
        if self.offload is not None:

            def copies(caches: object, identity: OffloadIdentity) -> HostCopies:
                return HostCopies(self, memory, identity.num_rows)

            offload = OffloadWorkerHalf(offload_identity(self, rank, config), copies)
            half = MultiWorkerHalf(self._children(worker, offload), rank=rank)
        half.register_kv_caches(memory.kv_caches)
        self.rank_halves.append(half)
        return worker

    def _children(self, handoff: T, offload: T) -> list[tuple[str, T]]:
        children = [("handoff", handoff), ("offload", offload)]
        return children[::-1] if self.spec.is_offload_first else children

    def _hear_layers(self, on_report: Callable[[int, int, int], None]) -> LayerReports:
        self.layer_reports = LayerReports(on_report)
        return self.layer_reports

    def _reporter(self, rank: int) -> Reporter:
        self.reporters.append(Reporter(self, rank))
        return self.reporters[-1]

    def _identity(self, config: EngineConfig) -> EngineIdentity:
        identity = (PushIdentity if self.cluster.is_push else EngineIdentity).of_engine(config)
        groups = shortened(identity.groups, self.cluster.parts.window_error)
        return msgspec.structs.replace(identity, groups=groups)

    # --- The process ------------------------------------------------------------------------------

    def die(self) -> None:
        """kill -9. Clients see their connections break, if the network reports it."""
        self.is_alive = False
        self.world.note(self.name, "is gone")
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.break_off()

    def drain(self, for_s: float, on_drained: Callable[[], None]) -> None:
        """Take no new request; end when no peer uses our blocks, or at the deadline. As after SIGTERM."""

        def begin() -> None:
            self.world.note(self.name, f"drains for {for_s} s at most")
            self.scheduler.connector.drain(for_s)
            self._on_drained = on_drained

        self.is_draining = True
        self._commands.append(begin)
        self.poke()

    def shut_down(self) -> None:
        """Shut down in order, with last words to the peers."""
        self.connector.shutdown()
        for half in self.rank_halves:
            half.shutdown()

    def _report_drained(self) -> None:
        scheduler = self.scheduler
        if self._on_drained is None or scheduler.has_unfinished_requests() or scheduler.has_blocks_to_await():
            return
        on_drained, self._on_drained = self._on_drained, None
        self.world.after(SOON_S, lambda: self.when_awake(on_drained))

    def _in_background(self, job: Callable[[], None]) -> None:
        """Set up connections, which is a thread's work and takes a while."""
        took_s = self.world.spread(self.world.faults.delay_mean_s)

        def done() -> None:
            job()
            self.poke()

        self.world.after(took_s, lambda: self.when_awake(done))

    # --- The front end's door ---------------------------------------------------------------------

    def submit(self, request: EngineRequest, listener: Listener) -> None:
        def add() -> None:
            self.world.note(self.name, f"request {request.request_id} of {len(request.prompt_token_ids)}")
            self._listeners[request.request_id] = listener
            self.ranks.salts[request.request_id] = request.cache_salt
            if (request.kv_transfer_params or {}).get("do_remote_decode"):
                self._legs.add(request.request_id)
            listener.note_weights(self.ranks.weights)
            if (ended := self.core.add_request(request)) is not None:
                self._hand_out([ended])

        self._commands.append(add)
        self.poke()

    def abort(self, request_id: str) -> None:
        """The client of this request has left, and the front end knows."""
        self._left.add(request_id)

        def abort() -> None:
            self.world.note(self.name, f"abort {request_id}")
            self._listeners.pop(request_id, None)
            self.core.abort(request_id)

        self._commands.append(abort)
        self.poke()

    def leg_of(self, request_id: str) -> Listener | None:
        return self._listeners.get(request_id)

    def take_back(self, params: dict[str, Any]) -> None:
        """No consumer will come for this loan."""
        self._commands.append(lambda: self.scheduler.connector.take_back(params))
        self.poke()

    # --- Updates of the weights -------------------------------------------------------------------

    def update_weights(self, update: WeightsUpdate, timeout_s: float) -> None:
        def begin() -> None:
            try:
                self.core.begin_update(update)
            except UpdateUnderWay:
                self.world.count("update: another is under way")
                return
            self.world.note(self.name, f"is to take weights {update.model_config.model}, mode {update.mode}")
            self.world.after(timeout_s, lambda: self.when_awake(time_out))

        def time_out() -> None:
            self.core.time_out(update)
            self.poke()

        self._commands.append(begin)
        self.poke()

    def stage_weights(self, folder: str, files: object) -> None:
        self._staged = int(folder)

    def end_staging(self, *, is_wanted: bool) -> None:
        """The executor's part of an update: no step is in flight, and the core informs the halves next."""
        if not is_wanted:
            return self.world.count("update: out of time")
        self.world.note(self.name, f"takes weights {self._staged}")
        count_update(self)
        self.ranks.weights = self._staged
        self.num_updates += 1
        for request_id, listener in self._listeners.items():
            request = self.scheduler.requests.get(request_id)
            is_mixed = request is not None and not request.is_finished and request.num_output_tokens > 0
            listener.note_weights(self.ranks.weights, is_mixed=is_mixed)

    # --- Steps ------------------------------------------------------------------------------------

    def poke(self) -> None:
        """Something has happened that a step may care about."""
        self._was_poked = True
        if not self._is_stepping and not self._turn_is_due:
            self._turn_is_due = True
            self.world.after(SOON_S, lambda: self.when_awake(self._turn))

    def _turn(self) -> None:
        self._turn_is_due = self._was_poked = False
        if self._is_stepping or not self.is_alive:
            return
        commands, self._commands = self._commands, []
        for command in commands:
            command()
        self._hand_out(self.core.continue_update())
        self._report_drained()
        if not self.scheduler.has_requests():
            return
        output = self.scheduler.schedule()
        assert output.kv_connector_metadata is not None
        self._worker_steps.begin(output)
        for request_id in sorted(output.preempted_req_ids):
            self.world.note(self.name, f"preempted {request_id}")
            self._count("preempted after a load", request_id in self._loaded)
        if output.num_scheduled_tokens and self.world.trace is not None:
            self.world.note(self.name, f"step {output.num_scheduled_tokens}")
        if not output.num_scheduled_tokens and self.world.chance(0.8):
            self._end_step(output)  # The step ends before anything else can happen.
            return
        self._is_stepping, self._output = True, output
        took_s = EMPTY_STEP_S
        if output.num_scheduled_tokens:
            took_s = self.world.spread(self.spec.step_mean_s) + self._hangs_s()
            if any(reporter.is_asked for reporter in self.reporters):
                self.world.after(took_s / 2, lambda: self.when_awake(lambda: self._compute_layers(output)))
        self.world.after(took_s, lambda: self.when_awake(lambda: self._end_step(output)))

    def _hangs_s(self) -> float:
        """The engine's thread hangs in this step; its control thread goes on."""
        world = self.world
        if not world.lies(world.faults.hung_steps):
            return 0.0
        for_s = world.rng_of_lies.choice([2.0, 8.0, 25.0])
        world.count("hung steps")
        world.note(self.name, f"a step hangs for {for_s} s")
        self.hung_s += for_s
        return for_s

    def _compute_layers(self, output: SchedulerOutput) -> None:
        """Compute up to the middle of a step: its first layer is computed, and can be read."""
        if self._output is not output:
            return  # The process stood still until the step had ended.
        self.ranks.take_over(output)
        self._computed = self.ranks.execute(output)
        self.ranks.hide_later_layers()
        self._worker_steps.show_layers(0, 1)

    def _compute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        result, self._computed = self._computed, None
        if result is not None:
            self.ranks.reveal()
            self._worker_steps.show_layers(1)
            return result
        self.ranks.take_over(output)
        if not output.num_scheduled_tokens:
            return ModelRunnerOutput()
        result = self.ranks.execute(output)
        self._worker_steps.show_layers()
        return result

    def _end_step(self, output: SchedulerOutput) -> None:
        self._is_stepping, self._output = False, None
        result = self._compute(output)
        result.kv_connector_output = self._worker_steps.end()
        outputs = self.scheduler.update_from_output(output, result)
        bounded.check_step(self)
        contained.check_step(self)
        whole.check_loans(self)
        if outputs.stats is not None:
            count_stats(self.world, outputs.stats, self.groups)
        self._hand_out(outputs.outputs)
        if output.num_scheduled_tokens or self._was_poked or self._commands:
            self.poke()
        elif self.scheduler.has_requests() and not self._is_napping:
            self._is_napping = True
            self.world.after(NAP_S, self._end_nap)

    def _end_nap(self) -> None:
        self._is_napping = False
        if self.is_alive:
            self.poke()

    def _hand_out(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            ended = output.finish_reason is not None
            take = self._listeners.pop if ended else self._listeners.get
            listener = take(output.request_id, None)
            if ended:
                self.world.note(
                    self.name,
                    f"ended {output.request_id}: {output.finish_reason}"
                    + (f" ({output.error.message[:80]})" if output.error else ""),
                )
                is_eos = output.new_token_ids[-1:] != [] and output.new_token_ids[-1] in EOS_IDS
                self._count("a producer's token is EOS", is_eos and output.request_id in self._legs)
            if output.request_id in self._left:
                self._drop(output)
            elif listener is not None:
                listener.say(output)

    def _count(self, what: str, happened: bool) -> None:
        """Situations that worlds with states have to contain too."""
        self.world.count(what, happened)
        self.world.count(f"{what}, of states", happened and self.cluster.has_states)

    def _drop(self, output: EngineOutput) -> None:
        """Drop an output whose client has left, as the front end does: a loan in it ends now."""
        params = output.kv_transfer_params
        if params is None or "baton_ticket" not in params:
            return
        self.world.count("answers dropped with a loan")
        if self.cluster.parts.takes_back:
            self.take_back(params)
        check = partial(whole.check_dropped, self, params["baton_ticket"], self.world.paused_s + self.hung_s)
        self.world.after(whole.TAKEN_BACK_S, check)

    # --- Blocks -----------------------------------------------------------------------------------

    def _taken(self, block_ids: list[int]) -> None:
        fenced.check_free(self.cluster.reads.live, self, block_ids)
        for port in self.ports:
            port.memory.forget_writers(block_ids)

    def _freed(self, block_ids: list[int]) -> None:
        fenced.check_free(self.cluster.reads.live, self, block_ids)


def _with_methods(half: type[T], methods: type | None) -> type[T]:
    return half if methods is None else type("MutantHalf", (methods, half), {})
