"""Watched scheduler half: forwards every call to the connector and records broken rules in the story."""

import copy
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

from baton.contract import (
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorSchedulerHalf,
    KVConnectorStats,
    KVConnectorWorkerHalf,
    SupportsHMA,
    host,
)
from baton.contract.surface import SURFACE, Half, Scope, completed, rows_of
from baton.core.errors import UserError
from baton.core.kv_events import KVCacheEvent
from baton.core.kv_groups import NULL_BLOCK_ID, KVCacheGroup, is_hybrid
from baton.testing.contract.envelopes import WatchedMetadata, WatchedReport
from baton.testing.contract.ledger import Ledger, OpenLoad
from baton.testing.contract.story import Story, short, why
from baton.testing.contract.watched_worker import (
    WatchedWorker,
    is_news,
    is_plain,
    pass_on,
    why_not_pickled,
)


@completed(rows_of(Half.SCHEDULER), pass_on)
class WatchedScheduler(KVConnectorSchedulerHalf):
    def __init__(
        self,
        inner: Any,
        ledger: Ledger,
        *,
        name: str,
        block_size: int,
        groups: Sequence[KVCacheGroup],
        final_notes: str | None = None,
    ) -> None:
        """`inner`: a scheduler half, or any object with its methods, such as vLLM's connectors.

        `final_notes`: see WatchedMetadata.
        """
        self.inner = inner
        self.name = name  # Name of the engine in the story.
        self.makes_up_kv = False  # True: matches say nothing about stored KV.
        self.num_deferred = 0  # Lookups in a row that returned None.
        self.was_reset = False  # reset_cache() returned True, and no step has computed tokens since.
        # Requests that have been scheduled since other weights, which have no name, are in use.
        self._since: dict[str, host.Request] | None = None
        self._requests: dict[str, host.Request] = {}  # Requests that wait, by id.
        self._ledger = ledger
        self._story: Story = ledger.story
        self._block_size = block_size
        self._final_notes = final_notes
        self._num_groups = len(groups)
        self._null_blocks = {NULL_BLOCK_ID} if is_hybrid(groups) else set()  # Placeholder in block tables.
        self._matches: dict[str, tuple[int, bool]] = {}  # (local tokens, is_async) of the last lookup.
        self._allocated: set[str] = set()
        self._scheduled: set[str] = set()

    # --- Start and end -----------------------------------------------------------------------------

    def get_finished_count(self) -> int | None:
        count = self._ask("get_finished_count")
        is_count = count is None or (isinstance(count, int) and count > 0)
        self._story.check("wrong-type", is_count, f"get_finished_count answers {short(count)}")
        return count if is_count else None

    def bind_only_rank(self, rank: KVConnectorWorkerHalf) -> None:
        self._ask_if_there(
            "bind_only_rank", rank.inner if isinstance(rank, WatchedWorker) else rank, shown_arguments=()
        )

    def reset_cache(self) -> bool | None:
        answer: bool | None = self._ask("reset_cache")
        self._story.check("wrong-type", answer in (None, True, False), f"reset_cache answers {short(answer)}")
        self.was_reset = answer is True
        return answer

    def set_weights(self, weights: str | None, version: str | None) -> bool | None:
        answer: bool | None = self._ask_if_there("set_weights", weights, version)
        self._story.check("wrong-type", answer in (None, True, False), f"set_weights answers {short(answer)}")
        if answer is True:
            self._ledger.change_weights()
            self._requests.clear()
            self._since = {} if version is None else None
        return answer

    def introduction(self) -> str | None:
        text: str | None = self._ask_if_there("introduction", is_quiet=True)
        return text

    def shutdown(self) -> None:
        self.inner.shutdown()

    # --- One request -------------------------------------------------------------------------------

    def on_new_request(self, request: host.Request) -> None:
        self._ledger.known.add(request.request_id)
        self._requests[request.request_id] = request
        self._ask("on_new_request", request)

    def get_num_new_matched_tokens(
        self, request: host.Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        before = copy.deepcopy(request.kv_transfer_params)
        answer = self._ask("get_num_new_matched_tokens", request, num_computed_tokens)
        is_match = (
            isinstance(answer, tuple)
            and len(answer) == 2
            and (answer[0] is None or (isinstance(answer[0], int) and not isinstance(answer[0], bool)))
            and isinstance(answer[1], bool)
        )
        call = f"get_num_new_matched_tokens({request.request_id}, {num_computed_tokens})"
        if not self._story.check("wrong-type", is_match, f"{call} answers {short(answer)}"):
            return 0, False
        again = self.inner.get_num_new_matched_tokens(request, num_computed_tokens)
        self._story.check(
            "lookup-has-side-effects",
            again == answer or None in (again[0], answer[0]),
            f"{call} answers {answer}, and asked again {again}",
        )
        self._story.check(
            "lookup-has-side-effects",
            request.kv_transfer_params == before,
            f"{call} changed kv_transfer_params from {short(before)} to {short(request.kv_transfer_params)}",
        )
        count, is_async = answer
        self.num_deferred = self.num_deferred + 1 if count is None else 0
        if count is None:
            return None, is_async
        room = request.num_tokens - num_computed_tokens
        self._story.check(
            "match-out-of-range",
            0 <= count <= room,
            f"{call} answers {count}; {room} tokens are to be computed",
        )
        self._story.check("async-without-tokens", not (is_async and count == 0), f"{call} answers (0, True)")
        is_stored = not request.kv_transfer_params and not self.makes_up_kv
        if self.was_reset and is_stored:
            self._story.check(
                "reset-ignored", count == 0, f"{call} answers {count} right after reset_cache()"
            )
        if self._since is not None and request.request_id in self._requests and is_stored:
            num_known = max((_num_common(request, other) for other in self._since.values()), default=0)
            detail = f"{call} answers {count}; with these weights {num_known} of its tokens were computed"
            self._story.check(
                "old-weights-found", count == 0 or num_computed_tokens + count <= num_known, detail
            )
        self._matches[request.request_id] = (num_computed_tokens, is_async)
        return count, is_async

    def get_loaded_kv_cache_group_ids(self, request: host.Request) -> tuple[int, ...]:
        ids = self._ask("get_loaded_kv_cache_group_ids", request)
        exist = isinstance(ids, tuple) and all(i in range(self._num_groups) for i in ids) and len(ids) > 0
        self._story.check("foreign-group", exist, f"get_loaded_kv_cache_group_ids answers {short(ids)}")
        return ids if exist else (0,)

    def update_state_after_alloc(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        request_id, tables = request.request_id, blocks.get_block_ids()
        self._allocated.add(request_id)
        self._ask(
            "update_state_after_alloc",
            request,
            blocks,
            num_external_tokens,
            shown_arguments=(request_id, tables if self._num_groups > 1 else tables[0], num_external_tokens),
            is_quiet=False,
        )
        same = blocks.get_block_ids() == tables
        self._story.check("argument-modified", same, "update_state_after_alloc changed the block table")
        if num_external_tokens:
            if hasattr(self.inner, "get_loaded_kv_cache_group_ids"):
                self.get_loaded_kv_cache_group_ids(request)
            num_local, is_async = self._matches[request_id]
            last = -(-(num_local + num_external_tokens) // self._block_size)
            first = num_local // self._block_size
            held, filled = self._blocks_of(tables, 0, last), self._blocks_of(tables, first, last)
            self._ledger.open_load(OpenLoad(request_id, held, filled, num_external_tokens, is_async))

    def _blocks_of(self, tables: tuple[list[int], ...], first: int, last: int) -> list[int]:
        return [b for table in tables for b in table[first:last] if b not in self._null_blocks]

    def request_finished(
        self, request: host.Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finished("request_finished", request, block_ids, block_ids)

    def _finished(
        self, method: str, request: host.Request, block_ids: Any, shown_arguments: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        before = copy.deepcopy(block_ids)
        status = request.status.name
        answer = self._ask(
            method,
            request,
            block_ids,
            shown_arguments=(request.request_id, status, shown_arguments),
            is_quiet=False,
        )
        self._story.check("argument-modified", block_ids == before, f"{method} changed the list of blocks")
        is_answer = (
            isinstance(answer, tuple)
            and len(answer) == 2
            and isinstance(answer[0], bool)
            and (answer[1] is None or isinstance(answer[1], dict))
        )
        if not self._story.check("wrong-type", is_answer, f"{method} answers {short(answer)}"):
            return False, None
        is_lent, params = answer
        if params is not None:
            self._story.check("params-not-plain", is_plain(params), f"{method} answers {short(params)}")
        self._requests.pop(request.request_id, None)
        if request.request_id in self._ledger.stale:
            leads = bool(params and params.get("do_remote_prefill"))
            detail = f"{request.request_id} was open when the weights changed, and params lead to its KV"
            self._story.check("old-weights-lent", not leads, detail)
        self._ledger.end_request(
            request.request_id, is_lent=is_lent, is_aborted=status in ("FINISHED_ABORTED", "FINISHED_ERROR")
        )
        return is_lent, params

    # --- One step ----------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: host.SchedulerOutput) -> KVConnectorMetadata:
        metadata = self._metadata_of(scheduler_output)
        self._ledger.begin_step()
        return metadata

    def _metadata_of(self, scheduler_output: host.SchedulerOutput) -> WatchedMetadata:
        before = pickle.dumps(scheduler_output)
        metadata = self._ask("build_connector_meta", scheduler_output, shown_arguments=(), is_quiet=True)
        self._story.check(
            "argument-modified",
            pickle.dumps(scheduler_output) == before,
            "build_connector_meta changed the scheduler output",
        )
        self._story.check("wrong-type", metadata is not None, "build_connector_meta answers None")
        problem = why_not_pickled(metadata)
        self._story.check(
            "not-serialisable", problem is None, f"the connector metadata cannot be pickled: {problem}"
        )
        num_tokens = scheduler_output.total_num_scheduled_tokens
        if num_tokens:
            self.was_reset = False  # The connector may store new KV.
        ended = scheduler_output.finished_req_ids
        new_ids = {new.req_id for new in scheduler_output.scheduled_new_reqs}
        self._scheduled |= new_ids
        if self._since is not None:
            self._since |= {id_: self._requests[id_] for id_ in new_ids & self._requests.keys()}
        unseen = frozenset(ended - self._scheduled)
        self._scheduled -= ended
        opened, self._ledger.opened = frozenset(self._ledger.opened), set()
        return WatchedMetadata(
            metadata,
            is_empty=num_tokens == 0,
            opened_loads=opened,
            unseen_finished_ids=unseen,
            final_notes=self._final_notes,
        )

    def build_dummy_meta(self, scheduler_output: host.SchedulerOutput) -> KVConnectorMetadata:
        """Build the metadata of a dummy run in which a graph captures the layer hooks."""
        metadata = self._metadata_of(scheduler_output)
        metadata.is_dummy = True
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WatchedReport):
            connector_output.kv_connector_worker_meta = report.inner
            for notes in report.notes:
                self._ledger.take_notes(self.name, notes)
        # The half reports from here on whether these loads are over.
        self._ledger.landed -= connector_output.finished_recving or set()
        self._ask("update_connector_output", connector_output, shown_arguments=(), is_quiet=True)
        if connector_output.finished_sending or connector_output.finished_recving:
            self._story.record_line(
                f"{self.name}: sent {short(connector_output.finished_sending or set())}, "
                f"received {short(connector_output.finished_recving or set())}, "
                f"failed {short(connector_output.failed_recving or set())}, "
                f"invalid blocks {short(connector_output.invalid_block_ids)}"
            )
        self._ledger.take_report(connector_output)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return list(self._ask_if_there("take_events") or ())

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        stats: KVConnectorStats | None = self._ask("get_kv_connector_stats", is_quiet=True)
        if stats is not None:
            plain = is_plain(stats.to_dict())
            self._story.check("stats-not-plain", plain, f"stats are {short(stats.to_dict())}")
        return stats

    # --- Notes -------------------------------------------------------------------------------------

    def _ask(
        self,
        method: str,
        *arguments: Any,
        shown_arguments: tuple[Any, ...] | None = None,
        is_quiet: bool | None = None,
    ) -> Any:
        """Call the connector. `is_quiet` None: recorded in the story only if the answer is news."""
        shown = arguments if shown_arguments is None else shown_arguments
        try:
            answer = getattr(self.inner, method)(*arguments)
        except UserError as error:
            self._story.record_call(self.name, method, shown)
            self._story.record_line(f"    {method} refused the request: {error}")
            allowed = SURFACE[method].scope is Scope.REQUEST
            self._story.check("raised", allowed, f"{method} raised a UserError: {error}")
            raise
        except Exception as error:  # The exception is the breach.
            self._story.record_call(self.name, method, shown)
            about = arguments[0].request_id if method.startswith("request_finished") else None
            is_unknown = about is not None and about not in self._allocated
            rule = "unknown-id-raised" if is_unknown else "raised"
            self._story.check(rule, False, f"{method} raised {why(error)}")
            raise
        self._story.checked["raised"] += 1
        if is_quiet is False or (is_quiet is None and is_news(answer)):
            self._story.record_call(self.name, method, shown, answer)
        return answer

    def _ask_if_there(self, method: str, *arguments: Any, **how: Any) -> Any:
        """Call a method that connectors written for other hosts may lack."""
        return self._ask(method, *arguments, **how) if hasattr(self.inner, method) else None


class WatchedHMAScheduler(WatchedScheduler, SupportsHMA):
    """Watches a connector that handles several KV-cache groups."""

    def request_finished_all_groups(
        self, request: host.Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finished("request_finished_all_groups", request, block_ids, block_ids)


def _num_common(request: host.Request, other: host.Request) -> int:
    """Length of the prefix that both share, if their KV can be the same."""
    if request.cache_salt != other.cache_salt:
        return 0
    pairs = zip(request.all_token_ids, other.all_token_ids, strict=False)
    return next(
        (index for index, (a, b) in enumerate(pairs) if a != b), min(request.num_tokens, other.num_tokens)
    )


def watch_scheduler(inner: Any, ledger: Ledger, **how: Any) -> WatchedScheduler:
    has_groups = hasattr(inner, "request_finished_all_groups")
    return (WatchedHMAScheduler if has_groups else WatchedScheduler)(inner, ledger, **how)
