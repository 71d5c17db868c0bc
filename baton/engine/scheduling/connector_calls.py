"""Calls of the scheduler to the connector, with its exceptions contained.

An exception about one request costs that request: it is recomputed if no load was agreed on, and failed
otherwise. The engine and every other request go on.

An exception about a whole step (`build_connector_meta`, ...) costs that step's answer. After several such
steps in a row, of this half or of a worker half, the connector is retired (`baton.contract.guard`): prompts
are computed here, and the engine has to be restarted.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from baton.contract import (
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorStats,
    SupportsHMA,
)
from baton.contract.guard import SchedulerGuard
from baton.core.errors import UserError
from baton.core.kv_events import KVCacheEvent
from baton.core.prefilled import PrefilledTokens
from baton.engine.api import RequestError
from baton.engine.cache.kv_cache import KVCacheBlocks
from baton.engine.request import Request
from baton.engine.step import SchedulerOutput

logger = logging.getLogger(__name__)

REASON_CHARS_MAX = 100  # Limit for the reason of a failed load.


class RequestFault(Exception):
    """The request has to end with an error at once."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True, slots=True)
class Match:
    """The connector can load `num_tokens` tokens after the local hit."""

    num_tokens: int
    is_async: bool


NO_MATCH = Match(0, False)


class ConnectorCalls(SchedulerGuard):
    # --- One request -----------------------------------------------------------------------------

    def announce(self, request: Request) -> None:
        """Raises RequestFault if the connector refuses the request."""
        tell = partial(self.half.on_new_request, request)
        with _refusals():
            if not self.succeeds("on_new_request", tell, request_id=request.request_id):
                request.asks_connector = False

    def find_match(self, request: Request, num_local_tokens: int) -> Match | None:
        """None: ask again in a later step. Raises RequestFault if the connector refuses the request."""
        if not request.asks_connector:
            return NO_MATCH
        with _refusals():
            answer = self.find_tokens(request, num_local_tokens)
        if answer is None:
            request.asks_connector = False
            return NO_MATCH
        num_tokens, is_async = answer
        if num_tokens is None:
            return None
        return Match(num_tokens, is_async) if num_tokens else NO_MATCH

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Raises RequestFault if the call fails after a load was agreed on, because it may be running."""
        tell = partial(self.half.update_state_after_alloc, request, blocks, num_external_tokens)
        with _refusals():
            is_told = self.succeeds("update_state_after_alloc", tell, request_id=request.request_id)
        if not is_told and num_external_tokens:
            raise RequestFault(RequestError("the KV connector could not start to load this prompt"))

    def prefilled(self, request: Request) -> PrefilledTokens | None:
        def take() -> PrefilledTokens | None:
            prefilled = self.half.take_prefilled_tokens(request.request_id)
            if prefilled is not None and not isinstance(prefilled, PrefilledTokens):
                raise TypeError(f"{prefilled!r:.100} are no PrefilledTokens")
            return prefilled

        return self.contain("take_prefilled_tokens", take, request_id=request.request_id)

    def load_failure(self, request: Request) -> str:
        """The reason of the request's failed load, for the log and for the client."""

        def ask() -> str:
            reason = self.half.get_load_failure(request.request_id)
            return "reason unknown" if reason is None else _check_plain(reason, str)[:REASON_CHARS_MAX]

        return self.contain("get_load_failure", ask, "reason unknown", request_id=request.request_id)

    def finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """(delay_free, kv_transfer_params). If the connector fails here, nothing is lent."""

        def finish() -> tuple[bool, Any]:
            if isinstance(self.half, SupportsHMA):
                lends, params = self.half.request_finished_all_groups(request, block_ids)
            else:
                (only_group,) = block_ids
                lends, params = self.half.request_finished(request, only_group)
            return bool(lends), params

        delay_free, params = self.contain("request_finished", finish, request_id=request.request_id)
        if params is not None:
            check = partial(_check_plain, params, dict)
            params = self.contain("request_finished", check, None, request_id=request.request_id)
        return delay_free, params

    # --- One step --------------------------------------------------------------------------------

    def build_meta(self, output: SchedulerOutput) -> KVConnectorMetadata | None:
        """None: the ranks get no metadata in this step, and its loads fail."""
        if self.is_retired:
            return None
        return self.contain("build_connector_meta", partial(self.half.build_connector_meta, output))

    def take_report(self, report: KVConnectorOutput) -> None:
        """Pass the report to the connector, which may add ids to it."""
        if not self.defines("update_connector_output"):
            return
        self.contain("update_connector_output", partial(self.half.update_connector_output, report))
        report.finished_sending = self.checked_ids(report.finished_sending)
        report.finished_recving = self.checked_ids(report.finished_recving)
        report.failed_recving = self.checked_ids(report.failed_recving)
        report.abandoned_recving = self.checked_ids(report.abandoned_recving) or set()
        report.arriving_recving = self.checked_ids(report.arriving_recving) or set()

    def step_stats(self, of_workers: KVConnectorStats | None) -> dict[str, Any] | None:
        name, own = "get_kv_connector_stats", None
        if self.defines(name):
            own = self.contain(name, self.half.get_kv_connector_stats)
        if own is None and of_workers is None:
            return None

        def merge() -> dict[str, Any] | None:
            if own is None or of_workers is None:
                one = own if own is not None else of_workers
            else:
                one = of_workers.aggregate(own)
            return None if one is None else _check_plain(one.to_dict(), dict)

        return self.contain(name, merge)

    def take_events(self) -> list[KVCacheEvent]:
        if not self.defines("take_events"):
            return []
        events = self.contain("take_events", self.half.take_events)
        if type(events) is tuple and not events:
            return []

        def check() -> list[KVCacheEvent]:
            taken = list(events)
            for event in taken:
                _check_plain(event, KVCacheEvent)
            return taken

        return self.contain("take_events", check, [])

    def has_pending_block_frees(self) -> bool:
        return self.contain("has_pending_block_frees", self.half.has_pending_block_frees)

    def has_pending_push_work(self) -> bool:
        return self.contain("has_pending_push_work", self.half.has_pending_push_work)

    # --- Whole life -----------------------------------------------------------------------------

    def introduction(self) -> str | None:
        """Signed text by which other engines find this one's connector; None if the connector has none."""
        return self.contain("introduction", self.half.introduction)

    def take_back(self, params: Mapping[str, Any]) -> None:
        """Release a loan. If the params are invalid, which is the client's error, the loan ends by time."""
        try:
            self.contain("take_back", partial(self.half.take_back, params))
        except UserError as error:
            logger.warning("cannot release the loan of these kv_transfer_params: %s", error)

    def drain(self, timeout_s: float) -> None:
        """Requests go on. The connector grants no more loans and takes its open ones back."""
        self.contain("drain", partial(self.half.drain, timeout_s))

    def reset_cache(self) -> bool:
        """Whether nothing that was stored before can be loaded. The contract's None promises nothing."""
        return self.contain("reset_cache", self.half.reset_cache) is True

    def set_weights(self, weights: str, version: str | None) -> bool:
        """Whether KV of the weights before is used no more."""
        return self.contain("set_weights", partial(self.half.set_weights, weights, version)) is True


@contextmanager
def _refusals() -> Iterator[None]:
    """Raises RequestFault for a UserError of the connector."""
    try:
        yield
    except UserError as error:
        raise RequestFault(RequestError.of_user(error)) from error


def _check_plain(value: Any, kind: Any) -> Any:
    """The value, which is sent to another process. Raises TypeError if it cannot be encoded."""
    if not isinstance(value, kind):
        raise TypeError(f"{value!r:.100} is no {kind}")
    msgspec.msgpack.encode(value)
    return value
