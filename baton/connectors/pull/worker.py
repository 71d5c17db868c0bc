"""Worker half of pull and push: moves bytes into this rank's blocks, and reports how each read ended.

It knows blocks, claims and peers' ranks; of requests only the ids that it is told to report. Reads are posted
as soon as a step's metadata is bound, before the model runs. A scheduler half in the same process can order
them at any time. Connections are made in the background. Ends of reads are collected at the end of each step.
For push it also reports computed layers, if a step asks for it.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from baton.connectors.background_loads import BackgroundLoads
from baton.connectors.extra_config import FIELD
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.layer_reports import LayerReporter
from baton.connectors.pull.metadata import (
    NOTHING,
    EndReads,
    FailedLoad,
    LosePeer,
    MeetPeer,
    Order,
    PullHandshake,
    PullMetadata,
    PullWorkerReport,
    ReadBlocks,
    ReadEnd,
    ZeroDrafts,
)
from baton.connectors.pull.reads.background import Background
from baton.connectors.pull.reads.cache_layout import is_of_states, layout_of
from baton.connectors.pull.reads.links import PeerLinks, RunInBackground
from baton.contract import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    host,
)
from baton.core.errors import ConfigError, TransferError
from baton.core.ids import Address, Epoch
from baton.core.layout import SLOT, RankLayout
from baton.protocol.handshake import RankCard
from baton.transport import PREFERENCE, available_names, make_transports, register_all
from baton.transport.base.interface import Transport

if TYPE_CHECKING:
    import torch

    from baton.connectors.pull.reads.host_mirror import HostMirror
    from baton.contract.base import CopyBlocksOp

logger = logging.getLogger(__name__)

_FENCE_POLL_S = 0.001


def new_epoch() -> Epoch:
    return Epoch(1 + secrets.randbelow(2**64 - 1))  # 0 means unknown: see Address.is_named_only.


class PullWorkerHalf(BackgroundLoads):
    """Worker half of BatonPullConnector, and with a reporter of BatonPushConnector.

    Args:
        epoch: of this rank's memory; None: random.
        transports: makes those of this rank, given its address; None: those that the settings name.
        run_in_background: runs a job that may wait for a peer; None: in a thread of its own.
        clock: seconds, monotonic.
        reporter: makes what reports computed layers, given the tensor-parallel rank; None: pull only.

    Source: `vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1`, the worker's methods.
    """

    def __init__(
        self,
        identity: EngineIdentity,
        *,
        epoch: Epoch | None = None,
        transports: Callable[[Address], Mapping[str, Transport]] | None = None,
        run_in_background: RunInBackground | None = None,
        clock: Callable[[], float] = time.monotonic,
        reporter: Callable[[int], LayerReporter] | None = None,
    ) -> None:
        super().__init__(identity.groups)
        self._identity = identity
        self._rank = identity.rank
        self.prefer_cross_layer_blocks = identity.settings.cross_layer_blocks
        self._epoch = epoch if epoch is not None else new_epoch()
        self._given_transports = transports
        self._clock = clock
        self._background = Background(f"baton-connect-{identity.rank}")
        self._given_run_in_background = run_in_background
        self._drafts: dict[str, tuple[int, torch.Tensor]] = {}  # Cache group and cache, by layer.
        self._empty_step_wait_s = identity.policy.empty_step_wait_s
        self._reporter = reporter(identity.tp_rank) if reporter is not None else None
        self._layer_index: dict[str, int] = {}
        self._has_news = threading.Event()  # A read has ended; for steps that wait.
        # Wakes the host, or a step that waits.
        self._wake: Callable[[], None] | None = self._has_news.set if self._empty_step_wait_s else None
        self._transports: Mapping[str, Transport] = {}
        self._links: PeerLinks | None = None  # None until the cache is registered.
        self._card: RankCard | None = None
        self._caches: dict[str, torch.Tensor] = {}  # Registered caches: the host's, or the mirror's.
        self._is_asleep = False  # The host has taken the cache's memory away.
        self._ended_by_sleep: list[ReadEnd] = []
        self._new_card: RankCard | None = None  # Card since the host woke up; not reported yet.
        self.mirror: HostMirror | None = None
        # Forward context of this step, for the mirror.
        self._forward_context: host.ForwardContext | None = None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._links is None, "registered once"
        if self._identity.has_host_mirror and self._identity.settings.reports_layers:
            raise ConfigError(
                "layer cannot go with kv_buffer_device cpu: what a step computes is there at its end",
                field=f"{FIELD}.stream",
            )
        with_tokens = {name: cache for name, cache in kv_caches.items() if not is_of_states(cache)}
        self._layer_index = {name: index for index, name in enumerate(with_tokens)}
        find_packing = self._identity.policy.find_packing
        packing = SLOT if find_packing is None or not with_tokens else find_packing(with_tokens)
        if packing != SLOT:
            logger.info("the cache's blocks are packed as %r", packing)
        if self._identity.has_host_mirror:
            from baton.connectors.pull.reads.host_mirror import HostMirror

            self.mirror = HostMirror(kv_caches, self._identity.block_tokens)
            kv_caches = self.mirror.caches
        drafts = self._identity.policy.find_drafts(kv_caches.keys())
        group_of = self._groups_of(list(kv_caches))
        layout = layout_of(kv_caches, self._identity, packing, group_of, drafts)
        self._drafts = {
            layer.name: (layer.group, kv_caches[layer.name]) for layer in layout.layers if layer.is_draft
        }
        self._caches = kv_caches
        self._card, self._links = self._open(layout, self._epoch)

    def _open(self, layout: RankLayout, epoch: Epoch) -> tuple[RankCard, PeerLinks]:
        """Make the caches readable for peers, by new transports. Endpoints are bound to `epoch`."""
        address = Address(self._identity.engine_id, epoch)
        device, _, _ = layout.regions[0].device.partition(":")
        order = self._identity.settings.transports or available_names(device)
        make = self._given_transports or partial(self._make_transports, order)
        self._transports = make(address)
        # Imported here, because only a process that holds tensors has to load torch.
        from baton.connectors.pull.reads.staged import StagedReader

        staged = StagedReader.of_caches(layout, self._caches) if layout.layers else None
        regions = (*layout.regions, staged.region) if staged is not None else layout.regions
        endpoints = register_all(self._transports, regions)
        links = PeerLinks(
            layout,
            self._transports,
            PREFERENCE if self._given_transports is not None else order,
            self._run_and_wake,
            staged=staged,
            converts_dtype=self._identity.settings.convert_dtype,
            clock=self._clock,
        )
        return RankCard(self._identity.tp_rank, layout, endpoints, epoch), links

    def unregister_kv_caches(self) -> None:
        """When this returns, no read runs into the caches or out of them, and none can begin.

        vLLM resets its prefix cache before, and refuses to sleep while a block is lent or being filled. So a
        read that ends here is a peer's late one, or one that was cancelled.

        Raises TransferError if a read does not end: the host must keep the memory.
        """
        if self._links is None or self._is_asleep:
            return
        self._is_asleep = True
        timeout_s = self._identity.settings.shutdown_timeout_s
        give_up_at = time.monotonic() + timeout_s
        self._links.close()
        self._background.close(timeout_s)  # A job may convert what was read, into the caches.
        for transport in self._transports.values():
            transport.close()
        self._ended_by_sleep += self._take_ended()
        pause = threading.Event()
        while self._links.num_open:
            if time.monotonic() >= give_up_at:
                raise TransferError("cannot sleep: a read into the cache has not ended")
            pause.wait(_FENCE_POLL_S)
            self._ended_by_sleep += self._take_ended()

    def restore_kv_caches(self) -> None:
        """Register the same caches anew. No earlier endpoint or ticket leads to the memory."""
        if not self._is_asleep:
            return
        assert self._card is not None
        assert self._links is not None
        self._ended_by_sleep += self._take_ended()
        self._background = Background(f"baton-connect-{self._identity.rank}")
        met = self._links.known_cards()
        self._card, self._links = self._open(self._card.layout, new_epoch())
        for address, cards in met.items():
            self._links.meet(address, cards)
        self._new_card = self._card
        self._is_asleep = False

    def _groups_of(self, in_order: list[str]) -> Mapping[str, int] | None:
        """The cache group of each layer; None if there is one: it has whatever layers this rank has."""
        groups = self._identity.groups
        if len(groups) == 1:
            return None
        return {in_order[layer]: index for index, group in enumerate(groups) for layer in group.layers}

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: Any) -> None:
        """Layers are told apart all the same, so that peers may have theirs apart: they share one region."""
        self.register_kv_caches(dict(zip(attn_backend.layer_names, kv_cache.unbind(1), strict=True)))

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        if self.mirror is not None:
            self.mirror.bind(copy_operation)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return PullHandshake(self._card) if self._card is not None else None

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        self._wake = wake
        return self._given_transports is None  # Given transports may not report the end of a read.

    def take_order(self, order: Order) -> None:
        """Carry out an order that need not wait for a step: any but a FailedLoad.

        On any thread, one order at a time.

        Never blocks. A failure ends this claim only, and its end is reported.
        """
        assert not isinstance(order, FailedLoad), "it is for a step to report"
        self._carry_out_contained(order)

    # --- Step ----------------------------------------------------------------------------------

    def takes_part(self, connector_metadata: KVConnectorMetadata) -> bool:
        return bool(
            connector_metadata != NOTHING
            or self._received
            or self._ended_by_sleep
            or self._new_card is not None
            or self.mirror is not None
            or (self._links is not None and self._links.has_news)
        )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Carries out the orders now rather than in `start_load_kv`, which hosts call after the forward."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, PullMetadata)
        for order in connector_metadata.orders:
            self._carry_out_contained(order)
        if self._reporter is not None:
            self._reporter.begin(connector_metadata.layer_reports)

    def start_load_kv(self, forward_context: host.ForwardContext, **kwargs: Any) -> None:
        """Loads are under way since the metadata was bound.

        A step that computes nothing waits for a short read, which is then reported in this step.
        """
        self._forward_context = forward_context
        waits = self._empty_step_wait_s and self._given_transports is None and self._links is not None
        if not waits or forward_context.attn_metadata is not None:
            return
        assert self._links is not None
        give_up_at = time.monotonic() + self._empty_step_wait_s
        self._has_news.clear()
        while self._links.num_moving and (remaining_s := give_up_at - time.monotonic()) > 0:
            self._has_news.wait(remaining_s)
            self._has_news.clear()

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        index = self._layer_index.get(layer_name)  # None: the layer has a state.
        if self._reporter is not None and index is not None:
            self._reporter.layer_computed(index, kv_layer)

    def wait_for_save(self) -> None:
        if self.mirror is None or not self._identity.is_producer:
            return
        metadata, context = self._get_connector_metadata(), self._forward_context
        assert isinstance(metadata, PullMetadata)
        computed: Sequence[Any] = ()
        if context is not None and context.attn_metadata is not None:
            # Layers of one cache group share one.
            computed = list({id(metadata): metadata for metadata in context.attn_metadata.values()}.values())
        try:
            self.mirror.save(computed, metadata.held_blocks)
        except Exception:
            # The mirror is not what was computed, and the ticket is about to leave. Closed transports make
            # every read of it fail, so peers compute the prompt themselves. Then the host gets the error.
            for transport in self._transports.values():
                transport.close()
            raise

    def clear_connector_metadata(self) -> None:
        self._forward_context = None
        if self._reporter is not None:
            self._reporter.begin(None)
        super().clear_connector_metadata()

    def build_connector_worker_meta(self) -> PullWorkerReport | None:
        ended = self._take_ended()
        if self._ended_by_sleep:
            ended, self._ended_by_sleep = [*self._ended_by_sleep, *ended], []
        card, self._new_card = self._new_card, None
        lost_links = set(self._links.take_lost()) if self._links is not None and self._links.lost else set()
        bound = self._connector_metadata
        is_wanted = isinstance(bound, PullMetadata) and bound.wants_report
        if not ended and not lost_links and not is_wanted and card is None:
            return None
        return PullWorkerReport(
            rank=self._rank,
            step=bound.step if isinstance(bound, PullMetadata) else 0,
            ended=set(ended),
            lost_links=lost_links or None,
            card=card,
        )

    def _take_ended(self) -> list[ReadEnd]:
        ended = self._links.take_ended() if self._links is not None else []
        return ended if self.mirror is None else [self._landed(end, self.mirror) for end in ended]

    def _landed(self, end: ReadEnd, mirror: HostMirror) -> ReadEnd:
        """Copies a read to the device too; only then it has ended."""
        try:
            if end.ok:
                mirror.load(end.claim)
        except Exception as error:  # The border of one read: it ends as failed, the rank goes on.
            logger.exception("could not copy to the device what was read")
            end = msgspec.structs.replace(end, ok=False, error=f"{type(error).__name__}: {error}")
        assert self._links is not None
        if not self._links.is_open(end.claim):
            mirror.forget(end.claim)
        return end

    def shutdown(self) -> None:
        if self._reporter is not None:
            self._reporter.close(self._identity.settings.shutdown_timeout_s)
        if self._links is not None:
            self._links.close()
        self._background.close(self._identity.settings.shutdown_timeout_s)
        for transport in self._transports.values():
            transport.close()

    def _carry_out(self, order: Order) -> None:
        links = self._links
        assert links is not None, "ordered to read before the cache was registered"
        match order:
            case MeetPeer(address, cards):
                links.meet(address, cards)
            case LosePeer(address):
                links.lose(address)
            case ReadBlocks():
                if self.mirror is not None and any(
                    pair.consumer_rank == self._identity.rank for pair in order.pairs
                ):
                    self.mirror.expect(order)
                if self._is_asleep:
                    links.fail(order, "the engine sleeps")
                else:
                    links.read(order)
            case EndReads(claim):
                links.cancel(claim)
            case ZeroDrafts(names, block_ids):
                for name in names:
                    if name in self._drafts and not self._is_asleep:  # Else another pipeline stage has it.
                        group, cache = self._drafts[name]
                        cache[list(block_ids[group])] = 0
            case FailedLoad(request_id, block_ids):
                self._note_end(request_id, block_ids)
            case _:
                assert_never(order)

    def _carry_out_contained(self, order: Order) -> None:
        """Whatever goes wrong, each read that the scheduler half has ordered gets an end."""
        try:
            self._carry_out(order)
        except Exception as error:  # A bug of ours costs this order.
            logger.exception("could not carry out %s", type(order).__name__)
            if isinstance(order, ReadBlocks) and self._links is not None:
                self._links.fail(order, f"{type(error).__name__}: {error}")

    def _make_transports(self, names: Sequence[str], address: Address) -> Mapping[str, Transport]:
        return make_transports(
            names,
            address=address,
            secret=self._identity.secret,
            tcp=self._identity.settings.tcp_options(self._identity.rank),
            on_completion=self._wake_host,
        )

    def _run_and_wake(self, job: Callable[[], None]) -> None:
        """Runs the job in the background. A step sees how it ended."""

        def run() -> None:
            try:
                job()
            finally:
                self._wake_host()

        (self._given_run_in_background or self._background.run)(run)

    def _wake_host(self) -> None:
        """Tell the host that a step would find the end of a read. On any thread."""
        if self._wake is not None:
            self._wake()
