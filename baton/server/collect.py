"""Combines pieces into whole choices for an answer that is not streamed, and counts tokens for both kinds."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET, UnsetType

from baton.engine.api import PromptLogprobs, TokenLogprobs
from baton.server.protocol.usage import PromptTokensDetails, Usage
from baton.server.samples import Finish, Piece, RunningSamples, Sample


@dataclass(frozen=True, slots=True)
class Choice:
    """One sample from beginning to end."""

    sample: Sample
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: PromptLogprobs | None
    finish: Finish

    @classmethod
    def of(cls, sample: Sample, pieces: Sequence[Piece]) -> "Choice":
        finish = pieces[-1].finish
        assert finish is not None, "the last piece of a sample has its finish"
        return cls(
            sample=sample,
            text="".join(piece.text for piece in pieces),
            token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
            logprobs=[entry for piece in pieces for entry in piece.logprobs],
            prompt_logprobs=next((p.prompt_logprobs for p in pieces if p.prompt_logprobs is not None), None),
            finish=finish,
        )


class TokenCount:
    """Usage of an answer. A prompt counts once, for any number of samples."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        by_prompt = {sample.prompt_index: len(sample.request.prompt_token_ids) for sample in samples}
        self._num_prompt = sum(by_prompt.values())
        # Generated tokens by sample, with those of another engine.
        self._num_generated = Counter({s.index: len(s.request.output_token_ids) for s in samples})
        self._cached: dict[int, Finish] = {}  # Finish of a prompt's first sample, by prompt.
        self._firsts = {sample.prompt_index: sample.index for sample in reversed(samples)}

    def add(self, piece: Piece) -> None:
        self._num_generated[piece.sample.index] += len(piece.token_ids)
        if piece.finish is not None and self._firsts[piece.sample.prompt_index] == piece.sample.index:
            self._cached[piece.sample.prompt_index] = piece.finish

    def usage_of(self, sample: Sample) -> Usage:
        """Return the usage for `continuous_usage_stats`: one sample's prompt, and its tokens so far."""
        return Usage.of(len(sample.request.prompt_token_ids), self._num_generated[sample.index])

    def usage(self) -> Usage:
        """Return the usage of all samples."""
        return Usage(
            prompt_tokens=self._num_prompt,
            completion_tokens=self._num_generated.total(),
            total_tokens=self._num_prompt + self._num_generated.total(),
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(finish.num_cached_tokens for finish in self._cached.values()),
                transferred_tokens=sum(finish.num_transferred_tokens for finish in self._cached.values()),
            ),
        )


class TokenNames:
    """Token ids in the chunks of a stream, as the client wants them or a router needs them.

    `wants_all`: the client wants them. A chunk that is not sent leaves its ids to the next one of its sample.
    """

    def __init__(self, *, wants_all: bool) -> None:
        self._wants_all = wants_all
        self._waiting: dict[int, list[int]] = {}  # Ids that wait for a chunk, by sample.

    def add(self, piece: Piece, *, is_first: bool) -> bool:
        """Add the piece's ids. Returns whether its chunk is sent even if it has nothing else."""
        sample = piece.sample
        is_sent = self._wants_all or (is_first and sample.ask.names_first)
        if is_sent or (sample.ask.names_tokens and piece.token_ids):
            self._waiting.setdefault(sample.index, []).extend(piece.token_ids)
        return is_sent

    def take(self, piece: Piece) -> list[int] | UnsetType:
        """Return the ids for the chunk of this piece."""
        return self._waiting.pop(piece.sample.index, UNSET)


PROMPT_HEADER = "X-Baton-Prompt"
WEIGHTS_HEADER = "X-Baton-Weights"  # `KVIdentity.weights_id` at the beginning of the answer.
GIVEN_HEADER = "X-Baton-Given"  # Tokens of the answer that this engine continues after.


def prompt_header(piece: Piece) -> dict[str, str]:
    """Return the headers for routers: tokens of the prompt, those cached here, those transferred.

    GIVEN_HEADER has the number of tokens that another engine has given of the answer. An engine that does not
    know them would begin the answer again, and has no such header. A router compares WEIGHTS_HEADER of two
    engines to know whether they answer with the same weights.

    Headers carry the numbers, because a stream's usage comes last, and only if the client asks for it.
    """
    headers = {}
    if given := piece.sample.request.output_token_ids:
        headers[GIVEN_HEADER] = str(len(given))
    if piece.weights_id:
        headers[WEIGHTS_HEADER] = piece.weights_id
    total, transferred = len(piece.sample.request.prompt_token_ids), piece.num_transferred_tokens
    local = max(0, piece.num_cached_tokens - transferred)
    return {**headers, PROMPT_HEADER: f"total={total}; local={local}; transferred={transferred}"}


@dataclass(frozen=True, slots=True)
class Answer:
    """All choices, finished, in the order of their indices."""

    choices: list[Choice]
    usage: Usage
    headers: dict[str, str]

    @property
    def kv_transfer_params(self) -> dict[str, Any] | UnsetType:
        """Params of the answer. At most one choice has any, because a request that lends has one sample."""
        for choice in self.choices:
            if choice.finish.kv_transfer_params is not None:
                return choice.finish.kv_transfer_params
        return UNSET


async def collect(running: RunningSamples, samples: Sequence[Sample]) -> Answer:
    count = TokenCount(samples)
    pieces: dict[int, list[Piece]] = {sample.index: [] for sample in samples}
    async for piece in running.pieces():
        count.add(piece)
        pieces[piece.sample.index].append(piece)
    choices = [Choice.of(sample, pieces[sample.index]) for sample in samples]
    return Answer(choices, count.usage(), prompt_header(pieces[samples[0].index][-1]))
