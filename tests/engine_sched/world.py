"""A scheduler in a small world: ranks with a verifiable "KV", and a connector with prescribed behaviour.

The KV of token i is a number that depends on tokens 0..i (and the salt), and the next token depends on it.
So a request that computes on a wrong, foreign or missing block ends with other tokens than `expected_output`.

With windows and groups, each window has its own block table, and tokens depend on the KV in the window. Block
0 is the null block then. `STATE` as a window is a layer with a recurrent state: its block holds the number of
the last computed token, and a step that begins from another number computes wrong ones.
"""

import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.contract import KVConnectorMetadata, KVConnectorOutput, KVConnectorSchedulerHalf, SupportsHMA
from baton.contract.null import NullConnectorMetadata
from baton.core.config import (
    CacheConfig,
    EngineConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
)
from baton.core.kv_events import KVCacheEvent
from baton.core.kv_groups import KVCacheGroup, is_hybrid
from baton.core.prefilled import PrefilledTokens
from baton.engine.api import EngineOutput, EngineOutputs, EngineRequest, SamplingParams, TokenLogprobs
from baton.engine.request import Request
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.step import ModelRunnerOutput, SchedulerOutput

BLOCK = 4
VOCAB = 50
EOS = 0
GARBAGE = 49  # Sampled if a rank computes on wrong KV; `next_token` never returns it.
STATE = 0
Verdict = tuple[int | None, bool]


