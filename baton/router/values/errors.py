"""Errors of the router itself."""

from typing import Literal

from baton.core.errors import BatonError
from baton.http.bodies import ClientGone
from baton.http.errors import RETRY_AFTER_S, ApiError

__all__ = ["ClientGone", "LegFailure", "RouterError"]


class RouterError(ApiError):
    """An error that ends one request with an HTTP status that the router chooses."""

    @classmethod
    def gateway(cls, message: str) -> "RouterError":
        return cls(502, message)

    @classmethod
    def unavailable(cls, message: str) -> "RouterError":
        return cls(503, message, retry_after_s=RETRY_AFTER_S)

    @classmethod
    def too_late(cls, message: str) -> "RouterError":
        return cls(504, message)


# ejected: the engine was ejected or removed during the leg. too_large: a whole answer is over the router's
# limit.
FailureKind = Literal["unreachable", "broken", "timeout", "ejected", "too_large"]


class LegFailure(BatonError):
    """One leg to one engine did not end with an answer.

    `was_sent` is False only when the engine cannot have seen the request; then its ticket is still unused.
    """

    def __init__(self, kind: FailureKind, url: str, message: str, *, was_sent: bool) -> None:
        super().__init__(f"{url}: {message}")
        self.kind: FailureKind = kind
        self.was_sent = was_sent
        self.is_noted = False  # The failure is counted against its engine.
