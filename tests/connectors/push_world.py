"""Engines that prefill in chunks while somebody reads along: the pull world with push halves and real steps.

A prefill here is a host's: it takes blocks, is computed chunk by chunk and layer by layer, and
ends. Everything else is as in the pull world.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from baton.connectors.pull import PullSchedulerHalf, PullWorkerHalf
from baton.connectors.push import PrefillAnnouncer, PushIdentity
from baton.core.config import EngineConfig
from baton.core.ids import Epoch
from baton.engine.request import RequestStatus
from baton.engine.step import SchedulerOutput
from tests.connectors.prefills_world import first_step, joined, later_step
from tests.connectors.pull_world import (
    BLOCK,
    LAYERS,
    Engine,
    FakeBlocks,
    FakeRequest,
    Station,
    World,
)


@dataclass
class Prefill:
    request: FakeRequest
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    is_known: bool = False  # The ranks know the request.


class PushEngine(Engine):
    def __init__(self, world: World, config: EngineConfig, url: str, epoch: Epoch) -> None:
        self.prefills: dict[str, Prefill] = {}
        self.chunks: dict[str, int] = {}  # Tokens to compute in the next step, by request.
        self.finished: dict[str, dict[str, Any] | None] = {}  # Params of each prefill's answer.
        self.on_layer: Callable[[int], None] | None = None  # Called when a layer of a step is computed.
        super().__init__(world, config, url, epoch)

    def make_half(self, config: EngineConfig, url: str, epoch: Epoch) -> PullSchedulerHalf:
        return PullSchedulerHalf(
            self.named(PushIdentity.of_engine(config)),
            epoch=epoch,
            clock=lambda: self.world.now,
            control=lambda agent, lock: Station(self.world, url, agent),
            announcer=PrefillAnnouncer,
        )

    def make_worker(self, config: EngineConfig, epoch: Epoch, **parts: Any) -> PullWorkerHalf:
        identity = PushIdentity.of_engine(config)
        report: Any = partial(_ReportsAtOnce, engine=self)
        return PullWorkerHalf(identity, epoch=epoch, reporter=report, **parts)

    # --- P ---------------------------------------------------------------------------------------

    def begin(
        self, request_id: str, tokens: list[int], transfer_id: str | None = "t", **request: Any
    ) -> Prefill:
        """A prefill leg arrives."""
        params: dict[str, Any] = {"do_remote_decode": True}
        if transfer_id is not None:
            params["transfer_id"] = transfer_id
        prefill = self.prefills[request_id] = Prefill(FakeRequest(request_id, tokens, params, **request))
        self.half.on_new_request(prefill.request)
        return prefill

    def schedule(self, request_id: str, num_tokens: int, *, num_cached: int = 0) -> None:
        """The next step computes so many tokens of it; at first after what the cache has."""
        prefill = self.prefills[request_id]
        if not prefill.block_ids:
            assert self.half.get_num_new_matched_tokens(prefill.request, num_cached) == (0, False)
            prefill.num_computed = num_cached
            self._grow(prefill, num_cached)
            self.write(prefill, 0, num_cached)
            self.half.update_state_after_alloc(prefill.request, FakeBlocks(prefill.block_ids), 0)
        self.chunks[request_id] = num_tokens

    def end_prefill(
        self, request_id: str, status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED
    ) -> None:
        prefill = self.prefills.pop(request_id)
        prefill.request.num_computed_tokens, prefill.request.status = prefill.num_computed, status
        is_lent, answer = self.half.request_finished(prefill.request, prefill.block_ids)
        self.finished[request_id] = answer
        if is_lent:
            self.lent[request_id] = prefill.block_ids
        else:
            self.give_back(prefill.block_ids)

    def prefill_in_chunks(self, request_id: str, *chunks: int, num_cached: int = 0) -> None:
        """A step for each; whatever can move in between moves."""
        for chunk in chunks:
            self.schedule(request_id, chunk, num_cached=num_cached)
            self.world.settle()

    def write(self, prefill: Prefill, first: int, last: int) -> None:
        kv = self.kv_of(prefill.request.prompt_token_ids[:last])
        self.ranks.write((prefill.block_ids,), first, kv[first:])

    # --- D ---------------------------------------------------------------------------------------

    def follow(
        self, request_id: str, tokens: list[int], p: PushEngine, transfer_id: str | None = "t", **request: Any
    ) -> FakeRequest:
        """A decode leg arrives: not yet admitted."""
        return self.submit(request_id, tokens, stream_params(p, transfer_id), **request)

    # --- Step ------------------------------------------------------------------------------------

    def step(self) -> bool:
        chunks, self.chunks = self.chunks, {}
        output = self._schedule(chunks)
        output.kv_connector_metadata = self.half.build_connector_meta(output)
        self.worker_steps.begin(output)
        reaches = {
            request_id: (self.prefills[request_id].num_computed, chunk)
            for request_id, chunk in chunks.items()
        }
        self._forward(reaches)
        report = self.worker_steps.end()
        for request_id, (num_computed, chunk) in reaches.items():
            self.prefills[request_id].num_computed = num_computed + chunk
        for request_id in chunks:
            prefill = self.prefills[request_id]
            if prefill.num_computed == len(prefill.request.prompt_token_ids):
                self.end_prefill(request_id)
        if report is not None:
            self.half.update_connector_output(report)
        return self._take_report(output, report) or bool(chunks)

    def _schedule(self, chunks: dict[str, int]) -> SchedulerOutput:
        steps = []
        for request_id, chunk in chunks.items():
            prefill = self.prefills[request_id]
            known = len(prefill.block_ids) if prefill.is_known else 0
            self._grow(prefill, prefill.num_computed + chunk)
            fresh, first = prefill.block_ids[known:], prefill.num_computed
            if prefill.is_known:
                steps.append(later_step(request_id, first, chunk, *([fresh] if fresh else [])))
            else:
                steps.append(first_step(request_id, first, chunk, fresh))
            prefill.is_known = True
        return joined(*steps)

    def _forward(self, reaches: dict[str, tuple[int, int]]) -> None:
        if not reaches:
            return
        self.ranks.written.clear()
        for request_id, (first, chunk) in reaches.items():
            self.write(self.prefills[request_id], first, first + chunk)
        self.ranks.hide_later_layers()
        for layer in range(LAYERS):
            self.worker_steps.show_layers(layer, layer + 1)
            if self.on_layer is not None:
                self.on_layer(layer)
            self.ranks.reveal()

    def _grow(self, prefill: Prefill, num_tokens: int) -> None:
        missing = -(-num_tokens // BLOCK) - len(prefill.block_ids)
        if missing > 0:
            prefill.block_ids += self.allocate(missing * BLOCK)

    def assert_whole(self) -> None:
        assert not self.prefills
        super().assert_whole()


class _ReportsAtOnce:
    """A LayerReporter without the wire and the thread, so that a step's order is the test's."""

    def __init__(self, tp_rank: int, engine: PushEngine) -> None:
        self._tp_rank = tp_rank
        self._engine = engine
        self._step: int | None = None

    def begin(self, order: Any) -> None:
        self._step = order.step if order is not None else None

    def layer_computed(self, layer_index: int, kv_layer: torch.Tensor) -> None:
        announcer = self._engine.half.announcer
        assert isinstance(announcer, PrefillAnnouncer)
        if self._step is not None:
            announcer.layers_done(self._tp_rank, self._step, layer_index + 1)

    def close(self, timeout_s: float) -> None:
        self._step = None


class PushWorld(World):
    engine_kind = PushEngine

    def engine(self, engine_id: str, *, stream: str = "chunk", **config: Any) -> PushEngine:
        extra = {"stream": stream, **config.pop("extra", {})}
        engine = super().engine(engine_id, extra=extra, connector="BatonPushConnector", **config)
        assert isinstance(engine, PushEngine)
        return engine

    def stream(
        self, p: PushEngine, d: PushEngine, tokens: list[int], *, num_local: int = 0, **prefill: Any
    ) -> FakeRequest:
        """Both legs of request "r" arrive, D's first."""
        request = d.follow("r", tokens, p)
        d.admit(request, num_local=num_local)
        p.begin("r", tokens, **prefill)
        return request

    def end_delivered(self, d: PushEngine, request: FakeRequest, *, is_last: bool = True) -> None:
        """The request gets its whole prompt, and ends; if it is the last one, nothing is left."""
        self.settle()
        tokens, outcome = request.prompt_token_ids, d.read_out(request)
        assert outcome.valid_tokens == len(tokens)
        assert d.holds(tokens, outcome.block_ids)
        if is_last:
            self.assert_settles_whole()


def stream_params(p: PushEngine, transfer_id: str | None) -> dict[str, Any]:
    params = {
        "do_remote_prefill": True,
        "remote_engine_id": p.config.kv_transfer_config.engine_id,  # type: ignore[union-attr]
        "baton_introduction": p.half.introduction(),
    }
    return params if transfer_id is None else {**params, "transfer_id": transfer_id}
