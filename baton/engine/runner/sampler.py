"""Sampler: chooses the next token for each row of logits [B, V] (float32).

    raw logits --> grammar, allowed tokens, bias, min_tokens, bad words, penalties --> greedy rows: argmax
                                               \\-> / temperature --> min-p, top-k, top-p --> draw
    raw logits --> log_softmax                     (what `logprobs` reports)

A draw is a function of the request's seed and the token's absolute position only; there is no other state.
So other requests of a batch cannot change a request's tokens, a preempted request draws the same tokens
again, and an engine that continues another engine's sequence draws the tokens that the other engine would
draw.

Shapes: B rows, V vocabulary, R rows that are drawn at random.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.api import PromptLogprobs, RequestError, SamplingParams, TokenLogprob, TokenLogprobs

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

TOP_P_WIDTH = 1024  # Candidates that are sorted first; if they do not reach p, all of V is sorted.


def seed_of(*parts: object) -> int:
    """A 64-bit seed that depends on every part and on their order."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniforms(seeds: UInt64s, positions: Int64s) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position). SplitMix64's finaliser (Steele et al., 2014), twice."""
    mixed = _mix(seeds + _mix(positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)))
    fractions: npt.NDArray[np.float64] = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return fractions


def _mix(x: UInt64s) -> UInt64s:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class TokenCounts:
    """Number of occurrences of each token in one request's output. Prompt tokens are present with count 0.

    Sparse, because V is large and a request uses few of its tokens.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        self._slot = {token: slot for slot, token in enumerate(dict.fromkeys(prompt))}
        capacity = max(64, 2 * len(self._slot))
        self._tokens = np.zeros(capacity, np.int64)
        self._counts = np.zeros(capacity, np.float32)
        self._tokens[: len(self._slot)] = list(self._slot)
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        slot = self._slot.setdefault(token, len(self._slot))
        if slot == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._tokens[slot] = token
        self._counts[slot] += 1

    @property
    def tokens(self) -> Int64s:
        return self._tokens[: len(self._slot)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        return self._counts[: len(self._slot)]


class Grammar(Protocol):
    """State of one answer in its grammar; see `baton.engine.text.grammar.GrammarState`."""

    @property
    def error(self) -> RequestError | None: ...
    def restart(self, output: Sequence[int]) -> None: ...
    def accept(self, token_id: int) -> None: ...
    def allowed(self) -> npt.NDArray[np.bool_]: ...


@dataclass(slots=True, eq=False)
class SamplingRow:
    """Sampler state of one request. `counts` exists only if a penalty needs it."""

    params: SamplingParams
    seed: int
    num_prompt_tokens: int
    blocked_token_ids: tuple[int, ...]  # Ids that would end the output before `min_tokens`.
    counts: TokenCounts | None
    output: list[int] | None  # The output so far; only if a bad word has several tokens.
    grammar: Grammar | None = None  # Rank 0's, which alone samples.
    _forbidden: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        request_id: str,
        params: SamplingParams,
        *,
        prompt: Sequence[int],
        output: Sequence[int] = (),
        eos_token_ids: Sequence[int],
        engine_seed: int,
        grammar: Grammar | None = None,
    ) -> SamplingRow:
        """`grammar`: in its state before the output."""
        if grammar is not None:
            grammar.restart(output)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        return cls(
            params=params,
            # A request without a seed gets one, so that every draw is made in the same way.
            seed=seed_of(params.seed) if params.seed is not None else seed_of(engine_seed, request_id),
            num_prompt_tokens=len(prompt),
            blocked_token_ids=tuple(sorted(ends)) if params.min_tokens else (),
            counts=TokenCounts(prompt, output) if has_penalties(params) else None,
            output=list(output) if any(len(word) > 1 for word in params.bad_words_token_ids) else None,
            grammar=grammar,
        )

    def recount(self, token_ids: Sequence[int]) -> None:
        """Count prompt and output again, after tokens were dropped."""
        prompt, output = token_ids[: self.num_prompt_tokens], token_ids[self.num_prompt_tokens :]
        if self.counts is not None:
            self.counts = TokenCounts(prompt, output)
        if self.output is not None:
            self.output = list(output)
        if self.grammar is not None:
            self.grammar.restart(output)

    def forbidden(self, vocab_size: int, device: torch.device) -> torch.Tensor:
        """Bool [V]: the tokens that are not in `allowed_token_ids`.

        Computed once, because the list may be long.
        """
        if self._forbidden is None:
            allowed = np.array(self.params.allowed_token_ids, np.int64)
            mask = np.ones(vocab_size, np.bool_)
            mask[allowed[allowed < vocab_size]] = False
            self._forbidden = torch.from_numpy(mask).to(device)
        return self._forbidden

    def banned_token_ids(self) -> list[int]:
        """Tokens that would complete a bad word at this position."""
        output = self.output or []
        return [
            word[-1]
            for word in self.params.bad_words_token_ids
            if len(word) == 1 or (output[-1:] == [word[-2]] and output[1 - len(word) :] == list(word[:-1]))
        ]


def has_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    )


class Sampled(NamedTuple):
    """Token ids and logprobs of a step's rows."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs]  # Logprobs by row, only for rows with `logprobs`.
    errors: dict[int, RequestError]  # Rows whose token means nothing: their requests have to end.


