"""Errors say whose fault it is, because that decides who has to pay.

    BatonError
     |- UserError            the caller asked for something impossible: HTTP 400, names the field and the mend
     |   |- ConfigError      ... in the configuration, at start-up
     |   |- BadTransferParams ... in `kv_transfer_params`
     |- PeerError            a remote broke the protocol: quarantine that peer, never die
     |- TransferError        the network did: retry or recompute

What *we* did wrong is an `assert`.
"""


class BatonError(Exception):
    """Root of every error that Baton raises on purpose."""


class UserError(BatonError, ValueError):
    """Somebody asked for something that cannot work.

    `field` names what is wrong (a JSON path such as `sampling.top_p`), the message says how to mend it.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field


class ConfigError(UserError):
    """The operator's configuration cannot work. Says what to change."""


class BadTransferParams(UserError):
    """`kv_transfer_params` that cannot be honoured; the request gets a 400, not a guess."""


class PeerError(BatonError):
    """A remote engine broke the protocol. That peer is quarantined; everybody else goes on."""


class TransferError(BatonError):
    """Bytes could not be moved. The request is retried, recomputed or failed by its policy."""
