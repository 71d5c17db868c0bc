"""`cached_tokens` of a request in push: the prompt tokens that D or P had in their caches.

    usage of D's answer + kv_transfer_params of P's answer --> usage for the client

D computes the number from P's params in pull. D's leg leaves before P has answered in push, so D reports the
hits of its own cache only, and the router adds P's. The router does not wait for P: if P has not answered
when D sends its usage, D's number stays.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from baton.core.errors import BadTransferParams
from baton.core.json_text import NotJson, decode_json
from baton.core.transfer_params import cached_tokens, parse_cached_tokens
from baton.router.values.sse import RawObject, data_of, sse_event

_DETAILS = "prompt_tokens_details"
_MARK = b'"transferred_tokens"'  # Only final usages of Baton's engines have it.


def with_prefill_hits(body: bytes, lent: Mapping[str, Any] | None) -> bytes:
    """D's whole answer for the client. `lent`: the params of P's answer in a push, if it has come."""
    counted = count_prefill_hits(body, lent) if lent else None
    return body if counted is None else msgspec.json.encode(counted)


def event_with_prefill_hits(event: bytes, lent: Mapping[str, Any] | None) -> bytes:
    """An event of D's stream for the client."""
    counted = count_prefill_hits(data_of(event), lent) if lent and _MARK in event else None
    return event if counted is None else sse_event(counted)


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
        return None  # The answer is not in the form of Baton's engines.
    details["cached_tokens"] = cached_tokens(own, transferred, at_prefill)
    usage[_DETAILS] = msgspec.Raw(msgspec.json.encode(details))
    return {**answer, "usage": msgspec.Raw(msgspec.json.encode(usage))}