class _Plan:
    """Tensors for `rows`, gathered once and reused while the batch does not change."""

    def __init__(self, rows: list[SamplingRow], vocab_size: int, device: torch.device) -> None:
        def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        self.rows = rows
        self.biased = [
            (row, token, bias)
            for row, state in enumerate(rows)
            for token, bias in state.params.logit_bias.items()
            if 0 <= token < vocab_size
        ]
        self.restricted = [row for row, state in enumerate(rows) if state.params.allowed_token_ids]
        if self.restricted:
            masks = [rows[row].forbidden(vocab_size, device) for row in self.restricted]
            self.forbidden_AV = torch.stack(masks)
        self.constrained = [
            (row, state.grammar) for row, state in enumerate(rows) if state.grammar is not None
        ]
        self.with_bad_words = [row for row, state in enumerate(rows) if state.params.bad_words_token_ids]
        self.blocked = [row for row, state in enumerate(rows) if state.blocked_token_ids]
        self.penalised = [row for row, state in enumerate(rows) if state.counts is not None]
        self.with_logprobs = [row for row, state in enumerate(rows) if state.params.logprobs is not None]
        self.random = [row for row, state in enumerate(rows) if not state.params.is_greedy]
        self.is_adjusted = bool(
            self.biased
            or self.constrained
            or self.restricted
            or self.with_bad_words
            or self.blocked
            or self.penalised
        )
        self.is_plain = not (self.is_adjusted or self.with_logprobs or self.random)
        params = [rows[row].params for row in self.random]
        self.random_index = column(self.random, torch.int64)
        self.temperature = column([p.temperature for p in params], torch.float32)
        self.seeds = np.array([rows[row].seed for row in self.random], np.uint64)
        self.min_p = [p.min_p for p in params]
        self.top_p = [p.top_p for p in params]
        self.top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        self.is_truncated = any(
            min_p > 0 or top_p < 1 or top_k < vocab_size
            for min_p, top_p, top_k in zip(self.min_p, self.top_p, self.top_k, strict=True)
        )


def _argmax(logits_BV: torch.Tensor) -> list[int]:
    """Index of the first largest logit of each row. torch takes up to 20 times as long as numpy on a CPU."""
    if logits_BV.device.type == "cpu":
        token_ids: list[int] = logits_BV.numpy().argmax(axis=-1).tolist()
    else:
        token_ids = logits_BV.argmax(dim=-1).tolist()
    return token_ids


