"""The ranks of one engine in one process: KV tensors, hooks in their real order, the model of `arithmetic`.

Besides computing they watch the memory: whatever changes in it is the model's own write or lies in a block of
an open load. And what the scheduler half sends reaches them as another process would get it, pickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Container
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from baton.contract import KVConnectorHandshakeMetadata, KVConnectorOutput, KVOutputAggregator
from baton.core.config import EngineConfig
from baton.core.topology import kv_heads_of
from baton.engine.cache_setup import allocate_for, register
from baton.engine.connector_step import ConnectorStep
from baton.engine.executor import Executor, done
from baton.engine.forward_context import AttentionMetadata, ForwardContext, build_attention_metadata
from baton.engine.models.parallel import TensorParallelGroup
from baton.engine.step import ModelRunnerOutput, SchedulerOutput
from baton.testing.contract.arithmetic import GARBAGE, POISON, kv_values, next_token, states_of
from baton.testing.contract.envelopes import RankNotes, WatchedReport
from baton.testing.contract.ledger import Ledger
from baton.testing.contract.watched_worker import WatchedWorker

FRESH = -1.0  # What memory holds before anybody has written to it.


class _Place(TensorParallelGroup):
    """Which slice of the cache a rank has; nothing is computed together."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the kit's model needs no collectives")

    all_gather = all_reduce  # type: ignore[assignment]


@dataclass(slots=True)
class _Row:
    prompt: list[int]
    tokens: list[int]
    block_ids: list[int]
    num_computed: int = 0


@dataclass(slots=True)
class Wrong:
    """The first byte that a request would have computed on and that is not its own."""

    request_id: str
    position: int
    block_id: int
    layer: int
    rank: int
    salt: str | None = None  # Of the request to which the bytes belong, if they belong to one.
    is_of_other_salt: bool = False
    is_unwritten: bool = False

    def __str__(self) -> str:
        slot = f"block {self.block_id}, layer {self.layer}, rank {self.rank}"
        place = f"token {self.position} of {self.request_id} ({slot})"
        if self.is_of_other_salt:
            return f"{place} has the KV of the same tokens under salt {self.salt!r}"
        return f"{place} has {'nothing' if self.is_unwritten else 'other KV than its tokens give'}"


