"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}` and a status.

UserError                   400  param: the field
ApiError                    its own (404 unknown model, 413 body too large, 503 draining, ...)
EngineDeadError             503  the engine's process is gone; another engine may serve
anything else               500  our bug: logged with its traceback, told without details
"""

import logging
from typing import Any

import msgspec

from baton.core.errors import UserError
from baton.engine.client import EngineDeadError

logger = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    405: "method_not_allowed_error",
    413: "request_too_large_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An answer other than 200, decided by the server."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | int | None


def describe(error: BaseException) -> tuple[int, ErrorBody]:
    """The status and body for an exception. Details of unexpected ones stay in the log."""
    match error:
        case ApiError():
            status, param, code = error.status, error.param, error.code
            message = str(error)
        case UserError():
            status, param, code, message = 400, error.field, None, str(error)
        case EngineDeadError():
            status, param, code, message = (
                503,
                None,
                "engine_dead",
                "the engine has stopped; nothing was lost but this answer",
            )
        case _:
            status, param, code, message = 500, None, None, "internal server error"
    return status, ErrorBody(
        message=message, type=_TYPES.get(status, "server_error"), param=param, code=code or status
    )


def log_failure(error: BaseException, request_id: str) -> None:
    """Our bug wants a traceback, an engine's failure a line; what a client got wrong is its own affair."""
    status, body = describe(error)
    if status < 500:
        return
    if status == 500 and not isinstance(error, ApiError):
        logger.error("request %s failed", request_id, exc_info=error)
    else:
        logger.warning("request %s failed: %s", request_id, body.message)


def as_event(error: BaseException) -> dict[str, Any]:
    """For a stream that has begun: the status can no longer say it."""
    _, body = describe(error)
    return {"error": body}
