"""Ranks of one engine in one process: KV tensors, hooks in their real order, the model of `arithmetic`.

They check memory: each changed byte is the model's own write or in a block of an open load. The scheduler
half's metadata reaches them pickled, as it would reach another process.
"""

import pickle
from collections.abc import Callable, Container
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import torch

from baton.contract import KVConnectorHandshakeMetadata, KVConnectorOutput
from baton.core.config import EngineConfig
from baton.core.kv_groups import index_layer_name, layer_name, places_of
from baton.core.layout import kv_heads_of
from baton.engine.attention.kv_memory import attention_layers
from baton.engine.executor import Executor, done
from baton.engine.forward_context import AttentionMetadata, ForwardContext, build_attention_metadata
from baton.engine.models.parallel import TensorParallelGroup
from baton.engine.runner.cache_setup import allocate_for, register
from baton.engine.runner.connector_step import ConnectorStep
from baton.engine.step import ModelRunnerOutput, SchedulerOutput
from baton.testing.contract.arithmetic import GARBAGE, POISON, kv_values, next_token, states_of
from baton.testing.contract.envelopes import RankNotes, WatchedMetadata, WatchedReport
from baton.testing.contract.ledger import Ledger
from baton.testing.contract.provenance import Provenance, Slot, Wrong
from baton.testing.contract.story import why
from baton.testing.contract.watched_memory import WatchedMemory
from baton.testing.contract.watched_worker import WatchedWorker
from baton.testing.host.rows import Row, Rows