class KitRanks(Executor):
    def __init__(
        self,
        config: EngineConfig,
        make_worker: Callable[[EngineConfig, int], WatchedWorker],
        ledger: Ledger,
        salts: dict[str, str | None],
    ) -> None:
        """`salts`: of every request, by id; ranks need it because their KV depends on it."""
        self.first_wrong: Wrong | None = None
        self._ledger = ledger
        self._salts = salts
        self._block = config.cache_config.block_size
        self._size = config.parallel_config.tensor_parallel_size
        self._hidden_size = config.model_config.hidden_size
        self._heads: list[range] = []
        self.workers: list[WatchedWorker] = []
        self._caches: list[dict[str, torch.Tensor]] = []
        self._shadows: list[list[torch.Tensor]] = []  # What the caches have to hold.
        self._rows: dict[str, _Row] = {}
        self._aggregator = KVOutputAggregator(self._size)
        model = config.model_config
        try:
            for rank in range(self._size):
                worker = make_worker(config, rank)
                self.workers.append(worker)
                caches = allocate_for(worker, config, _Place(rank, self._size), torch.device("cpu"))
                for cache in caches.values():
                    cache.fill_(FRESH)
                register(worker, caches, config.cache_config.num_gpu_blocks)
                self._caches.append(caches)
                self._shadows.append([cache.clone() for cache in caches.values()])
                self._heads.append(kv_heads_of(rank, tp_size=self._size, num_kv_heads=model.num_kv_heads))
        except BaseException:
            self.shutdown()
            raise

    def handshake_metadata(self) -> dict[int, KVConnectorHandshakeMetadata]:
        answers = {rank: worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        return {rank: answer for rank, answer in answers.items() if answer is not None}

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        return all([worker.bind_wake(wake) for worker in self.workers])

    def expect_reports(self, expected_count: int | None) -> None:
        self._aggregator = KVOutputAggregator(expected_count or self._size, self._size)

    def forget_all_but(self, request_ids: Container[str]) -> None:
        self._aggregator.forget_all_but(request_ids)

    def check_alive(self) -> None:
        return

    def shutdown(self) -> None:
        for worker in self.workers:
            worker.shutdown()

    # --- One step ----------------------------------------------------------------------------------

    def submit(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        return done(self._run(scheduler_output))

    def _run(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self.check_memory("between two steps")
        self._take_over(scheduler_output)
        result = ModelRunnerOutput()
        poisoned: set[str] = set()
        reports: list[KVConnectorOutput | None] = []
        for rank, worker in enumerate(self.workers):
            told = replace(
                scheduler_output,
                kv_connector_metadata=pickle.loads(pickle.dumps(scheduler_output.kv_connector_metadata)),
            )
            context = ForwardContext(kv_caches=self._caches[rank])
            with ConnectorStep(worker, told, context, self._block) as step:
                if scheduler_output.num_scheduled_tokens:
                    poisoned |= self._forward(rank, scheduler_output, context)
            reports.append(None if step.report.is_empty() else step.report)
            result.connector_error = result.connector_error or step.error
            result.loads_failed = result.loads_failed or step.loads_failed
        result.kv_connector_output = self._aggregator.aggregate(pickle.loads(pickle.dumps(reports)))
        self._sample(scheduler_output, poisoned, result)
        self.check_memory("in a step")
        return result

    def dummy_run(self, metadata: object, *, shows_hooks: bool) -> list[RankNotes]:
        """Warm-up. `shows_hooks`: as if the layer hooks were captured in a graph, with this metadata."""
        notes: list[RankNotes] = []
        for rank, worker in enumerate(self.workers):
            context = ForwardContext(kv_caches=self._caches[rank])
            empty = SchedulerOutput(kv_connector_metadata=metadata)  # type: ignore[arg-type]
            if shows_hooks:
                with ConnectorStep(worker, empty, context, self._block) as step:
                    for name, cache in self._caches[rank].items():
                        if context.worker_half is not None:
                            context.worker_half.wait_for_layer_load(name)
                            context.worker_half.save_kv_layer(name, cache, None)
                report = step.report.kv_connector_worker_meta
                notes += report.notes if isinstance(report, WatchedReport) else ()
            story = self._ledger.story
            story.check(
                "dummy-run-touched",
                not worker.has_connector_metadata(),
                f"rank {rank} has metadata outside of every step: a dummy run would call its hooks",
            )
        self.check_memory("in a dummy run", rule="dummy-run-touched")
        return notes

    def _take_over(self, output: SchedulerOutput) -> None:
        for request_id in output.finished_req_ids:
            self._rows.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            prompt = list(new.prompt_token_ids)
            self._rows[new.req_id] = _Row(
                prompt, [*prompt, *new.output_token_ids], list(new.block_ids[0]), new.num_computed_tokens
            )
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            row, blocks = self._rows[request_id], cached.new_block_ids[index]
            row.num_computed = cached.num_computed_tokens[index]
            if request_id in cached.resumed_req_ids:
                assert blocks is not None
                row.block_ids, row.tokens = list(blocks[0]), list(cached.all_token_ids[request_id])
            elif blocks is not None:
                row.block_ids += blocks[0]
            del row.tokens[len(row.prompt) + cached.num_output_tokens[index] :]  # Of a step thrown away.

    def _forward(self, rank: int, output: SchedulerOutput, context: ForwardContext) -> set[str]:
        """Returns the requests that have computed on something wrong."""
        rows = {request_id: self._rows[request_id] for request_id in output.num_scheduled_tokens}
        context.attn_metadata = build_attention_metadata(
            [row.num_computed for row in rows.values()],
            list(output.num_scheduled_tokens.values()),
            [row.block_ids for row in rows.values()],
            self._block,
        )
        poisoned: set[str] = set()
        watcher = context.watcher
        hidden_TM = self._hidden_states(context.attn_metadata)
        for layer, (name, cache) in enumerate(self._caches[rank].items()):
            if layer in context.hidden_states_wanted:
                context.show_hidden_states(layer, hidden_TM)
            if watcher is not None:
                watcher.wait_for_layer_load(name)
            for request_id, row in rows.items():
                last = row.num_computed + output.num_scheduled_tokens[request_id]
                self._write(rank, layer, cache, request_id, row, last, is_poisoned=request_id in poisoned)
            wrong = {
                request_id
                for request_id, row in rows.items()
                if self._is_wrong(
                    rank,
                    layer,
                    cache,
                    request_id,
                    row,
                    row.num_computed + output.num_scheduled_tokens[request_id],
                )
            }
            poisoned |= wrong
            if watcher is not None:
                watcher.save_kv_layer(name, cache, context.attn_metadata)
        if (num_layers := len(self._caches[rank])) in context.hidden_states_wanted:
            context.show_hidden_states(num_layers, hidden_TM)
        return poisoned

    def _hidden_states(self, metadata: AttentionMetadata) -> torch.Tensor:
        """`[T, hidden size]`: any numbers will do, the kit does not read what becomes of them."""
        return metadata.positions.float()[:, None].expand(-1, self._hidden_size).contiguous()

    def _slots(self, row: _Row, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(first, last)
        return torch.tensor(row.block_ids)[positions // self._block], positions % self._block

    def _right(self, rank: int, layer: int, cache: torch.Tensor, row: _Row, salt: str | None) -> torch.Tensor:
        return kv_values(states_of(row.tokens, salt), layer, self._heads[rank], cache.shape[-1])

    def _write(
        self,
        rank: int,
        layer: int,
        cache: torch.Tensor,
        request_id: str,
        row: _Row,
        last: int,
        *,
        is_poisoned: bool,
    ) -> None:
        blocks, offsets = self._slots(row, row.num_computed, last)
        values = self._right(rank, layer, cache, row, self._salts[request_id])[row.num_computed : last]
        if is_poisoned:
            values = torch.full_like(values, POISON)
        cache[blocks, :, offsets] = values
        self._shadows[rank][layer][blocks, :, offsets] = values

    def _is_wrong(
        self, rank: int, layer: int, cache: torch.Tensor, request_id: str, row: _Row, last: int
    ) -> bool:
        blocks, offsets = self._slots(row, 0, last)
        found = cache[blocks, :, offsets]
        salt = self._salts[request_id]
        wrong = (found != self._right(rank, layer, cache, row, salt)[:last]).flatten(1).any(1).nonzero()
        if not len(wrong):
            return False
        position = int(wrong[0])
        if self.first_wrong is None:
            self.first_wrong = Wrong(
                request_id, position, row.block_ids[position // self._block], layer, rank
            )
            self.first_wrong.is_unwritten = bool((found[position] == FRESH).all())
            for other in {*self._salts.values(), None} - {salt}:
                if torch.equal(found[position], self._right(rank, layer, cache, row, other)[position]):
                    self.first_wrong.salt, self.first_wrong.is_of_other_salt = other, True
        return True

    def _sample(self, output: SchedulerOutput, poisoned: set[str], result: ModelRunnerOutput) -> None:
        for request_id, num_new in output.num_scheduled_tokens.items():
            row = self._rows[request_id]
            sampled: list[int] = []
            if row.num_computed + num_new == len(row.tokens):
                state = states_of(row.tokens, self._salts[request_id])[-1]
                sampled = [GARBAGE if request_id in poisoned else next_token(state)]
                row.tokens += sampled
            result.req_ids.append(request_id)
            result.sampled_token_ids.append(sampled)

    # --- Memory ------------------------------------------------------------------------------------

    def check_memory(self, when: str, rule: str = "wrote-outside-load") -> None:
        """Take over what loads have written; nobody else may have written anything."""
        allowed = self._ledger.writable_blocks()
        for rank, caches in enumerate(self._caches):
            for (name, cache), shadow in zip(caches.items(), self._shadows[rank], strict=True):
                if torch.equal(cache, shadow):
                    continue
                changed = set((cache != shadow).flatten(1).any(1).nonzero().flatten().tolist())
                strays = sorted(changed - allowed)
                self._ledger.story.check(
                    rule,
                    not strays,
                    f"{when}, blocks {strays} of {name} on rank {rank} changed; no load fills them",
                )
                shadow.copy_(cache)
        self._ledger.story.checked[rule] += 1
