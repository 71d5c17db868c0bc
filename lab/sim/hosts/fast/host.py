"""One incarnation of an engine: a process with a real scheduler half, a pool and a stand-in for its ranks.

    frame, timer --port--> agent --effects--> step: orders --> ranks --> reports --> outcomes
    router --> prefills, fetches --hooks--> half --> step

A step hands the half's orders to the ranks and their reports to the half, as an engine's step does. It runs
whenever the half may have something to tell. Every host can lend and fetch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from baton.connectors.pull.control.agent import PullAgent
from baton.connectors.pull.metadata import PullMetadata
from baton.connectors.pull.scheduler import PullSchedulerHalf
from baton.connectors.push.announcer import PrefillAnnouncer
from baton.contract import KVConnectorOutput
from baton.core.ids import Address, EngineId, Epoch
from baton.core.timers import Timers
from baton.engine.step import SchedulerOutput
from lab.sim.checkers import bounded, contained, whole
from lab.sim.hosts.fast.facts import Landing, Lent
from lab.sim.hosts.fast.fetches import Fetches
from lab.sim.hosts.fast.memory import Pool
from lab.sim.hosts.fast.model import handshakes, identity_of, settings_of
from lab.sim.hosts.fast.port import Port
from lab.sim.hosts.fast.prefills import Prefills
from lab.sim.hosts.fast.ranks import Ranks
from lab.sim.kernel.layers import LayerReports
from lab.sim.kernel.process import NEVER, Process

if TYPE_CHECKING:
    from lab.sim.hosts.fast.cluster import Cluster

EMPTY = SchedulerOutput()
OTHER_WEIGHTS = 1_000_000  # More than the number of any prompt.


class Host(Process):
    pool: Pool

    def __init__(
        self,
        cluster: Cluster,
        name: EngineId,
        num_ranks: int,
        rate: float,
        skew_s: float,
        timers: Timers,
    ) -> None:
        super().__init__(cluster.world, name, rate, skew_s, timers)
        self.cluster, self.engine_id = cluster, name
        self.address = Address(name, Epoch(self.world.rng.getrandbits(64)))
        self.num_ranks = num_ranks
        self.lends = cluster.keeps_turns or name[0] != "D"
        self.fetches_kv = cluster.keeps_turns or name[0] != "P"
        self.weights = cluster.updates.at_boot
        self.pool = Pool(cluster.num_blocks, num_ranks, cluster.groups)
        self.memories = self.pool.ranks
        self.exits_at = NEVER  # Time of the exit, once the host drains.
        self._is_woken = False
        self.layer_reports: LayerReports | None = None
        self.prefills, self.fetches, self.ranks = Prefills(self), Fetches(self), Ranks(self)
        self.half = self._half()
        self.half.set_xfer_handshake_metadata(dict(handshakes(num_ranks, cluster.num_blocks, cluster.groups)))
        self.half.bind_wake(self._wake)
        self.half.bind_gpu_block_pool(self.pool)

    def _half(self) -> PullSchedulerHalf:
        cluster = self.cluster
        settings = settings_of(cluster.is_push, cluster.keeps_turns, self.timers)
        weights = cluster.updates.named(self.weights)
        identity = identity_of(self.engine_id, self.num_ranks, settings, cluster.groups_as_told, weights)
        how: dict[str, Any] = {
            "epoch": self.address.epoch,
            "clock": self.clock,
            "control": self._port,
            "machines": cluster.parts.machines,
        }
        if cluster.is_push:
            how["announcer"] = partial(PrefillAnnouncer, layer_reports=self._layer_reports)
        return PullSchedulerHalf(identity, **how)

    def _port(self, agent: PullAgent, lock: object) -> Port:
        self.agent = agent
        self.port = Port(self, agent)
        return self.port

    def _layer_reports(self, on_report: Callable[[int, int, int], None]) -> LayerReports:
        self.layer_reports = LayerReports(on_report)
        return self.layer_reports

    def is_lent(self, blocks: Iterable[int], reader: object) -> bool:
        assert isinstance(reader, Landing)
        transfer_id, owner = reader.transfer_id, self.pool.owner
        owners = [owner[block] for block in blocks]
        return all(isinstance(lent, Lent) and lent.transfer_id == transfer_id for lent in owners)

    def kv_of(self, prompt: int) -> int:
        """Content of the cells of this prompt's tokens, as the host computes them with its weights."""
        return prompt + OTHER_WEIGHTS * self.weights

    def take_weights(self, weights: int) -> None:
        """Take weights in vLLM's mode "keep": requests go on, and the KV that they have stays."""
        digest, version = self.cluster.updates.named(weights)
        count, landings = self.world.count, self.fetches.landings.values()
        self.world.note(self.name, f"takes weights {weights}: {digest!r}, {version!r}")
        count("updated during a load", any(one.is_open and one.loan_id is not None for one in landings))
        count("updated during a stream, D", any(one.is_open and one.loan_id is None for one in landings))
        count("updated during a prefill", any(one.num_done for one in self.prefills.open))
        count("updated with a loan open", bool(self.prefills.lent))
        self.weights = weights
        self.half.set_weights(digest, version or None)
        self.step()

    # --- The process ------------------------------------------------------------------------------

    def step_clock(self, by_s: float) -> None:
        super().step_clock(by_s)
        self.port.clock_stepped()

    def run_event(self, action: Callable[[], None]) -> None:
        action()
        if self.port.is_stale:
            self.port.arm()

    def drain(self, for_s: float) -> None:
        """Take no new request; exit when nothing is left, or at the deadline."""
        if self.exits_at < NEVER:
            return
        self.memories = self.pool.ranks
        self.exits_at = self.world.now + for_s
        self.world.count("drain")
        self.half.drain(for_s * self.rate)
        self.world.after(for_s, lambda: self.when_awake(self._exit))
        self.step()

    @property
    def is_draining(self) -> bool:
        return self.exits_at < NEVER

    def _exit(self) -> None:
        if self.is_alive:
            self.cluster.end(self, down_s=0.5)

    # --- Steps ------------------------------------------------------------------------------------

    def begin_step(self, output: SchedulerOutput) -> PullMetadata:
        """Report the scheduled tokens to the half, and carry out its orders."""
        metadata = self.half.build_connector_meta(output)
        assert isinstance(metadata, PullMetadata)
        for order in metadata.orders:
            if self.world.trace is not None:
                self.world.note(self.name, f"{order}"[:160])
            self.ranks.carry_out(order)
        return metadata

    def settle(self) -> None:
        """Run a step if the last hook or frame has given the half something to do."""
        if self.port.had_effects() or self.half.has_pending_block_frees():
            self.step()

    def step(self, computed: int = 0) -> None:
        """Carry out what the half has decided. `computed`: number of a step whose tokens are computed."""
        while True:
            self._is_woken = False
            metadata = self.begin_step(EMPTY)
            report, computed = self.ranks.report(computed), 0
            if report is None and not metadata.wants_report:
                break
            output = KVConnectorOutput(kv_connector_worker_meta=report)
            self.half.update_connector_output(output)
            for request_id in sorted(output.finished_sending or ()):
                self.prefills.loan_freed(request_id)
            for request_id in sorted(output.finished_recving or ()):
                self.fetches.received(request_id)
            if not self._is_woken:
                break
        self.fetches.look_for_failures()
        if self.is_draining and not (self.half.num_open_loans or self.half.num_open_fetches):
            self.world.after(0.0, lambda: self.when_awake(self._exit))

    def _wake(self) -> None:
        self._is_woken = True

    def count_stats(self) -> None:
        """Count the half's stats since the last call. Raises Violation if it contained a fault of its own."""
        stats = self.half.get_kv_connector_stats()
        if stats is None:
            return
        count = self.world.count
        for reason, how_often in stats.data["failures"].items():
            contained.check_reason(reason)
            count(f"failed: {reason}", how_often)
        for reason, how_often in stats.data["refused"].items():
            count(f"ticket refused: {reason}", how_often)
        count("loans expired", stats.data["num_expired_loans"])

    def check_rest(self) -> None:
        self.count_stats()
        bounded.check_landings(self)
        whole.check_host(self)
