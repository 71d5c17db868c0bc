"""Signed tokens: statements of an engine that pass through clients and routers it need not trust.

    text = base64url(msgpack [body, mac])
    body = msgpack [version, ...]
    mac  = HMAC-SHA256(key, purpose + body)

Without a key a token is unsigned, and only engines without a key accept it. Opening verifies, in this order:
size and schema, version, signature. An opened token is well-formed in every field and comes from an engine of
the cluster; the caller must still check that it is *meant for this engine and request*.
"""

import base64
import binascii
import hmac
from collections.abc import Callable
from typing import Generic, NoReturn, Protocol, TypeVar

import msgspec

from baton.core.errors import BadTransferParams
from baton.core.identity import KVIdentity, differences, differs_in_weights_only
from baton.core.reasons import Fault
from baton.core.transfer_params import FIELD


class BadSignedToken(BadTransferParams):
    """A signed token that is not valid, or not for this engine or request."""

    key = ""  # The token's name in kv_transfer_params.

    def __init__(self, reason: Fault, message: str) -> None:
        super().__init__(message, field=f"{FIELD}.{self.key}", reason=reason)


class _Head(msgspec.Struct, array_like=True):
    """The part that every version of every body has in common."""

    version: int


class SignedToken(Protocol):
    @property
    def version(self) -> int: ...


P = TypeVar("P", bound=SignedToken)

_encoder = msgspec.msgpack.Encoder()
_text_decoder = msgspec.msgpack.Decoder(tuple[bytes, bytes])
_head_decoder = msgspec.msgpack.Decoder(_Head)
_STANDARD = bytes.maketrans(b"-_", b"+/")  # Translation from the characters of base64url.
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class TokenSigner(Generic[P]):
    """Signs and opens one kind of token."""

    def __init__(
        self,
        kind: type[P],
        error: Callable[[Fault, str], BadSignedToken],
        *,
        version: int,
        max_chars: int,
        purpose: bytes,
    ) -> None:
        """`purpose` keeps a token of one kind from being accepted as another kind under the same key."""
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._error = error
        self._version = version
        self._max_chars = max_chars
        self._purpose = purpose

    def sign(self, token: P, key: bytes | None) -> str:
        body = _encoder.encode(token)
        text = base64.urlsafe_b64encode(_encoder.encode((body, self._mac(body, key)))).decode("ascii")
        assert len(text) <= self._max_chars, f"a token of {len(text)} characters"
        return text

    def open(self, text: str, key: bytes | None, previous_key: bytes | None = None) -> P:
        """Raises the error that `error` makes. `previous_key` is accepted too, while a secret is replaced."""
        if not 0 < len(text) <= self._max_chars:
            raise self._error(Fault.SIZE, f"must have 1 to {self._max_chars} characters, has {len(text)}")
        try:
            signed = binascii.a2b_base64(text.encode("ascii").translate(_STANDARD), strict_mode=True)
            body, mac = _text_decoder.decode(signed)
            version = _head_decoder.decode(body).version
        except (*_MALFORMED, binascii.Error, UnicodeEncodeError) as error:
            self._malformed(error)
        if version != self._version:
            raise self._error(
                Fault.VERSION,
                f"has version {version}, this engine reads version {self._version}; run the same release of "
                "Baton on both engines",
            )
        try:
            token = self._decoder.decode(body)
        except _MALFORMED as error:
            self._malformed(error)
        accepted = hmac.compare_digest(mac, self._mac(body, key))
        if not accepted and previous_key is not None:
            accepted = hmac.compare_digest(mac, self._mac(body, previous_key))
        if not accepted:
            raise self._error(Fault.SIGNATURE, _signature_message(mac, key))
        return token

    def _mac(self, body: bytes, key: bytes | None) -> bytes:
        return b"" if key is None else hmac.digest(key, self._purpose + body, "sha256")

    def _malformed(self, error: Exception) -> NoReturn:
        raise self._error(Fault.SCHEMA, f"is malformed: {error}") from error


def check_identity(
    error: Callable[[Fault, str], BadSignedToken],
    ours: KVIdentity,
    theirs: KVIdentity,
    *,
    converts_dtype: bool,
) -> None:
    """Raises what `error` makes, unless this engine can use the KV of a token's signer."""
    different = "; ".join(differences(ours, theirs, converts_dtype=converts_dtype))
    if not different:
        return
    if differs_in_weights_only(ours, theirs, converts_dtype=converts_dtype):
        raise error(Fault.WEIGHTS, f"is for other weights: an update of weights is under way ({different})")
    raise error(Fault.MODEL, f"is for another model ({different})")


def check_range(what: str, value: int, low: int, high: int) -> None:
    """Raises ValueError unless `value` is in [low, high]."""
    if not low <= value <= high:
        raise ValueError(f"{what} is {value}, expected {low} to {high}")


def _signature_message(mac: bytes, key: bytes | None) -> str:
    if key is None:
        return "is signed, and this engine runs with insecure_no_secret; give both the same BATON_SECRET"
    if not mac:
        return "is not signed; give both engines the same BATON_SECRET"
    return (
        "has a wrong signature; it was altered, or the engines have different secrets: "
        "set BATON_SECRET to the same value on both"
    )
