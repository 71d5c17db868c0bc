"""All that the scheduler asks of the connector, with the blast contained.

What it raises about one request costs that request: it is recomputed where nothing has been promised yet,
and failed where something may have been. The engine and every other request go on.

What it raises about a whole step (`build_connector_meta`, ...) costs what it had to say in that step. After
STEP_ERRORS_MAX such steps in a row, of this half or of a worker half, or at once if it says itself that it is
dead (`ConnectorDead`), it is *retired*: a null half takes its place, so that prompts are computed here, and
only `shutdown` reaches it still. A retired connector does not come back; the engine has to be restarted.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from baton.contract import (
    ConnectorDead,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorSchedulerHalf,
    KVConnectorStats,
    NullSchedulerHalf,
    SupportsHMA,
)
from baton.contract.events import KVCacheEvent
from baton.core.errors import UserError
from baton.core.prefilled import PrefilledTokens
from baton.engine.api import RequestError
from baton.engine.cache.kv_cache import KVCacheBlocks
from baton.engine.request import Request
from baton.engine.step import SchedulerOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")

REASON_CHARS_MAX = 100  # Of why a load has failed.
STEP_ERRORS_MAX = 3  # Steps in a row. One bad step may be one bad peer; three are a broken connector.


class RequestFault(Exception):
    """This request has to end with an error, now."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True, slots=True)
class Match:
    """So many tokens behind the local hit can be loaded."""

    num_tokens: int
    is_async: bool


NO_MATCH = Match(0, False)