def model_config(max_model_len: int = 256, windows: tuple[int | None, ...] = ()) -> ModelConfig:
    return ModelConfig(
        model="m",
        served_model_name="m",
        dtype="float32",
        max_model_len=max_model_len,
        num_hidden_layers=max(1, len(windows)),
        windows=windows,
        state_layers=tuple(layer for layer, window in enumerate(windows) if window == STATE),
        num_attention_heads=2,
        num_kv_heads=2,
        head_dim=4,
        hidden_size=8,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        bos_token_id=None,
        architecture_digest="a",
        weights_digest="w",
        hf_config={},
    )


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
) -> EngineConfig:
    return EngineConfig(
        model_config=model_config(max_model_len, windows),
        cache_config=CacheConfig(block_size=BLOCK, num_gpu_blocks=num_blocks, enable_prefix_caching=caching),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            policy=policy,  # type: ignore[arg-type]
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=longest_chunk,
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


def kv_of(token_ids: Sequence[int], salt: str | None = None) -> list[int]:
    """The KV of each token."""
    kv, value = [], len(salt) + 1 if salt is not None else 0  # hash() of a str differs from run to run.
    for token_id in token_ids:
        value = hash((value, token_id))
        kv.append(value)
    return kv


def next_token(kv: int) -> int:
    return kv % (VOCAB - 1)


def expected_output(asked: EngineRequest) -> list[int]:
    """The output of a single engine with a large pool."""
    tokens, params = list(asked.prompt_token_ids), asked.sampling_params
    output: list[int] = []
    while len(output) < params.max_tokens:
        output.append(next_token(kv_of(tokens, asked.cache_salt)[-1]))
        tokens.append(output[-1])
        stops = params.stop_token_ids if params.ignore_eos else (EOS, *params.stop_token_ids)
        if output[-1] in stops and len(output) >= params.min_tokens:
            break
    return output


def prefilled_tokens(
    asked: EngineRequest, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()
) -> PrefilledTokens:
    """The tokens that an engine would sample for the same request."""
    request = Request(asked, block_size=BLOCK, eos_token_ids=(EOS,))
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
    kv: list[int]

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
            kv_of(request.all_token_ids[: first + num_external_tokens], request.cache_salt),
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


# --- The ranks -------------------------------------------------------------------------------------


@dataclass
class _Row:
    prompt: list[int]
    tokens: list[int]
    tables: tuple[list[int], ...]  # Block ids, per KV-cache group.
    salt: str | None
    num_computed: int = 0


class FakeRanks:
    """Ranks that know only SchedulerOutput, as real ranks do, and the salt, which real hashes include."""

    def __init__(self, num_blocks: int, groups: Sequence[KVCacheGroup] = (KVCacheGroup(()),)) -> None:
        self.groups = groups
        self.null_blocks = {0} if is_hybrid(groups) else set()
        self.memory: list[list[int | None]] = [[None] * BLOCK for _ in range(num_blocks)]
        self.rows: dict[str, _Row] = {}
        self._wrong_states: set[str] = set()  # Requests of this step whose states are wrong after it.
        self.salts: dict[str, str | None] = {}

    def write(self, block_ids: list[int], position: int, value: int | None) -> None:
        self.memory[block_ids[position // BLOCK]][position % BLOCK] = value

    def read(self, block_ids: list[int], position: int) -> int | None:
        return self.memory[block_ids[position // BLOCK]][position % BLOCK]

    def fill(self, load: FakeLoad, bad_blocks: set[int]) -> None:
        for group, block_ids in enumerate(load.tables):
            if self.groups[group].is_state:
                last = load.first_token + load.num_tokens - 1
                block_id = block_ids[last // BLOCK]
                assert block_id not in self.null_blocks, "a state without a block"
                self._write_state(block_ids, last, None if block_id in bad_blocks else load.kv[last] + group)
                continue
            for position in range(load.first_token, load.first_token + load.num_tokens):
                block_id = block_ids[position // BLOCK]
                if block_id not in self.null_blocks:
                    value = None if block_id in bad_blocks else load.kv[position] + group
                    self.write(block_ids, position, value)

    def _write_state(self, block_ids: list[int], last: int, value: int | None) -> None:
        self.memory[block_ids[last // BLOCK]] = [value] * BLOCK

    def _begins_from_right_states(self, row: _Row, right: list[int]) -> bool:
        before = row.num_computed - 1
        return before < 0 or all(
            self.memory[block_ids[before // BLOCK]][0] == right[before] + index
            for index, (group, block_ids) in enumerate(zip(self.groups, row.tables, strict=True))
            if group.is_state
        )

    def take_over(self, output: SchedulerOutput) -> None:
        for request_id in output.finished_req_ids:
            self.rows.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.rows, "a request is new once"
            prompt = list(new.prompt_token_ids)
            self.rows[new.req_id] = _Row(
                prompt,
                [*prompt, *new.output_token_ids],
                tuple(map(list, new.block_ids)),
                self.salts[new.req_id],
                new.num_computed_tokens,
            )
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            row, new_blocks = self.rows[request_id], cached.new_block_ids[index]
            row.num_computed = cached.num_computed_tokens[index]
            if request_id in cached.resumed_req_ids:
                assert new_blocks is not None
                row.tables = tuple(map(list, new_blocks))
                row.tokens = list(cached.all_token_ids[request_id])
            elif new_blocks is not None:
                for table, block_ids in zip(row.tables, new_blocks, strict=True):
                    table += block_ids
            assert len(row.tokens) == len(row.prompt) + cached.num_output_tokens[index]

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        result = ModelRunnerOutput()
        self._wrong_states = set()
        right = {r: kv_of(self.rows[r].tokens, self.rows[r].salt) for r in output.num_scheduled_tokens}
        for request_id in output.num_scheduled_tokens:  # No state is written before all are read.
            if not self._begins_from_right_states(self.rows[request_id], right[request_id]):
                self._wrong_states.add(request_id)
        for request_id, num_new in output.num_scheduled_tokens.items():
            row = self.rows[request_id]
            last = row.num_computed + num_new - 1
            for group, block_ids in enumerate(row.tables):
                if self.groups[group].is_state:
                    assert block_ids[last // BLOCK] not in self.null_blocks, "a state without a block"
                    self._write_state(block_ids, last, right[request_id][last] + group)
            for position in range(row.num_computed, row.num_computed + num_new):
                for group, block_ids in enumerate(row.tables):
                    if self.groups[group].is_state:
                        continue
                    assert block_ids[position // BLOCK] not in self.null_blocks, "computed into no block"
                    self.write(block_ids, position, right[request_id][position] + group)
        self._spread_errors(output.num_scheduled_tokens, right)
        for request_id, num_new in output.num_scheduled_tokens.items():
            row = self.rows[request_id]
            last = row.num_computed + num_new
            assert last <= len(row.tokens)
            sampled: list[int] = []
            if last == len(row.tokens):
                is_right = self._first_wrong(row, right[request_id][:last]) is None
                is_right &= request_id not in self._wrong_states
                sampled = [next_token(right[request_id][-1]) if is_right else GARBAGE]
                row.tokens += sampled
            result.req_ids.append(request_id)
            result.sampled_token_ids.append(sampled)
        return result

    def _spread_errors(self, scheduled: dict[str, int], right: dict[str, list[int]]) -> None:
        """KV that is computed after wrong KV is wrong too, also for requests that share it in this step."""
        changed = True
        while changed:
            changed = False
            for request_id, num_new in scheduled.items():
                row = self.rows[request_id]
                last = row.num_computed + num_new
                wrong = self._first_wrong(row, right[request_id][:last])
                if request_id in self._wrong_states:
                    wrong = row.num_computed
                if wrong is None:
                    continue
                self._wrong_states.add(request_id)
                for group, block_ids in enumerate(row.tables):
                    if self.groups[group].is_state:
                        self._write_state(block_ids, last - 1, None)
                for position in range(max(row.num_computed, wrong), last):
                    for group, block_ids in enumerate(row.tables):
                        if not self.groups[group].is_state and self.read(block_ids, position) is not None:
                            self.write(block_ids, position, None)
                            changed = True

    def _first_wrong(self, row: _Row, right: list[int]) -> int | None:
        """The first token with wrong KV that this step's queries attend to."""
        wrong: list[int] = []
        for index, (group, block_ids) in enumerate(zip(self.groups, row.tables, strict=True)):
            if group.is_state:
                continue
            first = 0 if group.window is None else max(0, row.num_computed - group.window + 1)
            seen = range(first, len(right))
            wrong += [i for i in seen if self.read(block_ids, i) != right[i] + index][:1]
        return min(wrong, default=None)


# --- The world -------------------------------------------------------------------------------------


@dataclass
class Ended:
    token_ids: list[int] = field(default_factory=list)
    last: EngineOutput | None = None

    @property
    def reason(self) -> str | None:
        return self.last.finish_reason if self.last is not None else None


@dataclass
class InFlightStep:
    """A step that the ranks run as late as possible: when its result is requested."""

    output: SchedulerOutput
    sync_loads: list[FakeLoad]
    written: dict[str, set[int]]  # Blocks that the step writes, by request.


class World:
    """`depth`: the most steps in flight, including the one whose result is awaited."""

    def __init__(self, config: EngineConfig | None = None, *, depth: int = 1, **kwargs: Any) -> None:
        self.depth = depth
        self.in_flight: deque[InFlightStep] = deque()
        self.config = config if config is not None else engine_config(**kwargs)
        groups = self.config.kv_cache_groups
        self.half = FakeHalfOfGroups() if is_hybrid(groups) else FakeHalf()
        self.scheduler = Scheduler(self.config, self.half)
        self.ranks = FakeRanks(self.config.cache_config.num_gpu_blocks, groups)
        self.asked: dict[str, EngineRequest] = {}
        self.answers: dict[str, Ended] = {}
        self.report = KVConnectorOutput()  # The report of the next step.
        self.error: str | None = None  # The error that a worker half raises in the next step.
        self.bad_sync_blocks: Callable[[FakeLoad], set[int]] = lambda load: set()
        self.other_holders: list[int] = []  # Blocks that the test itself holds.
        self.steps: list[SchedulerOutput] = []
        self.outputs: list[EngineOutputs] = []

    def add(self, request_id: str, prompt: Sequence[int], **kwargs: Any) -> EngineRequest:
        asked = engine_request(request_id, prompt, **kwargs)
        self.asked[request_id] = asked
        self.ranks.salts[request_id] = asked.cache_salt
        self.answers[request_id] = Ended()
        self.scheduler.add_request(asked)
        return asked

    def step(self) -> SchedulerOutput:
        """Run the next step, and take results until fewer than `depth` steps are in flight."""
        output = self.schedule()
        while len(self.in_flight) >= self.depth:
            self.finish_oldest()
        return output

    def step_if_useful(self) -> None:
        """Like the engine core: no step without tokens while others are in flight."""
        if self.in_flight and not self.scheduler.has_idle_requests():
            self.finish_oldest()
        else:
            self.step()

    def schedule(self) -> SchedulerOutput:
        busy = {request_id for step in self.in_flight for request_id in step.output.num_scheduled_tokens}
        output = self.scheduler.schedule()
        self.steps.append(output)
        assert output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens.values())
        assert output.total_num_scheduled_tokens <= self.config.scheduler_config.max_num_batched_tokens
        assert not busy & set(output.num_scheduled_tokens), "a request has one step in flight at most"
        assert not busy & output.preempted_req_ids
        loads, self.half.sync_loads = self.half.sync_loads, []
        assert output.has_sync_kv_loads == bool(loads)
        self.in_flight.append(InFlightStep(output, loads, self._written_by(output)))
        self.assert_fenced()
        return output

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
        } - self.ranks.null_blocks
        for step in self.in_flight:
            for request_id, block_ids in step.written.items():
                held = self.scheduler.kv_cache.blocks_between(request_id, 0, sys.maxsize)
                assert block_ids <= {block_id for _, block_id in held}, "freed while a step writes it"
                assert not loading & block_ids

    def finish_oldest(self) -> None:
        """Run the oldest step on the ranks, and process its result."""
        step = self.in_flight.popleft()
        output = step.output
        self.ranks.take_over(output)
        report, self.report = self.report, KVConnectorOutput()
        for load in step.sync_loads if output.kv_connector_metadata is not None else ():
            bad = self.bad_sync_blocks(load)
            self.ranks.fill(load, bad)
            report.invalid_block_ids |= bad
        result = self.ranks.execute(output)
        result.kv_connector_output = None if report.is_empty() else report
        result.connector_error, self.error = self.error, None
        self._take(self.scheduler.update_from_output(output, result))
        self.scheduler.kv_cache.assert_consistent(self.other_holders)
        self.assert_fenced()

    def _take(self, outputs: EngineOutputs) -> None:
        self.outputs.append(outputs)
        for output in outputs.outputs:
            answer = self.answers[output.request_id]
            assert answer.last is None, f"{output.request_id} ended twice"
            answer.token_ids += output.new_token_ids
            if output.finish_reason is not None:
                answer.last = output

    def run(self, max_steps: int = 2000) -> None:
        """Step until no work is left."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not self.in_flight:
                return
            self.step_if_useful()
        raise AssertionError(f"still not at rest after {max_steps} steps: {self.scheduler.requests}")

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
        bad = {load.tables[bad_group][i] for i in bad_indices or ()} - self.ranks.null_blocks
        self.ranks.fill(load, {b for table in load.tables for b in table} if failed else bad)
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

    def check_answer(self, request_id: str, reason: str = "length") -> None:
        answer, asked = self.answers[request_id], self.asked[request_id]
        assert answer.reason == reason, answer
        expected = expected_output(asked)
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
        assert set(self.half.num_finished) == set(self.asked)
        assert set(self.half.num_finished.values()) <= {1}
        assert all(answer.reason is not None for answer in self.answers.values())
