"""The scheduler's questions to the connector about one request, with the blast contained.

Whatever the connector raises there is about that request: it is recomputed where nothing has been promised
yet, and failed where something may have been. The engine and every other request go on. What a connector
raises in its per-step methods (`build_connector_meta`, ...) concerns everybody and is not caught here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from baton.contract import KVConnectorSchedulerHalf, SupportsHMA
from baton.core.errors import UserError
from baton.engine.api import RequestError
from baton.engine.kv_cache import KVCacheBlocks
from baton.engine.request import Request

logger = logging.getLogger(__name__)


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
        self._half = half
        self.num_errors = 0  # Exceptions and impossible answers, since start.

    def announce(self, request: Request) -> None:
        """Raises RequestFault if the connector says that the request is wrong."""
        try:
            self._half.on_new_request(request)
        except UserError as error:
            raise RequestFault(RequestError.of_user(error)) from error
        except Exception:
            self._count_error("on_new_request", request)
            request.asks_connector = False

    def find_match(self, request: Request, num_local_tokens: int) -> Match | None:
        """None: ask again in a later step. Raises RequestFault as above."""
        if not request.asks_connector:
            return NO_MATCH
        try:
            num_tokens, is_async = self._half.get_num_new_matched_tokens(request, num_local_tokens)
        except UserError as error:
            raise RequestFault(RequestError.of_user(error)) from error
        except Exception:
            self._count_error("get_num_new_matched_tokens", request)
            request.asks_connector = False
            return NO_MATCH
        if num_tokens is None:
            return None
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
        return Match(num_tokens, is_async) if num_tokens else NO_MATCH

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Raises RequestFault if a load was agreed on: whether it is under way, nobody can say any more."""
        try:
            self._half.update_state_after_alloc(request, blocks, num_external_tokens)
        except UserError as error:
            raise RequestFault(RequestError.of_user(error)) from error
        except Exception as error:
            self._count_error("update_state_after_alloc", request)
            if num_external_tokens:
                raise RequestFault(
                    RequestError("the KV connector could not start to load this prompt")
                ) from error

    def finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """(delay_free, kv_transfer_params). A connector that fails here has lent nothing."""
        try:
            if isinstance(self._half, SupportsHMA):
                return self._half.request_finished_all_groups(request, (block_ids,))
            return self._half.request_finished(request, block_ids)
        except Exception:
            self._count_error("request_finished", request)
            return False, None

    def _count_error(self, method: str, request: Request) -> None:
        self.num_errors += 1
        logger.exception("the connector raised in %s for request %s", method, request.request_id)