class Sampler:
    """Samples tokens; keeps the tensors of the last batch for the next step."""

    def __init__(self) -> None:
        self._plan: _Plan | None = None

    def sample(self, logits_BV: torch.Tensor, rows: list[SamplingRow], positions: Int64s) -> Sampled:
        """Sample one token per row.

        `positions[b]`: position of row b's new token, its number of tokens so far.
        """
        assert logits_BV.dtype is torch.float32
        assert logits_BV.shape[0] == len(rows) == len(positions)
        plan = self._plan
        if plan is None or (plan.rows is not rows and plan.rows != rows):
            plan = self._plan = _Plan(rows, logits_BV.shape[1], logits_BV.device)
        if plan.is_plain:
            return Sampled(_argmax(logits_BV), {}, {})

        adjusted_BV = _adjust(logits_BV, plan, positions)
        chosen_B = adjusted_BV.argmax(dim=-1)
        if plan.random:
            chosen_B[plan.random_index] = _draw(adjusted_BV[plan.random_index], plan, positions)
        token_ids = chosen_B.tolist()
        for row in plan.penalised:
            counts = rows[row].counts
            assert counts is not None
            counts.add(token_ids[row])
        for row in plan.with_bad_words:
            if (output := rows[row].output) is not None:
                output.append(token_ids[row])
        errors: dict[int, RequestError] = {}
        for row, grammar in plan.constrained:
            if (error := grammar.error) is not None:
                errors[row] = error
            else:
                grammar.accept(token_ids[row])
        return Sampled(token_ids, _logprobs(logits_BV, plan, token_ids), errors)


def _adjust(logits_BV: torch.Tensor, plan: _Plan, positions: Int64s) -> torch.Tensor:
    """Apply all fields except temperature, min-p, top-k and top-p to a copy: logprobs need the raw logits."""
    if not plan.is_adjusted:
        return logits_BV
    blocked = [
        (row, token)
        for row in plan.blocked
        if positions[row] - plan.rows[row].num_prompt_tokens < plan.rows[row].params.min_tokens
        for token in plan.rows[row].blocked_token_ids
        if token < logits_BV.shape[1]
    ]
    blocked += [
        (row, token)
        for row in plan.with_bad_words
        for token in plan.rows[row].banned_token_ids()
        if token < logits_BV.shape[1]
    ]
    logits_BV = logits_BV.clone()
    device = logits_BV.device
    if plan.constrained:
        allowed_GV = torch.from_numpy(np.stack([grammar.allowed() for _, grammar in plan.constrained]))
        index = [row for row, _ in plan.constrained]
        logits_BV[index] = logits_BV[index].masked_fill(~allowed_GV.to(device), -math.inf)
    if plan.restricted:
        logits_BV[plan.restricted] = logits_BV[plan.restricted].masked_fill(plan.forbidden_AV, -math.inf)
    if plan.biased:
        rows, tokens, biases = zip(*plan.biased, strict=True)
        places = (torch.tensor(rows, device=device), torch.tensor(tokens, device=device))
        logits_BV.index_put_(places, torch.tensor(biases, device=device), accumulate=True)
    if blocked:
        rows, tokens = zip(*blocked, strict=True)
        logits_BV[torch.tensor(rows, device=device), torch.tensor(tokens, device=device)] = -math.inf
    if plan.penalised:
        _penalise(logits_BV, [(row, plan.rows[row]) for row in plan.penalised])
    return logits_BV


