"""Error classes, divided by the cause of the error, because the cause decides the reaction.

    BatonError
     |- UserError            the caller asked for something impossible: HTTP 400, names field and remedy
     |   |- ConfigError      ... in the configuration, at start-up
     |   |- BadTransferParams ... in `kv_transfer_params`
     |- PeerError            a remote engine broke the protocol: quarantine that peer, stay up
     |- TransferError        the network failed: retry or recompute

Baton's own mistakes are `assert`s.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from baton.core.reasons import Fault

_LIBRARIES = ("<frozen", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))


class BatonError(Exception):
    """Base class of the errors that Baton raises on purpose."""


class UserError(BatonError, ValueError):
    """A user or operator asked for something that cannot work.

    `field` is the JSON path of the wrong value (such as `sampling.top_p`); the message says what to change.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.problem = message  # The message without the field.


class ConfigError(UserError):
    """The operator's configuration cannot work. The message says what to change."""


class BadTransferParams(UserError):
    """`kv_transfer_params` that cannot be honoured. The request gets a 400."""

    def __init__(self, message: str, *, field: str | None = None, reason: Fault = Fault.PARAMS) -> None:
        super().__init__(message, field=field)
        self.reason = reason


class PeerError(BatonError):
    """A remote engine broke the protocol. That peer is quarantined; transfers with other peers go on."""


class TransferError(BatonError):
    """Bytes could not be moved. The request is retried, recomputed or failed by its policy."""


@contextmanager
def panics_as(make: Callable[[str], Exception]) -> Iterator[None]:
    """Raises `make(message)` for a panic of a library in Rust, which is no `Exception`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise make(str(error)) from None


def place_of(error: BaseException) -> str:
    """The place in foreign code that raised `error`, as " (store.py:27, in load)"; empty if it is unknown.

    The frame that caught the error is left out.
    """
    return place_in(traceback.extract_tb(error.__traceback__)[1:])


def place_in(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost frame, which comes last in `frames`. Library frames count only if there are no others.

    The format is that of `place_of`.
    """
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    for frame in reversed(own or frames):
        return f" ({frame.filename.rpartition('/')[2]}:{frame.lineno}, in {frame.name})"
    return ""
