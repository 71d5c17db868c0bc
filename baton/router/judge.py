"""What an engine's answer means for the request: pure functions."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from baton.core.errors import PeerError
from baton.core.json_text import NotJson, decode_json
from baton.router.first_token import FirstToken
from baton.router.legs import PARAMS, LocalReason
from baton.router.sse import RawObject
from baton.router.upstream import LegAnswer

# Not the client's fault, though in the 4xx range: another engine may have room.
_RETRYABLE_4XX = frozenset({408, 425, 429})
# Bytes of P's answer that are decoded whole, which stops the loop for about 15 ms a MiB. From a longer one
# only the ticket is read, and D says all tokens.
MAX_KEPT = 2 << 20
_NULL = msgspec.Raw(b"null")
PROMPT_HEADER = "x-baton-prompt"  # Tokens of the prompt: all, cached in this engine, loaded from another.
_PROMPT_COUNTS = re.compile(r"total=(\d{1,9}); local=(\d{1,9}); transferred=(\d{1,9})")


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt has been computed (remote), or is left to the decode engine (local)."""

    where: Literal["remote", "local"]
    reason: LocalReason | Literal[""] = ""  # Why local.
    ticket: dict[str, Any] | None = None
    answer: Mapping[str, Any] | None = None  # P's, of one token, if it was asked to be read for it.


@dataclass(frozen=True, slots=True)
class Refused:
    """P's 4xx: what the client asked for cannot be done by any engine."""

    answer: LegAnswer


@dataclass(frozen=True, slots=True)
class Complete:
    """P's first token is the whole answer, which was not to be streamed."""

    answer: LegAnswer


@dataclass(frozen=True, slots=True)
class Unable:
    """This engine could not; another may."""

    reason: str


@dataclass(frozen=True, slots=True)
class FirstSaid:
    """P's stream has said its first token. `head` has its status and headers."""

    head: LegAnswer
    first: FirstToken


PrefillOutcome = Prefilled | Refused | Complete | Unable | FirstSaid


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _ErrorBody(msgspec.Struct):
    param: str | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorBody


def is_engines_fault(answer: LegAnswer) -> bool:
    """Another engine may do better."""
    return answer.status >= 500 or answer.status in _RETRYABLE_4XX


def blames_params(answer: LegAnswer) -> bool:
    """A 400 that names what we put in: engines disagree (role, model, secret), the client cannot mend it."""
    if answer.status != 400:
        return False
    try:
        error = decode_json(answer.body, _ErrorAnswer).error
    except NotJson:
        return False
    return (error.param or "").startswith(PARAMS)


def is_handed_over(answer: LegAnswer) -> bool | None:
    """Whether D has loaded what P lent. None: it does not report it, or needed little of it.

    Baton's engines report in a header what they did with the prompt, because a stream's usage comes last, if
    at all.
    """
    found = _PROMPT_COUNTS.fullmatch(answer.headers.get(PROMPT_HEADER, ""))
    if found is None:
        return None
    total, local, transferred = map(int, found.groups())
    if transferred:
        return True
    return None if 2 * local >= total else False


def read_prefill(answer: LegAnswer, *, may_be_complete: bool, is_kept: bool = False) -> PrefillOutcome:
    """Of an answer that was not streamed. Raises PeerError.

    `may_be_complete`: P was asked for the client's own answer, as far as its first token.
    `is_kept`: the answer goes into the outcome.
    """
    if is_engines_fault(answer) or blames_params(answer):
        return Unable(f"said {answer.status}")
    if answer.status != 200:
        return Refused(answer)
    try:
        parts = decode_json(answer.body, RawObject)
        ticket = decode_json(parts.pop(PARAMS, _NULL))
        if may_be_complete and decode_json(parts.get("choices", _NULL), list[_Choice])[0].finish_reason:
            body = answer.body if ticket is None else msgspec.json.encode(parts)
            return Complete(LegAnswer(answer.status, answer.headers, body, None))
        kept = decode_json(answer.body, dict[str, Any]) if is_kept and len(answer.body) <= MAX_KEPT else None
    except (NotJson, IndexError) as error:
        raise PeerError(f"the prefill engine's answer is no completion: {error}") from error
    if not isinstance(ticket, dict | None):
        raise PeerError(
            f"{PARAMS} in the prefill engine's answer is a {type(ticket).__name__}, not an object"
        )
    return prefilled(ticket, kept)


def prefilled(ticket: dict[str, Any] | None, answer: Mapping[str, Any] | None = None) -> Prefilled:
    if ticket:
        return Prefilled("remote", ticket=ticket, answer=answer)
    return Prefilled("local", "nothing_lent", answer=answer)