def _penalise(logits_BV: torch.Tensor, penalised: list[tuple[int, SamplingRow]]) -> None:
    """Apply penalties in place, only to tokens that have occurred."""
    counts_of = [state.counts for _, state in penalised if state.counts is not None]
    lengths = [len(counts.tokens) for counts in counts_of]

    def spread(values: list[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.float32), lengths)).to(logits_BV.device)

    rows = torch.from_numpy(np.repeat(np.array([row for row, _ in penalised]), lengths)).to(logits_BV.device)
    tokens = torch.from_numpy(np.concatenate([c.tokens for c in counts_of])).to(logits_BV.device)
    counts = torch.from_numpy(np.concatenate([c.counts for c in counts_of])).to(logits_BV.device)
    repetition = spread([state.params.repetition_penalty for _, state in penalised])
    presence = spread([state.params.presence_penalty for _, state in penalised])
    frequency = spread([state.params.frequency_penalty for _, state in penalised])
    logits = logits_BV[rows, tokens]
    # Keskar et al., 2019: a penalty above 1 has to lower positive and negative logits.
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits_BV[rows, tokens] = logits - presence * (counts > 0) - frequency * counts


def _draw(logits_RV: torch.Tensor, plan: _Plan, positions: Int64s) -> torch.Tensor:
    logits_RV = logits_RV / plan.temperature[:, None]
    if plan.is_truncated:
        logits_RV = truncate(logits_RV, min_p=plan.min_p, top_k=plan.top_k, top_p=plan.top_p)
    probs_RV = logits_RV.softmax(dim=-1)
    # Inversion: one random number per row instead of V. The result is the first token whose cumulative
    # probability exceeds u * total. A token of probability 0 adds nothing, so it is never the first to
    # exceed.
    cumulative_RV = probs_RV.cumsum(dim=-1)
    u_R = torch.from_numpy(uniforms(plan.seeds, positions[plan.random])).to(cumulative_RV)
    target_R1 = (u_R * cumulative_RV[:, -1])[:, None]
    chosen_R = torch.searchsorted(cumulative_RV, target_R1, right=True)[:, 0]
    # u * total may round up in float32 to the total, which no token exceeds.
    return torch.where(chosen_R < logits_RV.shape[1], chosen_R, probs_RV.argmax(dim=-1))


def truncate(
    logits_RV: torch.Tensor, *, min_p: Sequence[float], top_k: Sequence[int], top_p: Sequence[float]
) -> torch.Tensor:
    """Set the logits to -inf that min-p, then top-k, then top-p exclude. `top_k` is in [1, V].

        min-p   keeps p >= min_p * the largest p
        top-k   keeps logits that are at least the k-th largest
        top-p   of the rest, renormalised: keeps logits that are at least the last member of the smallest set
                of most likely tokens that reaches p

    Equal logits are kept or dropped together, so the result does not depend on the order of a sort.
    """
    V = logits_RV.shape[1]
    device = logits_RV.device
    log_min_p = torch.tensor([math.log(p) if p > 0 else -math.inf for p in min_p], device=device)
    floor_R = logits_RV.amax(dim=-1) + log_min_p
    widest_k = max((k for k in top_k if k < V), default=0)
    has_top_p = any(p < 1 for p in top_p)
    if widest_k or has_top_p:
        width = min(V, max(widest_k, TOP_P_WIDTH if has_top_p else 0))
        floor_R = _floor(logits_RV, floor_R, width, top_k, top_p)
    return logits_RV.masked_fill(logits_RV < floor_R[:, None], -math.inf)


