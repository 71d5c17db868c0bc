"""The host's engine with a connector of prescribed behaviour, which fills the blocks of its loads itself."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from baton.contract import KVConnectorMetadata, KVConnectorOutput, KVConnectorSchedulerHalf, SupportsHMA
from baton.contract.null import NullConnectorMetadata
from baton.core.config import (
    CacheConfig,
    EngineConfig,
    KVEventsConfig,
    KVTransferConfig,
    ParallelConfig,
    SchedulerConfig,
)
from baton.core.kv_events import KVCacheEvent
from baton.core.kv_groups import is_hybrid
from baton.core.prefilled import PrefilledTokens
from baton.engine.api import EngineOutput, EngineOutputs, EngineRequest, SamplingParams, TokenLogprobs
from baton.engine.request import Request
from baton.engine.step import ModelRunnerOutput, SchedulerOutput
from baton.testing.host.config import model_config
from baton.testing.host.engine import Engine
from baton.testing.host.memory import JUNK
from baton.testing.host.model import EOS_IDS, STATE, model_of
from baton.testing.host.ranks import Ranks

BLOCK = 4
KV_HEADS = 2
Verdict = tuple[int | None, bool]


def engine_config(
    *,
    num_blocks: int = 64,
    budget: int = 64,
    max_num_seqs: int = 16,
    policy: str = "fcfs",
    chunked: bool = True,
    longest_chunk: int = 0,
    max_model_len: int = 256,
    on_failure: str = "recompute",
    caching: bool = True,
    events: bool = False,
    windows: tuple[int | None, ...] = (),
    num_ranks: int = 1,
) -> EngineConfig:
    return EngineConfig(
        model_config=model_config(
            max_model_len=max_model_len,
            num_hidden_layers=max(1, len(windows)),
            num_kv_heads=KV_HEADS,
            windows=windows,
            state_layers=tuple(layer for layer, window in enumerate(windows) if window == STATE),
        ),
        cache_config=CacheConfig(block_size=BLOCK, num_gpu_blocks=num_blocks, enable_prefix_caching=caching),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            policy=policy,  # type: ignore[arg-type]
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=longest_chunk,
        ),
        parallel_config=ParallelConfig(
            tensor_parallel_size=num_ranks, executor="multiprocess" if num_ranks > 1 else "inprocess"
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="Fake",
            kv_role="kv_both",
            kv_load_failure_policy=on_failure,  # type: ignore[arg-type]
        ),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=events),
    )


def engine_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 4,
    priority: int = 0,
    arrival_time_s: float = 0.0,
    salt: str | None = None,
    params: dict[str, Any] | None = None,
    session: str | None = None,
    given: Sequence[int] = (),
    **sampling: Any,
) -> EngineRequest:
    sampling.setdefault("ignore_eos", True)
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        output_token_ids=list(given),
        sampling_params=SamplingParams(max_tokens=max_tokens, **sampling),
        arrival_time_s=arrival_time_s,
        priority=priority,
        cache_salt=salt,
        session_id=session,
        kv_transfer_params=params,
    )


# --- Expected results ------------------------------------------------------------------


def expected_output(asked: EngineRequest, windows: tuple[int | None, ...] = ()) -> list[int]:
    """The output of a single engine with a large pool."""
    model, params = model_of(KV_HEADS, windows or (None,)), asked.sampling_params
    stops = params.stop_token_ids if params.ignore_eos else (*EOS_IDS, *params.stop_token_ids)
    output: list[int] = []
    for token_id in islice(model.tokens_after(asked.prompt_token_ids, asked.cache_salt), params.max_tokens):
        output.append(token_id)
        if token_id in stops and len(output) >= params.min_tokens:
            break
    return output


def prefilled_tokens(
    asked: EngineRequest, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()
) -> PrefilledTokens:
    """The tokens that an engine would sample for the same request."""
    request = Request(asked, block_size=BLOCK, eos_token_ids=EOS_IDS)
    for token_id in token_ids:
        request.append_output_token(token_id)
    request.output_logprobs += logprobs
    tokens = request.prefilled_tokens
    assert tokens is not None
    return tokens


# --- The connector ---------------------------------------------------------------------------------


@dataclass
class FakeLoad:
    request_id: str
    tables: tuple[list[int], ...]  # The request's whole tables at the time.
    first_token: int
    num_tokens: int
    token_ids: list[int]  # The prefix that has KV after the load.
    salt: str | None

    @property
    def block_ids(self) -> list[int]:
        """Block ids of the first group, which has full attention if any group has."""
        return self.tables[0]


class FakeHalf(KVConnectorSchedulerHalf):
    """Behaves as `verdict` and `lends` define, and records its calls."""

    def __init__(self) -> None:
        self.verdict: Callable[[Any, int], Verdict] = lambda request, local: (0, False)
        self.lends: Callable[[Any, list[int]], tuple[bool, dict[str, Any] | None]] = lambda r, b: (
            False,
            None,
        )
        self.on_new: Callable[[Any], None] = lambda request: None
        self.on_alloc: Callable[[Any, int], None] = lambda request, external: None
        self.prefilled: Callable[[str], PrefilledTokens | None] = lambda request_id: None
        self.load_failure: Callable[[str], Any] = lambda request_id: None
        self.num_taken: Counter[str] = Counter()  # Calls that take prefilled tokens.
        self.on_step: Callable[[str], None] = lambda method: None  # Called in methods about no request.
        self.frees_are_pending = False
        self.has_push_work = False
        self.is_shut_down = False
        self.log: list[str] = []
        self.asked: Counter[str] = Counter()
        self.num_finished: Counter[str] = Counter()
        self.finished_blocks: dict[str, list[int]] = {}
        self.reports: list[KVConnectorOutput] = []
        self.adds_sent: set[str] = set()  # Ids for the next report: loans that the half ends itself.
        self.adds_failed: set[str] = set()
        self.arrives: set[str] = set()  # Loads that go on while their requests run; in the next report.
        self.abandons: set[str] = set()  # Loads of a child that has died; added to the next report too.
        self.loads: dict[str, FakeLoad] = {}  # Loads in the background.
        self.sync_loads: list[FakeLoad] = []  # Loads of the step that is being scheduled.
        self._is_async: dict[str, bool] = {}
        self._local: dict[str, int] = {}

    def on_new_request(self, request: Any) -> None:
        self.log.append(f"new {request.request_id}")
        self.on_new(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Verdict:
        assert request.num_computed_tokens == 0
        assert num_computed_tokens % BLOCK == 0
        self.asked[request.request_id] += 1
        verdict = self.verdict(request, num_computed_tokens)
        self._is_async[request.request_id] = verdict[1]
        self._local[request.request_id] = num_computed_tokens
        return verdict

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.log.append(f"alloc {request.request_id} {num_external_tokens}")
        self.on_alloc(request, num_external_tokens)
        if not num_external_tokens:
            return
        tables = blocks.get_block_ids()
        first = self._local[request.request_id]
        assert all(len(block_ids) * BLOCK >= first + num_external_tokens for block_ids in tables)
        load = FakeLoad(
            request.request_id,
            tables,
            first,
            num_external_tokens,
            request.all_token_ids[: first + num_external_tokens],
            request.cache_salt,
        )
        if self._is_async[request.request_id]:
            assert request.request_id not in self.loads
            self.loads[request.request_id] = load
        else:
            self.sync_loads.append(load)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        self.on_step("build_connector_meta")
        return NullConnectorMetadata()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.on_step("update_connector_output")
        self.reports.append(connector_output)
        if self.adds_sent:
            connector_output.finished_sending = (connector_output.finished_sending or set()) | self.adds_sent
            self.adds_sent = set()
        if self.adds_failed:
            connector_output.failed_recving = (connector_output.failed_recving or set()) | self.adds_failed
            self.adds_failed = set()
        connector_output.abandoned_recving |= self.abandons
        self.abandons = set()
        connector_output.arriving_recving |= self.arrives
        self.arrives = set()

    def take_prefilled_tokens(self, request_id: str) -> PrefilledTokens | None:
        self.num_taken[request_id] += 1
        return self.prefilled(request_id)

    def get_load_failure(self, request_id: str) -> str | None:
        assert request_id not in self.num_finished, "called for a finished request"
        reason: str | None = self.load_failure(request_id)
        return reason

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert request.status.name.startswith("FINISHED_")
        self.log.append(f"finished {request.request_id} {request.status.name}")
        self.num_finished[request.request_id] += 1
        self.finished_blocks[request.request_id] = block_ids
        return self.lends(request, block_ids)

    def take_events(self) -> list[KVCacheEvent]:
        self.on_step("take_events")
        return []

    def get_kv_connector_stats(self) -> None:
        self.on_step("get_kv_connector_stats")

    def has_pending_block_frees(self) -> bool:
        self.on_step("has_pending_block_frees")
        return self.frees_are_pending

    def has_pending_push_work(self) -> bool:
        self.on_step("has_pending_push_work")
        return self.has_push_work

    def shutdown(self) -> None:
        self.is_shut_down = True


class FakeHalfOfGroups(FakeHalf, SupportsHMA):
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Calls `lends` with one list, without null blocks."""
        return self.request_finished(
            request, [block_id for table in block_ids for block_id in table if block_id]
        )