class ConnectorCalls:
    def __init__(self, half: KVConnectorSchedulerHalf) -> None:
        self.num_errors = 0  # Exceptions and impossible answers, since start.
        self.is_retired = False
        self._half = half  # Whom to ask.
        self._owned = half  # Whom to shut down.
        self._num_errors_taken = 0
        self._num_bad_steps = 0  # In a row.
        self._step_error: str | None = None  # The first of this step, or since the last one.
        self._is_dead = False

    # --- One request -----------------------------------------------------------------------------

    def announce(self, request: Request) -> None:
        """Raises RequestFault if the connector says that the request is wrong."""
        try:
            self._half.on_new_request(request)
        except UserError as error:
            raise RequestFault(RequestError.of_user(error)) from error
        except Exception:  # It may be anybody's: this request is computed.
            self._count_error("on_new_request", request)
            request.asks_connector = False

    def find_match(self, request: Request, num_local_tokens: int) -> Match | None:
        """None: ask again in a later step. Raises RequestFault as above."""
        if not request.asks_connector:
            return NO_MATCH
        try:
            num_tokens, is_async = self._half.get_num_new_matched_tokens(request, num_local_tokens)
            if num_tokens is None:
                return None
            num_tokens = operator.index(num_tokens)
        except UserError as error:
            raise RequestFault(RequestError.of_user(error)) from error
        except Exception:  # As above.
            self._count_error("get_num_new_matched_tokens", request)
            request.asks_connector = False
            return NO_MATCH
        if not 0 <= num_tokens <= request.num_tokens - num_local_tokens:
            self.num_errors += 1
            logger.error(
                "the connector matched %s tokens of request %s, which has %d to load; computing them",
                num_tokens,
                request.request_id,
                request.num_tokens - num_local_tokens,
            )
            request.asks_connector = False
            return NO_MATCH
        return Match(num_tokens, bool(is_async)) if num_tokens else NO_MATCH

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Raises RequestFault if a load was agreed on: whether it is under way, nobody can say any more."""
        try:
            self._half.update_state_after_alloc(request, blocks, num_external_tokens)
        except UserError as error:
            raise RequestFault(RequestError.of_user(error)) from error
        except Exception as error:  # It may be anybody's: this request alone fails.
            self._count_error("update_state_after_alloc", request)
            if num_external_tokens:
                raise RequestFault(
                    RequestError("the KV connector could not start to load this prompt")
                ) from error

    def prefilled(self, request: Request) -> PrefilledTokens | None:
        try:
            prefilled = self._half.take_prefilled_tokens(request.request_id)
            if prefilled is not None and not isinstance(prefilled, PrefilledTokens):
                raise TypeError(f"{prefilled!r:.100} are no PrefilledTokens")
            return prefilled
        except Exception:  # It may be anybody's: the tokens are sampled here.
            self._count_error("take_prefilled_tokens", request)
            return None

    def load_failure(self, request: Request) -> str:
        """Why its load has failed, for the log and for its client."""
        try:
            reason = self._half.get_load_failure(request.request_id)
            return "reason unknown" if reason is None else _check_plain(reason, str)[:REASON_CHARS_MAX]
        except Exception:  # It may be anybody's: the load has failed all the same.
            self._count_error("get_load_failure", request)
            return "reason unknown"

    def finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """(delay_free, kv_transfer_params). A connector that fails here has lent nothing."""
        delay_free = False
        try:
            if isinstance(self._half, SupportsHMA):
                lends, params = self._half.request_finished_all_groups(request, block_ids)
            else:
                (only_group,) = block_ids
                lends, params = self._half.request_finished(request, only_group)
            delay_free = bool(lends)
            if params is not None:
                _check_plain(params, dict)
        except Exception:  # It may be anybody's: it has lent nothing.
            self._count_error("request_finished", request)
            return delay_free, None
        return delay_free, params

    # --- One step --------------------------------------------------------------------------------

    def build_meta(self, output: SchedulerOutput) -> KVConnectorMetadata | None:
        """None: ranks hear nothing in this step, and what was to be loaded in it is not."""
        if self.is_retired:
            return None
        return self._contain("build_connector_meta", lambda: self._half.build_connector_meta(output), None)

    def take_report(self, report: KVConnectorOutput) -> None:
        """The connector may add to the report's ids."""
        self._contain("update_connector_output", lambda: self._half.update_connector_output(report), None)
        report.finished_sending = self._ids(report.finished_sending)
        report.finished_recving = self._ids(report.finished_recving)
        report.failed_recving = self._ids(report.failed_recving)
        report.abandoned_recving = self._ids(report.abandoned_recving) or set()

    def step_stats(self, of_workers: KVConnectorStats | None) -> dict[str, Any] | None:
        def merge() -> dict[str, Any] | None:
            own = self._half.get_kv_connector_stats()
            if own is None or of_workers is None:
                one = own if own is not None else of_workers
            else:
                one = of_workers.aggregate(own)
            return None if one is None else _check_plain(one.to_dict(), dict)

        return self._contain("get_kv_connector_stats", merge, None)

    def take_events(self) -> list[KVCacheEvent]:
        def take() -> list[KVCacheEvent]:
            events = list(self._half.take_events())
            for event in events:
                _check_plain(event, KVCacheEvent)
            return events

        return self._contain("take_events", take, [])

    def has_pending_block_frees(self) -> bool:
        return self._contain("has_pending_block_frees", self._half.has_pending_block_frees, False)

    def has_pending_push_work(self) -> bool:
        return self._contain("has_pending_push_work", self._half.has_pending_push_work, False)

    def end_step(self) -> str | None:
        """Why the connector is to be retired now, if it is."""
        if self.is_retired:
            return None
        error, self._step_error = self._step_error, None
        self._num_bad_steps = 0 if error is None else self._num_bad_steps + 1
        if self._is_dead or self._num_bad_steps >= STEP_ERRORS_MAX:
            return error
        return None

    # --- Its whole life --------------------------------------------------------------------------

    def introduction(self) -> str | None:
        return self._contain("introduction", self._half.introduction, None)

    def take_back(self, params: Mapping[str, Any]) -> None:
        """Whatever is wrong with them concerns whoever sent them: the loan then ends by time."""
        try:
            self._half.take_back(params)
        except UserError as error:
            logger.warning("cannot take back what was lent: %s", error)
        except Exception:  # It may be anybody's: the loan ends by time.
            self.num_errors += 1
            logger.exception("the connector raised in take_back; the engine goes on")

    def retire(self) -> None:
        """Ask it nothing more. What it holds stays held: it may not even know any more who uses what."""
        self.is_retired = True
        self._half = NullSchedulerHalf()

    def drain(self, timeout_s: float) -> None:
        self._contain("drain", lambda: self._half.drain(timeout_s), None)

    def reset_cache(self) -> bool:
        return self._contain("reset_cache", lambda: self._half.reset_cache() is not False, False)

    def take_num_errors(self) -> int:
        """Since the last call."""
        taken, self._num_errors_taken = self.num_errors - self._num_errors_taken, self.num_errors
        return taken

    def shutdown(self) -> None:
        """Raises what a connector in use raises; of a retired one nothing else was to be expected."""
        try:
            self._owned.shutdown()
        except Exception:  # One that is in use goes through.
            if not self.is_retired:
                raise
            logger.exception("the retired connector could not shut down")

    def _contain(self, method: str, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except Exception as error:  # It may be anybody's: it loses this step, `end_step` judges.
            self.num_errors += 1
            self._is_dead = self._is_dead or isinstance(error, ConnectorDead)
            logger.exception("the connector raised in %s; the engine goes on", method)
            if self._step_error is None:
                self._step_error = f"{method}: {type(error).__name__}: {error}"
            return otherwise

    def _ids(self, ids: Any) -> set[str] | None:
        """What a connector added need not be what the contract says."""
        if ids is None or (isinstance(ids, set) and all(isinstance(i, str) for i in ids)):
            return ids
        self.num_errors += 1
        self._step_error = self._step_error or "update_connector_output: what it added are no request ids"
        logger.error("the connector reported %.200r, which are no request ids", ids)
        return {i for i in ids if isinstance(i, str)} if isinstance(ids, set) else None

    def _count_error(self, method: str, request: Request) -> None:
        self.num_errors += 1
        logger.exception("the connector raised in %s for request %s", method, request.request_id)


def _check_plain(value: Any, kind: Any) -> Any:
    """It travels to another process. Raises TypeError for what cannot."""
    if not isinstance(value, kind):
        raise TypeError(f"{value!r:.100} is no {kind}")
    msgspec.msgpack.encode(value)
    return value
