"""The first tokens of an answer, handed from the engine that prefilled to the one that decodes.

    P   prefilled_by(request) --> ticket --> take_prefilled_tokens   D   accept(prefilled, request)

D appends them as if it had sampled them itself, so it takes only tokens that it would have chosen in the same
way: `sampling` is a digest of every parameter that has a say in the choice. A proxy that changes one of them
on the prefill leg (no `min_tokens`, no `logprobs`) thereby costs D a position to compute, and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import msgspec

from baton.core.prefilled import MAX_PREFILLED_TOKENS, PrefilledLogprob, PrefilledLogprobs, PrefilledTokens
from baton.engine.api import SamplingParams, TokenLogprob, TokenLogprobs

DIGEST_BYTES = 16


class AcceptedTokens(msgspec.Struct, frozen=True):
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None


def prefilled_by(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    params: SamplingParams,
    stop_token_ids: Iterable[int],
) -> PrefilledTokens | None:
    """What this engine has sampled for a request; None if nothing, or more than an engine takes."""
    if not 1 <= len(token_ids) <= MAX_PREFILLED_TOKENS:
        return None
    return PrefilledTokens(
        tuple(token_ids),
        tuple(map(_to_paper, logprobs)) if len(logprobs) == len(token_ids) else None,
        sampling_digest(params, stop_token_ids, len(token_ids)),
    )


def accept(
    prefilled: PrefilledTokens, params: SamplingParams, stop_token_ids: Iterable[int], vocab_size: int
) -> AcceptedTokens | None:
    """None: a request with these parameters would have sampled others, or its client asked for more."""
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
    return AcceptedTokens(token_ids, [_from_paper(entry, num_top) for entry in prefilled.logprobs])


def sampling_digest(params: SamplingParams, stop_token_ids: Iterable[int], num_tokens: int) -> bytes:
    """Of what decides the first `num_tokens` of the output, given the prompt."""
    drawn_by = (params.temperature, params.top_p, params.top_k, params.min_p, params.seed)
    draw = None if params.is_greedy else drawn_by
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    num_blocked = min(params.min_tokens, num_tokens)  # Positions at which nothing may end the output.
    blocked = sorted(stop_token_ids) if num_blocked else []
    barred = (params.allowed_token_ids, params.bad_words_token_ids)
    deciding = (draw, penalties, sorted(params.logit_bias.items()), num_blocked, blocked, barred)
    return hashlib.blake2b(msgspec.msgpack.encode(deciding), digest_size=DIGEST_BYTES).digest()


def _to_paper(entry: TokenLogprobs) -> PrefilledLogprobs:
    return PrefilledLogprobs(_copy(entry.chosen), tuple(map(_copy, entry.top)))


def _copy(entry: TokenLogprob) -> PrefilledLogprob:
    return PrefilledLogprob(entry.token_id, entry.logprob, entry.rank)


def _from_paper(entry: PrefilledLogprobs, num_top: int) -> TokenLogprobs:
    chosen, *top = (
        TokenLogprob(one.token_id, one.logprob, one.rank) for one in (entry.chosen, *entry.top[:num_top])
    )
    return TokenLogprobs(chosen, tuple(top))
