"""`POST /v1/completions`: from request body to answer, whole or streamed."""

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import UNSET, UnsetType

from baton.core.errors import UserError
from baton.engine.api import PromptLogprobs, TokenLogprobs
from baton.server.collect import TokenCount, TokenNames, collect, prompt_header
from baton.server.logprobs import LogprobFormat
from baton.server.protocol.completion import (
    DEFAULT_MAX_TOKENS,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from baton.server.protocol.sampling import check_logprobs
from baton.server.protocol.usage import Usage
from baton.server.samples import Piece, RunningSamples, Sample
from baton.server.service import Service
from baton.server.tokens import check_room


@dataclass(frozen=True, slots=True)
class CompletionWork:
    """An admitted request: its fields are valid; only the engine can still refuse it."""

    service: Service
    request: CompletionRequest
    samples: Sequence[Sample]
    echoes: Sequence[str]  # By prompt; empty strings without `echo`.
    id: str
    created: int
    headers: dict[str, str] = field(default_factory=dict)  # Of the answer; known with the first token.

    async def answer(self) -> Completion:
        async with RunningSamples(self.service.engine, self.samples, self.service.metrics) as running:
            answer = await collect(running, self.samples)
        self.headers.update(answer.headers)
        return self.body(
            choices=[
                CompletionChoice(
                    index=choice.sample.index,
                    text=self.text(choice.sample, choice.text, is_first=True),
                    logprobs=await self.logprobs(choice.sample, choice.logprobs, choice.prompt_logprobs),
                    finish_reason=choice.finish.reason,
                    stop_reason=choice.finish.stop_reason,
                    token_ids=choice.token_ids if self.request.return_token_ids else UNSET,
                    prompt_token_ids=self.prompt_token_ids(choice.sample),
                    prompt_logprobs=(
                        UNSET
                        if choice.prompt_logprobs is None
                        else await self._format.prompt(choice.prompt_logprobs)
                    ),
                )
                for choice in answer.choices
            ],
            usage=answer.usage,
            kv_transfer_params=answer.kv_transfer_params,
        )

    async def chunks(self) -> AsyncGenerator[Completion, None]:
        count = TokenCount(self.samples)
        stream = _ChunkStream(self, count, await self._num_chars_given())
        async with RunningSamples(self.service.engine, self.samples, self.service.metrics) as running:
            async for piece in running.pieces():
                count.add(piece)
                if not self.headers:
                    self.headers.update(prompt_header(piece))
                if (chunk := await stream.chunk(piece)) is not None:
                    yield chunk
        if self.request.includes_usage:
            yield self.body(choices=[], usage=count.usage())

    def body(self, *, choices: list[CompletionChoice], **fields: Any) -> Completion:
        return Completion(
            id=self.id, created=self.created, model=self.service.model_name, choices=choices, **fields
        )

    @property
    def shows_prompt_only(self) -> bool:
        """Return whether only the prompt is shown; the engine must generate one token all the same."""
        return bool(self.request.echo) and self.request.max_tokens == 0

    def text(self, sample: Sample, generated: str, *, is_first: bool) -> str:
        echo = self.echoes[sample.prompt_index] if is_first else ""
        return echo if self.shows_prompt_only else echo + generated

    async def logprobs(
        self,
        sample: Sample,
        logprobs: Sequence[TokenLogprobs],
        prompt_logprobs: PromptLogprobs | None,
        *,
        offset: int = 0,
    ) -> CompletionLogprobs | None:
        """`prompt_logprobs` are shown with an echo. `offset`: characters of the tokens shown before."""
        num_top = self.request.logprobs
        if num_top is None:
            return None
        if not self.request.echo or prompt_logprobs is None:
            return self._format.completion(logprobs, num_top=num_top, offset=offset)
        first_token_id = sample.request.prompt_token_ids[0]
        shown = () if self.shows_prompt_only else logprobs
        return await self._format.echo(first_token_id, prompt_logprobs, shown, num_top=num_top)

    async def _num_chars_given(self) -> dict[int, int]:
        """By choice that another engine has begun: characters of the tokens that the client has."""
        chars: dict[int, int] = {}
        for sample in self.samples:
            if given := sample.request.output_token_ids:
                counted = given if self.request.logprobs is not None else []
                chars[sample.index] = await self.service.encoder.in_thread(
                    partial(self._format.num_chars, counted)
                )
        return chars

    @property
    def _format(self) -> LogprobFormat:
        return LogprobFormat(
            self.service.tokenizer, as_token_ids=bool(self.request.return_tokens_as_token_ids)
        )

    def prompt_token_ids(self, sample: Sample) -> list[int] | UnsetType:
        return sample.request.prompt_token_ids if self.request.return_token_ids else UNSET


class _ChunkStream:
    """Makes the chunks of a stream, with the state of each choice."""

    def __init__(self, work: CompletionWork, count: TokenCount, num_chars_given: dict[int, int]) -> None:
        self._work = work
        self._count = count
        self._num_shown = num_chars_given  # By choice begun: characters of its tokens so far, for offsets.
        self._names = TokenNames(wants_all=bool(work.request.return_token_ids))

    async def chunk(self, piece: Piece) -> Completion | None:
        """Return None if the piece has nothing to show yet."""
        work, sample = self._work, piece.sample
        is_first = sample.index not in self._num_shown
        text = work.text(sample, piece.text, is_first=is_first)
        names_ids = self._names.add(piece, is_first=is_first)
        if not (text or piece.finish or names_ids or work.request.logprobs is not None):
            return None
        offset = self._num_shown.get(sample.index, 0)
        logprobs = await work.logprobs(sample, piece.logprobs, piece.prompt_logprobs, offset=offset)
        self._num_shown[sample.index] = offset + sum(map(len, logprobs.tokens if logprobs else ()))
        usage: Usage | UnsetType | None = None if work.request.includes_usage else UNSET
        if work.request.includes_continuous_usage:
            usage = self._count.usage_of(sample)
        finish = piece.finish
        return work.body(
            choices=[
                CompletionChoice(
                    index=sample.index,
                    text=text,
                    logprobs=logprobs,
                    finish_reason=finish.reason if finish else None,
                    stop_reason=finish.stop_reason if finish else None,
                    token_ids=self._names.take(piece),
                    prompt_token_ids=work.prompt_token_ids(sample) if is_first else UNSET,
                )
            ],
            usage=usage,
            kv_transfer_params=(finish.kv_transfer_params if finish else None) or UNSET,
        )


async def admit_completion(service: Service, request: CompletionRequest, request_id: str) -> CompletionWork:
    """Check the request and make its samples. Raises UserError or ApiError before the engine has the
    request.
    """
    service.check_model(request.model)
    if (request.best_of or request.num_samples) != request.num_samples:
        raise UserError("must be equal to n", field="best_of")
    logprobs = check_logprobs(request.logprobs, "logprobs")
    prompt_logprobs = request.checked_prompt_logprobs
    if prompt_logprobs is None and request.echo:
        prompt_logprobs = logprobs
    prompts = request.prompts()
    special = request.add_special_tokens is not False
    encoded: list[list[int]] = []
    for index, prompt in enumerate(prompts):
        field = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
        token_ids = await service.encoder.encode(prompt, add_special_tokens=special, field=field)
        if request.truncate_prompt_tokens is None:  # Checked before time is spent on the next prompt.
            check_room(token_ids, service.model_config.max_model_len, field=field)
        encoded.append(token_ids)
    kept = [request.truncate(token_ids, service.model_config.max_model_len) for token_ids in encoded]
    # An explicit null means the default too: JSON clients send it for "not set".
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    samples = service.make_samples(
        request,
        kept,
        request_id=f"cmpl-{request_id}",
        max_tokens=max(1, max_tokens) if request.echo else max_tokens,
        max_tokens_field="max_tokens",
        logprobs=logprobs,
        prompt_field="prompt",
        prompt_logprobs=prompt_logprobs,
        bad_words=await service.encoder.encode_bad_words(request.checked_bad_words),
    )
    await service.replay_given(samples)
    echoes = [""] * len(prompts)
    if request.echo and not request.return_token_ids:  # As in vLLM, the ids replace the text.
        echoes = [
            prompt
            if isinstance(prompt, str) and len(token_ids) == len(whole)
            # As in vLLM, special tokens are shown if the client has sent them.
            else await service.encoder.decode(
                token_ids, "prompt", skip_special_tokens=isinstance(prompt, str)
            )
            for prompt, whole, token_ids in zip(prompts, encoded, kept, strict=True)
        ]
    return CompletionWork(service, request, samples, echoes, f"cmpl-{request_id}", int(time.time()))
