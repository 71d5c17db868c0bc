"""`cached_tokens` of a request in push: the prompt tokens that D or P had in its cache.

    usage of D's answer + kv_transfer_params of P's answer --> usage for the client

In pull, D computes the number from P's params. In push, D's leg leaves before P has answered, so D reports
the hits of its own cache only, and the router adds P's. The router does not wait for P: if P has not answered
when D sends its usage, D's number stands.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from baton.core.errors import BadTransferParams
from baton.core.json_text import NotJson, decode_json
from baton.core.transfer_params import cached_tokens, parse_cached_tokens
from baton.router.running_legs import PrefillLeg
from baton.router.sse import RawObject, data_of, sse_event
from baton.router.turns import TurnSieve

_DETAILS = "prompt_tokens_details"
_MARK = b'"transferred_tokens"'  # Only final usages of Baton's engines have it.


class CachedTokensSieve:
    """Corrects one answer of D that `sieve` has filtered. `prefill`: the leg that left with D's, in push."""

    def __init__(self, sieve: TurnSieve, prefill: PrefillLeg | None) -> None:
        self._sieve = sieve
        self._prefill = prefill

    def whole(self, body: bytes) -> bytes:
        body = self._sieve.whole(body)
        counted = self._count(body)
        return body if counted is None else msgspec.json.encode(counted)

    def event(self, event: bytes) -> bytes:
        event = self._sieve.event(event)
        counted = self._count(data_of(event)) if _MARK in event else None
        return event if counted is None else sse_event(counted)

    def _count(self, text: bytes) -> RawObject | None:
        return count_prefill_hits(text, self._prefill.lent) if self._prefill and self._prefill.lent else None


def count_prefill_hits(text: bytes, lent: Mapping[str, Any]) -> RawObject | None:
    """`text`: an answer of D or a chunk of it; `lent`: P's params. None if the text stays as it is."""
    try:
        at_prefill = parse_cached_tokens(lent)
        if not at_prefill or _MARK not in text:
            return None
        answer = decode_json(text, RawObject)
        usage = decode_json(answer["usage"], RawObject)
        details = decode_json(usage[_DETAILS], dict[str, int])
        own, transferred = details["cached_tokens"], details["transferred_tokens"]
    except (BadTransferParams, NotJson, KeyError):
        return None  # Not as Baton's engines write it.
    details["cached_tokens"] = cached_tokens(own, transferred, at_prefill)
    usage[_DETAILS] = msgspec.Raw(msgspec.json.encode(details))
    return {**answer, "usage": msgspec.Raw(msgspec.json.encode(usage))}