def _floor(
    logits_RV: torch.Tensor,
    floor_R: torch.Tensor,
    width: int,
    top_k: Sequence[int],
    top_p: Sequence[float],
) -> torch.Tensor:
    """The smallest logit that each row keeps, from its `width` largest; from all if these are not enough."""
    R, V = logits_RV.shape
    device = logits_RV.device
    best_RW = logits_RV.topk(width, dim=-1).values
    is_limited_R = torch.tensor([k < V for k in top_k], device=device)
    kth = torch.tensor([min(k, width) - 1 for k in top_k], device=device)
    kth_R = best_RW[torch.arange(R, device=device), kth]
    floor_R = torch.where(is_limited_R, torch.maximum(floor_R, kth_R), floor_R)
    if all(p >= 1 for p in top_p):
        return floor_R

    p_R = torch.tensor(list(top_p), device=device)
    left_RV = logits_RV.masked_fill(logits_RV < floor_R[:, None], -math.inf)
    probs_RW = (best_RW - left_RV.logsumexp(dim=-1, keepdim=True)).exp()
    probs_RW = probs_RW.masked_fill(best_RW < floor_R[:, None], 0.0)
    cumulative_RW = probs_RW.cumsum(dim=-1)
    num_kept_R = ((cumulative_RW - probs_RW) < p_R[:, None]).sum(dim=-1)
    cut_R = best_RW.gather(1, (num_kept_R - 1).clamp(min=0)[:, None])[:, 0]
    result_R = torch.where(p_R < 1, torch.maximum(floor_R, cut_R), floor_R)

    # The set has not reached p, and relevant tokens may be beyond the width: repeat with all of V.
    is_short_R = (p_R < 1) & (cumulative_RW[:, -1] < p_R) & (best_RW[:, -1] >= floor_R)
    if width < V and bool(is_short_R.any()):
        short = is_short_R.nonzero()[:, 0]
        rows: list[int] = short.tolist()
        result_R[short] = _floor(
            logits_RV[short], floor_R[short], V, [top_k[row] for row in rows], [top_p[row] for row in rows]
        )
    return result_R


def _logprobs(logits_BV: torch.Tensor, plan: _Plan, token_ids: list[int]) -> dict[int, TokenLogprobs]:
    if not plan.with_logprobs:
        return {}
    wanted = [plan.rows[row].params.logprobs or 0 for row in plan.with_logprobs]
    logprobs_LV = logits_BV[plan.with_logprobs].log_softmax(dim=-1)
    chosen_ids = [token_ids[row] for row in plan.with_logprobs]
    chosen_L1 = logprobs_LV.gather(1, torch.tensor(chosen_ids, device=logits_BV.device)[:, None])
    ranks: list[int] = ((logprobs_LV > chosen_L1).sum(dim=-1) + 1).tolist()
    chosen: list[float] = chosen_L1[:, 0].tolist()
    top = logprobs_LV.topk(min(max(wanted), logits_BV.shape[1]), dim=-1)
    top_ids: list[list[int]] = top.indices.tolist()
    top_values: list[list[float]] = top.values.tolist()
    return {
        row: TokenLogprobs(
            chosen=TokenLogprob(chosen_ids[i], chosen[i], ranks[i]),
            top=tuple(
                TokenLogprob(token, value, rank)
                for rank, (token, value) in enumerate(
                    zip(top_ids[i][: wanted[i]], top_values[i][: wanted[i]], strict=True), start=1
                )
            ),
        )
        for i, row in enumerate(plan.with_logprobs)
    }


def prompt_logprobs(logits_LV: torch.Tensor, token_ids: Sequence[int], num_top: int) -> PromptLogprobs:
    """Logprobs of `token_ids[i]` and of the `num_top` most likely tokens, from the raw logits of row i."""
    logprobs_LV = logits_LV.log_softmax(dim=-1)
    ids_L1 = torch.tensor(token_ids, device=logits_LV.device)[:, None]
    own_L1 = logprobs_LV.gather(1, ids_L1)
    ranks_L = (logprobs_LV >= own_L1).sum(dim=-1)  # The rank counts equal logprobs too, as in vLLM.
    top = logprobs_LV.topk(min(num_top, logits_LV.shape[1]), dim=-1)
    ids_LW = torch.cat((ids_L1, top.indices), dim=1)
    return PromptLogprobs(
        ids_LW.shape[1],
        ids_LW.to(torch.int32).cpu().numpy().tobytes(),
        torch.cat((own_L1, top.values), dim=1).cpu().numpy().tobytes(),
        ranks_L.to(torch.int32).cpu().numpy().tobytes(),
    )
