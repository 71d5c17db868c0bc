"""The first tokens of an answer, handed from the engine that prefilled to the one that decodes.

    P   prefilled_by(request) --> ticket --> take_prefilled_tokens   D   accept(prefilled, request)

D appends them as if it had sampled them itself, so it takes only tokens that it would have chosen in the same
way: `sampling` is a digest of every parameter that has a say in the choice. A proxy that changes one of them
on the prefill leg (no `min_tokens`, no `logprobs`) thereby costs D a position to compute, and nothing else.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from baton.core.prefilled import MAX_PREFILLED_TOKENS, PrefilledLogprob, PrefilledLogprobs, PrefilledTokens
from baton.engine.api import TokenLogprob, TokenLogprobs

if TYPE_CHECKING:
    from baton.engine.request import Request

DIGEST_BYTES = 16


class AcceptedTokens(msgspec.Struct, frozen=True):
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None


def prefilled_by(request: Request) -> PrefilledTokens | None:
    """What this engine has sampled for the request; None if nothing, or more than anybody takes."""
    token_ids = tuple(request.output_token_ids)
    if not 1 <= len(token_ids) <= MAX_PREFILLED_TOKENS:
        return None
    logprobs = request.output_logprobs
    return PrefilledTokens(
        token_ids,
        tuple(map(_to_paper, logprobs)) if len(logprobs) == len(token_ids) else None,
        sampling_digest(request, len(token_ids)),
    )


def accept(prefilled: PrefilledTokens, request: Request, vocab_size: int) -> AcceptedTokens | None:
    """None: they are not what this request would have sampled, or not all that its client asked for."""
    token_ids = list(prefilled.token_ids)
    if prefilled.sampling != sampling_digest(request, len(token_ids)) or max(token_ids) >= vocab_size:
        return None
    wanted = request.sampling_params.logprobs
    if wanted is None:
        return AcceptedTokens(token_ids, None)
    num_top = min(wanted, vocab_size)
    if prefilled.logprobs is None or any(len(entry.top) < num_top for entry in prefilled.logprobs):
        return None
    return AcceptedTokens(token_ids, [_from_paper(entry, num_top) for entry in prefilled.logprobs])


def sampling_digest(request: Request, num_tokens: int) -> bytes:
    """Of what decides the first `num_tokens` of the output, given the prompt."""
    params = request.sampling_params
    drawn_by = (params.temperature, params.top_p, params.top_k, params.min_p, params.seed)
    draw = None if params.is_greedy else drawn_by
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    num_blocked = min(params.min_tokens, num_tokens)  # Positions at which nothing may end the output.
    blocked = sorted(request.stop_token_ids) if num_blocked else []
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
