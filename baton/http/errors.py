"""HTTP errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}` and a status."""

from collections.abc import Mapping
from typing import Any

import msgspec

from baton.core.errors import UserError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "method_not_allowed_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large_error",
    415: "unsupported_media_type_error",
    429: "rate_limit_error",
    502: "upstream_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
RETRY_AFTER_S = 1  # The body budget is freed as fast as other clients send.


class ApiError(Exception):
    """An answer other than 200, chosen by the server."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        """`extra`: further headers."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.extra = extra or {}

    @classmethod
    def of_user(cls, error: UserError) -> "ApiError":
        return cls(400, str(error), param=error.field)

    @property
    def kind(self) -> str:
        """The `type` in OpenAI's format."""
        return TYPES.get(self.status, "server_error")

    def body(self) -> dict[str, Any]:
        """Return the whole answer, to be encoded as JSON."""
        error = ErrorBody(message=str(self), type=self.kind, param=self.param, code=self.code or self.status)
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """Return the headers that belong to the status."""
        headers = dict(self.extra)
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status == 401:
            # RFC 6750, 3.1.
            headers["WWW-Authenticate"] = (
                'Bearer error="invalid_token"' if self.code == "invalid_token" else "Bearer"
            )
        if self.status in (408, 413):
            headers["Connection"] = "close"  # The rest of the body is still on its way.
        return headers


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | int | None