# --- The world -------------------------------------------------------------------------------------


class World(Engine):
    def __init__(self, config: EngineConfig | None = None, *, depth: int = 1, **kwargs: Any) -> None:
        config = config if config is not None else engine_config(**kwargs)
        groups = config.kv_cache_groups
        self.half = FakeHalfOfGroups() if is_hybrid(groups) else FakeHalf()
        self.ranks = Ranks(config)
        super().__init__(config, self.half, self.ranks.salts, depth=depth)
        self.null_blocks = {0} if is_hybrid(groups) else set()
        self.report = KVConnectorOutput()  # The report of the next step.
        self.error: str | None = None  # The error that a worker half raises in the next step.
        self.bad_sync_blocks: Callable[[FakeLoad], set[int]] = lambda load: set()
        self.other_holders: list[int] = []  # Blocks that the test itself holds.
        self.steps: list[SchedulerOutput] = []
        self.outputs: list[EngineOutputs] = []

    def add(self, request_id: str, prompt: Sequence[int], **kwargs: Any) -> EngineRequest:
        asked = engine_request(request_id, prompt, **kwargs)
        self.add_request(asked)
        return asked

    def schedule(self) -> SchedulerOutput:
        busy = {request_id for output, _ in self.in_flight for request_id in output.num_scheduled_tokens}
        output = super().schedule()
        self.steps.append(output)
        assert output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens.values())
        assert output.total_num_scheduled_tokens <= self.config.scheduler_config.max_num_batched_tokens
        assert not busy & set(output.num_scheduled_tokens), "a request has one step in flight at most"
        assert not busy & output.preempted_req_ids
        self.assert_fenced()
        return output

    def begin(self, output: SchedulerOutput) -> tuple[list[FakeLoad], dict[str, set[int]]]:
        """Return the synchronous loads of the step, and the blocks that it writes, by request."""
        loads, self.half.sync_loads = self.half.sync_loads, []
        assert output.has_sync_kv_loads == bool(loads)
        return loads, self._written_by(output)

    def _written_by(self, output: SchedulerOutput) -> dict[str, set[int]]:
        written = {}
        for request_id, num_new in output.num_scheduled_tokens.items():
            last = self.scheduler.requests[request_id].num_computed_tokens
            first, end = (last - num_new) // BLOCK, -(-last // BLOCK)
            held = self.scheduler.kv_cache.blocks_between(request_id, first, end)
            written[request_id] = {block_id for _, block_id in held}
        return written

    def assert_fenced(self) -> None:
        """Check that blocks that a step in flight writes are held by its request, and by no load."""
        loading = {
            block_id
            for load in self.half.loads.values()
            for table in load.tables
            for block_id in table[load.first_token // BLOCK :]
        } - self.null_blocks
        for _, (_, written) in self.in_flight:
            for request_id, block_ids in written.items():
                held = self.scheduler.kv_cache.blocks_between(request_id, 0, sys.maxsize)
                assert block_ids <= {block_id for _, block_id in held}, "freed while a step writes it"
                assert not loading & block_ids

    def finish(self, output: SchedulerOutput, begun: Any) -> ModelRunnerOutput:
        loads, _ = begun
        self.ranks.take_over(output)
        report, self.report = self.report, KVConnectorOutput()
        for load in loads if output.kv_connector_metadata is not None else ():
            bad = self.bad_sync_blocks(load)
            self.fill(load, bad)
            report.invalid_block_ids |= bad
        result = self.ranks.execute(output)
        result.kv_connector_output = None if report.is_empty() else report
        result.connector_error, self.error = self.error, None
        return result

    def finish_oldest(self) -> EngineOutputs:
        outputs = super().finish_oldest()
        self.outputs.append(outputs)
        self.scheduler.kv_cache.assert_consistent(self.other_holders)
        self.assert_fenced()
        return outputs

    def fill(self, load: FakeLoad, bad_blocks: set[int]) -> None:
        kv = self.ranks.model.kv(load.token_ids, load.salt, self.ranks.weights)
        self.ranks.write(load.tables, load.first_token, kv[load.first_token :])
        first = load.first_token // BLOCK
        self.spoil(bad_blocks & {block_id for table in load.tables for block_id in table[first:]})

    def spoil(self, block_ids: Iterable[int]) -> None:
        for memory in self.ranks.memories:
            memory.words[list(block_ids)] = JUNK

    def spoil_all(self) -> None:
        self.spoil(range(self.config.cache_config.num_gpu_blocks))

    def content(self, block_ids: Iterable[int]) -> list[bytes]:
        return [memory.words[list(block_ids)].tobytes() for memory in self.ranks.memories]

    def end_load(
        self,
        request_id: str,
        *,
        bad_indices: set[int] | None = None,
        bad_group: int = 0,
        failed: bool = False,
    ) -> None:
        """Let the next step report the load. `bad_indices`: into the request's table of `bad_group`."""
        load = self.half.loads.pop(request_id)
        still = self.scheduler.kv_cache.get_block_ids(request_id)
        held = tuple(ids[: len(then)] for ids, then in zip(still, load.tables, strict=True))
        assert held == load.tables, "blocks were freed while a load could write to them"
        bad = {load.tables[bad_group][i] for i in bad_indices or ()} - self.null_blocks
        self.fill(load, {b for table in load.tables for b in table} if failed else bad)
        self.report.invalid_block_ids |= bad
        if failed:
            self.report.failed_recving = (self.report.failed_recving or set()) | {request_id}
        self.report.finished_recving = (self.report.finished_recving or set()) | {request_id}

    def end_send(self, *request_ids: str) -> None:
        self.report.finished_sending = (self.report.finished_sending or set()) | set(request_ids)

    def status(self, request_id: str) -> str:
        return self.scheduler.requests[request_id].status.name

    def last_of(self, request_id: str) -> EngineOutput:
        last = self.answers[request_id].last
        assert last is not None, f"{request_id} has not ended"
        return last

    def expected_output(self, request_id: str) -> list[int]:
        return expected_output(self.answers[request_id].asked, self.config.model_config.windows)

    def check_answer(self, request_id: str, reason: str = "length") -> None:
        answer = self.answers[request_id]
        assert answer.reason == reason, answer
        expected = self.expected_output(request_id)
        if reason in ("abort", "error"):
            expected = expected[: len(answer.token_ids)]
        assert answer.token_ids == expected

    def end(self, *answered: str, reason: str = "length") -> None:
        """Run until nothing is left to do, then check that and the answers of these requests."""
        self.run()
        for request_id in answered:
            self.check_answer(request_id, reason)
        self.check_at_rest()

    def check_at_rest(self) -> None:
        scheduler = self.scheduler
        assert not scheduler.has_requests()
        assert not scheduler.has_unfinished_requests()
        assert not self.in_flight
        assert not scheduler.in_flight
        assert not scheduler.requests
        assert not scheduler.queues
        assert scheduler.remote.num_loading == scheduler.remote.num_held == 0
        assert not self.half.loads
        scheduler.kv_cache.assert_empty()
        assert set(self.half.num_finished) == set(self.answers)
        assert set(self.half.num_finished.values()) <= {1}
        assert all(answer.reason is not None for answer in self.answers.values())
