"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}` and a status.

UserError                   400  param: the field
ApiError                    its own (404 unknown model, 413 body too large, 503 draining, ...)
TokenizerPanic              500  the tokenizers library failed on this input; logged
EngineDeadError             503  the engine's process is gone; another engine may serve
EngineUnreadyError          503  its processes are stopped or restarting; another engine may serve
UpdateUnderWay              409  another update of the weights is under way
UpdateFailed                503  the weights were not updated; the old ones go on serving
anything else               500  our bug: logged with its traceback, reported without details
"""

import logging
from typing import Any

from baton.core.errors import UserError
from baton.engine.core.client import EngineDeadError, EngineUnreadyError
from baton.engine.core.weights_update import UpdateFailed, UpdateUnderWay
from baton.engine.text.tokenizer import TokenizerPanic
from baton.http.errors import TYPES, ApiError, ErrorBody
from baton.http.workers import WorkerFailed

logger = logging.getLogger(__name__)


def describe(error: BaseException) -> tuple[int, ErrorBody]:
    """Return the status and body for an exception. Details of unexpected ones stay in the log."""
    status, message = 500, str(error)
    param: str | None = None
    code: str | None = None
    match error:
        case ApiError():
            status, param, code = error.status, error.param, error.code
        case UserError():
            status, param = 400, error.field
        case EngineDeadError():
            status, code = 503, "engine_dead"
            message = "the engine has stopped; nothing was lost but this answer"
        case TokenizerPanic() | WorkerFailed():
            code = "input_failed"
        case EngineUnreadyError():
            status, code = 503, "not_ready"
        case UpdateUnderWay():
            status, code = 409, "update_under_way"
        case UpdateFailed():
            status, code = 503, "not_updated"
        case _:
            message = "internal server error"
    return status, ErrorBody(
        message=message, type=TYPES.get(status, "server_error"), param=param, code=code or status
    )


def log_failure(error: BaseException, request_id: str) -> None:
    """Log unexpected errors with a traceback and engine failures in a line; a client's mistakes are not
    logged.
    """
    status, body = describe(error)
    if status < 500:
        return
    if status == 500 and not isinstance(error, ApiError):
        logger.error("request %s failed", request_id, exc_info=error)
    else:
        logger.warning("request %s failed: %s", request_id, body.message)


def as_event(error: BaseException) -> dict[str, Any]:
    """Return the event for a stream that has begun, whose status is already sent."""
    _, body = describe(error)
    return {"error": body}