class _RankInGroup(TensorParallelGroup):
    """A rank's position, which gives its slice of the cache; it has no collectives."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the kit's model needs no collectives")


class KitRanks(Executor):
    def __init__(
        self,
        config: EngineConfig,
        make_worker: Callable[[EngineConfig, int], WatchedWorker],
        ledger: Ledger,
        salts: dict[str, str | None],
    ) -> None:
        """`salts`: the salt of every request, by id; the KV depends on it."""
        super().__init__(config.parallel_config.tensor_parallel_size)
        self.wrongs: dict[str, Wrong] = {}  # Per request id, the first wrong slot.
        self._ledger = ledger
        assert config.kv_transfer_config is not None
        self._name = config.kv_transfer_config.engine_id or ""
        self._block = config.cache_config.block_size
        self._num_blocks = config.cache_config.num_gpu_blocks
        self._hidden_size = config.model_config.hidden_size
        self._groups = config.kv_cache_groups
        # Names and groups of all caches: of each layer, and then of its index keys, if it has some.
        of_layer = [index for _, (index, _) in sorted(places_of(self._groups).items())]
        name_of = (layer_name, index_layer_name) if config.model_config.index_size else (layer_name,)
        self._names = [name(layer) for layer in range(len(of_layer)) for name in name_of]
        self._per_layer = len(name_of)
        self._group_of = [group for group in of_layer for _ in range(self._per_layer)]
        windows = config.model_config.windows or (None,) * len(of_layer)
        self._windows = [window for window in windows for _ in range(self._per_layer)]
        depth = config.parallel_config.max_concurrent_batches
        self._provenance = Provenance(salts, depth)
        self._rows = Rows(salts, runs_ahead=depth > 1)
        self.workers: list[WatchedWorker] = []
        self._memories: list[WatchedMemory] = []
        model = config.model_config
        try:
            for rank in range(self._num_ranks):
                worker = make_worker(config, rank)
                self.workers.append(worker)
                group = _RankInGroup(rank, self._num_ranks)
                caches = allocate_for(worker, config, group, torch.device("cpu"))
                assert [*caches] == self._names
                heads = kv_heads_of(rank, tp_size=self._num_ranks, num_kv_heads=model.num_kv_heads)
                memory = WatchedMemory(rank, heads, caches, partial(self._note_write_fault, worker))
                self._memories.append(memory)
                register(worker, memory.shown, config.cache_config.num_gpu_blocks)
        except BaseException:
            self.shutdown()
            raise

    def handshake_metadata(self) -> dict[int, KVConnectorHandshakeMetadata]:
        answers = {rank: worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        return {rank: answer for rank, answer in answers.items() if answer is not None}

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        return all([worker.bind_wake(wake) for worker in self.workers])

    def shutdown(self) -> None:
        for worker in self.workers:
            worker.shutdown()

    # --- One step ----------------------------------------------------------------------------------

    def submit(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        return done(self._run(scheduler_output))

    def _run(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self._begin_loads(scheduler_output)
        self.check_memory("between two steps")
        self._take_over(scheduler_output)
        result = ModelRunnerOutput()
        wrongs: dict[str, Wrong] = {}
        reports: list[KVConnectorOutput | None] = []
        for memory, worker in zip(self._memories, self.workers, strict=True):
            received = replace(
                scheduler_output,
                kv_connector_metadata=pickle.loads(pickle.dumps(scheduler_output.kv_connector_metadata)),
            )
            layers = attention_layers(memory.shown, self._num_blocks, self._groups)
            context = ForwardContext(kv_caches=memory.shown, layers=layers)
            if scheduler_output.num_scheduled_tokens:
                metadata = self._attention_metadata(scheduler_output)
                context.attn_metadata = metadata[0]
                context.group_metadata = tuple(metadata) if len(metadata) > 1 else ()
            with ConnectorStep(worker, received, context, self._block) as step:
                if scheduler_output.num_scheduled_tokens:
                    wrongs |= self._forward(memory, scheduler_output, context)
            self._send_notes(step.report)
            reports.append(step.report)
            result.connector_error = result.connector_error or step.error
            result.loads_failed = result.loads_failed or step.loads_failed
        self.check_memory("in a step")
        report = self._aggregator.aggregate(pickle.loads(pickle.dumps(reports)))
        if report is not None:
            self._ledger.note_landed(report.finished_recving or ())
        self._provenance.end_step(wrongs.values(), report.invalid_block_ids if report is not None else set())
        for request_id, wrong in wrongs.items():
            self.wrongs.setdefault(request_id, wrong)
        result.kv_connector_output = report
        self._sample(scheduler_output, wrongs, result)
        return result

    def _begin_loads(self, output: SchedulerOutput) -> None:
        metadata = output.kv_connector_metadata
        if isinstance(metadata, WatchedMetadata) and metadata.opened_loads:
            block_ids = self._ledger.blocks_of_loads(metadata.opened_loads)
            for memory in self._memories:
                memory.expect_load(block_ids)

    def _send_notes(self, report: KVConnectorOutput | None) -> None:
        """Pass the notes on at once: with steps in flight, the scheduler gets this report later."""
        watched = report.kv_connector_worker_meta if report is not None else None
        if isinstance(watched, WatchedReport):
            for notes in watched.notes:
                self._ledger.take_notes(self._name, notes)
            watched.notes = ()

    def dummy_run(self, metadata: object, *, shows_hooks: bool) -> list[RankNotes]:
        """Run a warm-up. `shows_hooks`: call the layer hooks with this metadata, as a graph capture would."""
        notes: list[RankNotes] = []
        for memory, worker in zip(self._memories, self.workers, strict=True):
            context = ForwardContext(kv_caches=memory.caches)
            empty = SchedulerOutput(kv_connector_metadata=metadata)  # type: ignore[arg-type]
            if shows_hooks:
                with ConnectorStep(worker, empty, context, self._block) as step:
                    for name, cache in memory.caches.items():
                        if context.worker_half is not None:
                            context.worker_half.wait_for_layer_load(name)
                            context.worker_half.save_kv_layer(name, cache, None)
                report = step.report.kv_connector_worker_meta if step.report is not None else None
                notes += report.notes if isinstance(report, WatchedReport) else ()
            self._ledger.story.check(
                "dummy-run-touched",
                not worker.has_connector_metadata(),
                f"rank {memory.rank} has metadata outside of every step: a dummy run would call its hooks",
            )
        self.check_memory("in a dummy run", rule="dummy-run-touched")
        return notes

    def _take_over(self, output: SchedulerOutput) -> None:
        for request_id in output.preempted_req_ids:
            if (row := self._rows.get(request_id)) is not None:
                self._give_up(row)
        self._rows.take_over(output)

    def _give_up(self, row: Row) -> None:
        for position, state in enumerate(_states(row)):
            for group, table in zip(self._groups, row.tables, strict=True):
                if group.is_state and position != row.num_computed - 1:
                    continue
                if position // self._block < len(table):
                    self._provenance.note_given_up(table[position // self._block], state)

    def _attention_metadata(self, output: SchedulerOutput) -> list[AttentionMetadata]:
        """Return the metadata of each cache group."""
        rows = [self._rows[request_id] for request_id in output.num_scheduled_tokens]
        return [
            build_attention_metadata(
                [row.num_computed for row in rows],
                list(output.num_scheduled_tokens.values()),
                [row.tables[group] for row in rows],
                self._block,
            )
            for group in range(len(self._groups))
        ]

    def _forward(
        self, memory: WatchedMemory, output: SchedulerOutput, context: ForwardContext
    ) -> dict[str, Wrong]:
        """Return the first wrong slot of each request that has one, by request id."""
        rows = [self._rows[request_id] for request_id in output.num_scheduled_tokens]
        ends = [row.num_computed + output.num_scheduled_tokens[row.request_id] for row in rows]
        wrongs: dict[str, Wrong] = {}
        watcher = context.watcher
        assert context.attn_metadata is not None
        hidden_TM = self._hidden_states(context.attn_metadata)
        for layer, (name, cache) in enumerate(memory.shown.items()):
            number, of_index = divmod(layer, self._per_layer)
            if not of_index and number in context.hidden_states_wanted:
                context.show_hidden_states(number, hidden_TM)
            if watcher is not None:
                watcher.wait_for_layer_load(name)
            is_state = self._groups[self._group_of[layer]].is_state
            if is_state:  # The step reads it, and then writes another, maybe in the same place.
                self._look_for_wrong(memory, layer, rows, [row.num_computed for row in rows], wrongs)
            for row, last in zip(rows, ends, strict=True):
                write = self._write_state if is_state else self._write
                write(memory, layer, row, last, is_poisoned=row.request_id in wrongs)
            if not is_state:
                self._look_for_wrong(memory, layer, rows, ends, wrongs)
            if watcher is not None:
                watcher.save_kv_layer(name, cache, context.metadata_of(self._group_of[layer]))
        if (num_layers := len(memory.caches) // self._per_layer) in context.hidden_states_wanted:
            context.show_hidden_states(num_layers, hidden_TM)
        return wrongs

    def _look_for_wrong(
        self, memory: WatchedMemory, layer: int, rows: list[Row], ends: list[int], wrongs: dict[str, Wrong]
    ) -> None:
        """Add the first wrong slot before `ends` of each request that has none yet."""
        for row, last in zip(rows, ends, strict=True):
            if row.request_id not in wrongs:
                wrong = self._find_wrong(memory, layer, row, last)
                if wrong is not None:
                    wrongs[row.request_id] = wrong

    def _hidden_states(self, metadata: AttentionMetadata) -> torch.Tensor:
        """Return `[T, hidden size]` of arbitrary numbers; the kit does not read what is done with them."""
        return metadata.positions.float()[:, None].expand(-1, self._hidden_size).contiguous()

    def _slots(self, row: Row, layer: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (blocks, offsets) of the tokens in [first, last)."""
        positions = torch.arange(first, last)
        table = torch.tensor(row.tables[self._group_of[layer]])
        return table[positions // self._block], positions % self._block

    def _write(self, memory: WatchedMemory, layer: int, row: Row, last: int, *, is_poisoned: bool) -> None:
        name = self._names[layer]
        blocks, offsets = self._slots(row, layer, row.num_computed, last)
        states = _states(row)[row.num_computed : last]
        values = kv_values(states, layer, memory.heads, memory.caches[name].shape[-1])
        memory.write(name, blocks, offsets, torch.full_like(values, POISON) if is_poisoned else values)
        for block_id, state in zip(blocks.tolist(), states, strict=True):
            self._provenance.note_written(block_id, state)

    def _write_state(
        self, memory: WatchedMemory, layer: int, row: Row, last: int, *, is_poisoned: bool
    ) -> None:
        """Write the state after `last` tokens."""
        block_id = row.tables[self._group_of[layer]][(last - 1) // self._block]
        state, name = _states(row)[last - 1], self._names[layer]
        values = kv_values((state,), layer, memory.heads, memory.caches[name].shape[-1])[0]
        memory.write_state(name, block_id, torch.full_like(values, POISON) if is_poisoned else values)
        self._provenance.note_written(block_id, state)

    def _find_wrong(self, memory: WatchedMemory, layer: int, row: Row, last: int) -> Wrong | None:
        """Find the first wrong slot that this step's tokens attend to. Slots before the window are not
        checked. A recurrent state is checked after `last` tokens, where the step begins.
        """
        window, name = self._windows[layer], self._names[layer]
        first = 0 if window is None else max(0, row.num_computed - window + 1)
        is_state = self._groups[self._group_of[layer]].is_state
        if is_state:
            first = max(0, last - 1)
        cache = memory.caches[name]
        blocks, offsets = self._slots(row, layer, first, last)
        found = cache[blocks] if is_state else cache[blocks, :, offsets]
        states = _states(row)[first:last]
        right = kv_values(states, layer, memory.heads, cache.shape[-1])
        if torch.equal(found, right):
            return None
        index = int((found != right).flatten(1).any(1).nonzero()[0])
        block_id = int(blocks[index])
        slot = Slot(row.request_id, first + index, block_id, layer, memory.rank, states[index])
        wrong = self._provenance.explain(
            slot, found[index], memory.heads, row.tokens, is_unfilled=memory.is_unfilled(name, block_id)
        )
        wrong.is_faulted = block_id in self._ledger.faulted_blocks
        return wrong

    def _sample(self, output: SchedulerOutput, poisoned: Container[str], result: ModelRunnerOutput) -> None:
        for request_id, num_new in output.num_scheduled_tokens.items():
            row = self._rows[request_id]
            sampled: list[int] = []
            if row.num_computed + num_new == len(row.tokens):
                sampled = [GARBAGE if request_id in poisoned else next_token(_states(row)[-1])]
                row.tokens += sampled
            result.req_ids.append(request_id)
            result.sampled_token_ids.append(sampled)

    # --- Failing writes ----------------------------------------------------------------------------

    def fail_next_write(self, rank: int) -> None:
        """Make the next write of the connector into the KV cache of `rank` (modulo the ranks) fail."""
        self._memories[rank % self._num_ranks].write_fault.arm()

    def _note_write_fault(self, worker: WatchedWorker) -> None:
        worker.has_write_fault = True
        self._ledger.note_write_fault()
        self._ledger.story.seen["failed writes"] += 1
        self._ledger.story.record_line(f"{self._name}: a write into the KV cache of rank {worker.rank} fails")

    # --- Sleep -------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Sleep and wake up: the memory of the caches loses its content between the two hooks."""
        self.check_memory("before a sleep")
        self._call_twice("unregister_kv_caches")
        for memory in self._memories:
            memory.lose_content()
        self._call_twice("restore_kv_caches")
        self.check_memory("after a sleep")

    def _call_twice(self, hook: str) -> None:
        """The hooks of sleep are idempotent. None may fail where no block is held."""
        for worker in [*self.workers, *self.workers]:
            try:
                getattr(worker, hook)()
            except Exception as error:  # The exception is the breach.
                self._ledger.story.check("raised", False, f"rank {worker.rank}: {hook} raised {why(error)}")
                raise

    # --- Memory ------------------------------------------------------------------------------------

    def check_memory(self, when: str, rule: str = "wrote-outside-load") -> None:
        """Take over what loads have written, and check that nothing else changed."""
        allowed = self._ledger.writable_blocks()
        for memory in self._memories:

            def check(layer: str, changed: set[int], rank: int = memory.rank) -> None:
                strays = sorted(changed - allowed)
                detail = f"{when}, blocks {strays} of {layer} on rank {rank} changed; no load fills them"
                self._ledger.story.check(rule, not strays, detail)

            memory.take_over(check)
        self._ledger.story.checked[rule] += 1


def _states(row: Row) -> tuple[int, ...]:
    return states_of(row.tokens, row.salt)
