"""What the router itself says when a request cannot be answered, in OpenAI's error shape."""

from typing import Any, Literal

from baton.core.errors import BatonError, UserError
from baton.http.bodies import ClientGone
from baton.http.errors import ApiError
from baton.router.sse import sse_event

__all__ = ["ClientGone", "LegFailure", "RouterError", "error_event", "error_shape"]


class RouterError(BatonError):
    """Ends one request with an HTTP status of the router's own."""

    def __init__(self, status: int, kind: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param

    @classmethod
    def of_user(cls, error: UserError) -> "RouterError":
        return cls(400, "invalid_request_error", str(error), param=error.field)

    @classmethod
    def of_door(cls, error: ApiError) -> "RouterError":
        return cls(error.status, error.kind, str(error), param=error.param)

    @classmethod
    def gateway(cls, message: str) -> "RouterError":
        return cls(502, "upstream_error", message)

    @classmethod
    def unavailable(cls, message: str) -> "RouterError":
        return cls(503, "unavailable_error", message)

    @classmethod
    def too_late(cls, message: str) -> "RouterError":
        return cls(504, "timeout_error", message)

    def shape(self) -> dict[str, Any]:
        return error_shape(self.status, self.kind, self.message, self.param)


def error_shape(status: int, kind: str, message: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_event(message: str, *, status: int = 502) -> bytes:
    """The end of a stream that broke: an error that clients raise, then the mark that they wait for."""
    kind = "upstream_error" if status == 502 else "unavailable_error"
    return sse_event(error_shape(status, kind, message)) + b"data: [DONE]\n\n"


# ejected: the engine was found to be silent meanwhile. too_large: a whole answer is over the router's limit.
FailureKind = Literal["unreachable", "broken", "timeout", "ejected", "too_large"]


class LegFailure(BatonError):
    """One leg to one engine did not end with an answer.

    `was_sent` is False only when the engine cannot have seen the request; then its ticket is still unused.
    """

    def __init__(self, kind: FailureKind, url: str, message: str, *, was_sent: bool) -> None:
        super().__init__(f"{url}: {message}")
        self.kind: FailureKind = kind
        self.was_sent = was_sent
        self.is_noted = False  # Counted against its engine.
