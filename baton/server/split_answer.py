"""One answer from two engines: the first token from P, or the rest of an answer whose engine has failed.

A router asks for the first token with

    kv_transfer_params: {"baton_first_token": true, ...}

on both legs, whose bodies are otherwise the client's own, limits included:

    P  (do_remote_decode)  ends after the first token. Unless that ends the answer, `finish_reason` is null
                           and text that is held back (a part of a character, or of a stop string) stays so:
                           D holds it back too, and shows it with the next token.
    D                      as usual. Both send the chunk of the first token even if it has no text, with its
                           `token_ids`, so that a router can compare them.

To be able to continue a stream, it asks with

    kv_transfer_params: {"baton_token_ids": true, ...}

for the `token_ids` of each chunk; the chunks are otherwise those that the client would get. An id whose text
is held back is in the next chunk. If the engine fails, the router asks another one with the same body and

    kv_transfer_params: {"baton_output_token_ids": [...], ...}

Those tokens are the beginning of the answer. They count as if this engine had sampled them: for limits,
penalties, draws, stop strings, offsets and usage. The stream has what comes after them, and no opening.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton.core.errors import UserError
from baton.core.transfer_params import FIELD
from baton.engine.api import SamplingParams

KEY = "baton_first_token"
TOKEN_IDS = "baton_token_ids"
OUTPUT_TOKEN_IDS = "baton_output_token_ids"


def is_asked(raw: Mapping[str, Any] | None) -> bool:
    """Return whether the request has the flag `baton_first_token`. Raises UserError."""
    return _flag(raw, KEY)


def names_token_ids(raw: Mapping[str, Any] | None) -> bool:
    """Return whether each chunk is to have its token ids. Raises UserError."""
    return _flag(raw, TOKEN_IDS)


def output_of(raw: Mapping[str, Any] | None) -> list[int]:
    """Return the tokens of the answer that another engine has given. Raises UserError."""
    value = (raw or {}).get(OUTPUT_TOKEN_IDS)
    if value is None:
        return []
    if not (isinstance(value, list) and value and all(type(token_id) is int for token_id in value)):
        raise bad_output("must be a list of token ids, at least one")
    if is_asked(raw):
        raise bad_output(f"cannot be combined with {KEY}; send one of the two")
    return value


def check_output(
    token_ids: Sequence[int], params: SamplingParams, *, vocab_size: int, eos_token_ids: Sequence[int]
) -> None:
    """Raises UserError if the answer cannot go on after these tokens."""
    if not all(0 <= token_id < vocab_size for token_id in token_ids):
        raise bad_output(f"has a token id outside the vocabulary, [0, {vocab_size})")
    if len(token_ids) >= params.max_tokens:
        raise bad_output(
            f"has {len(token_ids)} tokens, and the answer ends after {params.max_tokens}; send fewer"
        )
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    if not ends.isdisjoint(token_ids[max(0, params.min_tokens - 1) :]):
        raise bad_output("has a token that ends the answer; nothing comes after it")


def bad_output(problem: str) -> UserError:
    return UserError(problem, field=f"{FIELD}.{OUTPUT_TOKEN_IDS}")


def first_of(params: SamplingParams) -> SamplingParams:
    """Return params that choose only the first token of an answer, exactly as in the whole answer."""
    return msgspec.structs.replace(params, max_tokens=1, min_tokens=min(1, params.min_tokens))


def _flag(raw: Mapping[str, Any] | None, key: str) -> bool:
    value = (raw or {}).get(key)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"must be true or false, not {type(value).__name__}", field=f"{FIELD}.{key}")
    return bool(value)
