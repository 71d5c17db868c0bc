"""First tokens of an answer, handed over from the engine that prefills to the engine that decodes.

    P   prefilled_by(request) --> ticket --> take_prefilled_tokens   D   accept(prefilled, request)

D appends them as if it had sampled them itself, so it accepts only tokens that it would have chosen in the
same way: `sampling` is a digest of every parameter that affects the choice. If a proxy changes one of them
on the prefill leg (no `min_tokens`, no `logprobs`), D computes one position itself.
"""

import hashlib
from collections.abc import Iterable, Sequence

import msgspec

from baton.core.prefilled import MAX_PREFILLED_TOKENS, PrefilledLogprobs, PrefilledTokens
from baton.engine.api import SamplingParams, TokenLogprobs

DIGEST_BYTES = 16


class AcceptedTokens(msgspec.Struct, frozen=True):
    """Handed-over tokens that a request may append, with logprobs if its client wants them."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None


def prefilled_by(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    params: SamplingParams,
    stop_token_ids: Iterable[int],
) -> PrefilledTokens | None:
    """The sampled tokens of a request; None if there are none, or more than MAX_PREFILLED_TOKENS."""
    if not 1 <= len(token_ids) <= MAX_PREFILLED_TOKENS:
        return None
    shown = None
    if len(logprobs) == len(token_ids):
        shown = msgspec.convert(logprobs, tuple[PrefilledLogprobs, ...], from_attributes=True)
    return PrefilledTokens(tuple(token_ids), shown, sampling_digest(params, stop_token_ids, len(token_ids)))


def accept(
    prefilled: PrefilledTokens, params: SamplingParams, stop_token_ids: Iterable[int], vocab_size: int
) -> AcceptedTokens | None:
    """The tokens that this engine may append.

    None: these parameters would sample differently, or the client asked for logprobs that are missing.
    """
    token_ids = list(prefilled.token_ids)
    digest = sampling_digest(params, stop_token_ids, len(token_ids))
    if prefilled.sampling != digest or max(token_ids) >= vocab_size:
        return None
    wanted = params.logprobs
    if wanted is None:
        return AcceptedTokens(token_ids, None)
    num_top = min(wanted, vocab_size)
    if prefilled.logprobs is None or any(len(entry.top) < num_top for entry in prefilled.logprobs):
        return None
    logprobs = msgspec.convert(prefilled.logprobs, list[TokenLogprobs], from_attributes=True)
    return AcceptedTokens(token_ids, [TokenLogprobs(entry.chosen, entry.top[:num_top]) for entry in logprobs])


def sampling_digest(params: SamplingParams, stop_token_ids: Iterable[int], num_tokens: int) -> bytes:
    """Digest of all parameters that affect the first `num_tokens` of the output, given the prompt."""
    drawn_by = (params.temperature, params.top_p, params.top_k, params.min_p, params.seed)
    draw = None if params.is_greedy else drawn_by
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    num_blocked = min(params.min_tokens, num_tokens)  # Positions at which nothing may end the output.
    blocked = sorted(stop_token_ids) if num_blocked else []
    barred = (params.allowed_token_ids, params.bad_words_token_ids)
    deciding: tuple[object, ...] = (draw, penalties, sorted(params.logit_bias.items()))
    deciding += (num_blocked, blocked, barred)
    if params.grammar is not None:
        deciding += (params.grammar,)
    return hashlib.blake2b(msgspec.msgpack.encode(deciding), digest_size=DIGEST_BYTES).digest()
