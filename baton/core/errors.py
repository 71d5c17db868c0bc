"""Errors say whose fault it is, because that decides who has to pay.

    BatonError
     |- UserError            the caller asked for something impossible: HTTP 400, names the field and the mend
     |   |- ConfigError      ... in the configuration, at start-up
     |   |- BadTransferParams ... in `kv_transfer_params`
     |- PeerError            a remote broke the protocol: quarantine that peer, never die
     |- TransferError        the network did: retry or recompute

What *we* did wrong is an `assert`.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Sequence

from baton.core.reasons import Fault

_LIBRARIES = ("<frozen", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))


class BatonError(Exception):
    """Root of every error that Baton raises on purpose."""


class UserError(BatonError, ValueError):
    """Somebody asked for something that cannot work.

    `field` names what is wrong (a JSON path such as `sampling.top_p`), the message says how to mend it.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.problem = message  # Without the field.


class ConfigError(UserError):
    """The operator's configuration cannot work. Says what to change."""


class BadTransferParams(UserError):
    """`kv_transfer_params` that cannot be honoured; the request gets a 400, not a guess."""

    def __init__(self, message: str, *, field: str | None = None, reason: Fault = Fault.PARAMS) -> None:
        super().__init__(message, field=field)
        self.reason = reason


class PeerError(BatonError):
    """A remote engine broke the protocol. That peer is quarantined; everybody else goes on."""


class TransferError(BatonError):
    """Bytes could not be moved. The request is retried, recomputed or failed by its policy."""


def place_of(error: BaseException) -> str:
    """Where somebody else's code raised it, as " (store.py:27, in load)"; empty if Python does not know.

    The frame that has caught it does not count.
    """
    return place_in(traceback.extract_tb(error.__traceback__)[1:])


def place_in(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost, which comes last; libraries are left out if there is another. See `place_of`."""
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    for frame in reversed(own or frames):
        return f" ({frame.filename.rpartition('/')[2]}:{frame.lineno}, in {frame.name})"
    return ""
