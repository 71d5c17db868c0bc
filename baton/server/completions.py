"""`POST /v1/completions`: from request body to answer, whole or streamed."""

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
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
    echoes: Sequence[str]  # Texts by prompt; empty strings without `echo`.
    id: str
    created: int
    headers: dict[str, str] = field(default_factory=dict)  # The answer's headers; known with the first token.

    async def answer(self) -> Completion:
        async with RunningSamples(self.service.engine, self.samples, self.service.metrics) as running:
            answer = await collect(running, self.samples)
        self.headers.update(answer.headers)
        return self.body(
            choices=[
                CompletionChoice(
                    index=choice.sample.index,
                    text=self.text(choice.sample, choice.text, is_first=True),
                    logprobs=await self.logprobs(
                        self.new_format(),
                        choice.sample,
                        choice.logprobs,
                        choice.prompt_logprobs,
                        is_whole=True,
                    ),
                    finish_reason=choice.finish.reason,
                    stop_reason=choice.finish.stop_reason,
                    token_ids=choice.token_ids if self.request.return_token_ids else UNSET,
                    prompt_token_ids=self.prompt_token_ids(choice.sample),
                    prompt_logprobs=(
                        UNSET
                        if choice.prompt_logprobs is None
                        else await self.new_format().prompt(
                            choice.sample.request.prompt_token_ids[0], choice.prompt_logprobs
                        )
                    ),
                )
                for choice in answer.choices
            ],
            usage=answer.usage,
            kv_transfer_params=answer.kv_transfer_params,
        )

    async def chunks(self) -> AsyncGenerator[Completion, None]:
        count = TokenCount(self.samples)
        stream = _ChunkStream(self, count, await self.service.formats_begun(self.request, self.samples))
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
        form: LogprobFormat,
        sample: Sample,
        logprobs: Sequence[TokenLogprobs],
        prompt_logprobs: PromptLogprobs | None,
        *,
        is_whole: bool,
    ) -> CompletionLogprobs | None:
        """`form`: this choice's format. `prompt_logprobs` are shown with an echo.

        `is_whole`: the sample's text has ended.
        """
        num_top = self.request.logprobs
        if num_top is None:
            return None
        before = None
        echo = self.echoes[sample.prompt_index]
        if self.request.echo and prompt_logprobs is not None:
            first_token_id = sample.request.prompt_token_ids[0]
            before = await form.echo(echo, first_token_id, prompt_logprobs, num_top=num_top)
            if self.shows_prompt_only:
                return before
        text_end = len(echo) + sample.text.num_chars if is_whole else None
        after = form.completion(logprobs, num_top=num_top, text_end=text_end)
        if before is None:
            return after
        return CompletionLogprobs(
            **{name: getattr(before, name) + getattr(after, name) for name in after.__struct_fields__}
        )

    def new_format(self) -> LogprobFormat:
        return self.service.logprob_format(self.request)

    def prompt_token_ids(self, sample: Sample) -> list[int] | UnsetType:
        return sample.request.prompt_token_ids if self.request.return_token_ids else UNSET


class _ChunkStream:
    """Makes the chunks of a stream, with the state of each choice."""

    def __init__(self, work: CompletionWork, count: TokenCount, formats: dict[int, LogprobFormat]) -> None:
        self._work = work
        self._count = count
        self._formats = formats  # Formats of the choices that have begun, by index.
        self._names = TokenNames(wants_all=bool(work.request.return_token_ids))

    async def chunk(self, piece: Piece) -> Completion | None:
        """Return None if the piece has nothing to show yet."""
        work, sample = self._work, piece.sample
        is_first = sample.index not in self._formats
        text = work.text(sample, piece.text, is_first=is_first)
        names_ids = self._names.add(piece, is_first=is_first)
        if not (text or piece.finish or names_ids or work.request.logprobs is not None):
            return None
        if is_first:
            self._formats[sample.index] = work.new_format()
        logprobs = await work.logprobs(
            self._formats[sample.index],
            sample,
            piece.logprobs,
            piece.prompt_logprobs,
            is_whole=piece.finish is not None,
        )
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
        max_tokens=1 if request.echo and max_tokens == 0 else max_tokens,
        max_tokens_field="max_tokens",
        logprobs=logprobs,
        prompt_field="prompt",
        prompt_logprobs=prompt_logprobs,
        bad_words=await service.encoder.encode_bad_words(request.checked_bad_words),
        grammar=await service.grammar_of(request.constraint),
    )
    await service.replay_given(samples)
    echoes = [""] * len(prompts)
    if request.echo and not request.return_token_ids:  # The ids replace the text, as in vLLM.
        echoes = [
            prompt
            if isinstance(prompt, str) and len(token_ids) == len(whole)
            # Special tokens are shown if the client has sent them, as in vLLM.
            else await service.encoder.decode(
                token_ids, "prompt", skip_special_tokens=isinstance(prompt, str)
            )
            for prompt, whole, token_ids in zip(prompts, encoded, kept, strict=True)
        ]
    return CompletionWork(service, request, samples, echoes, f"cmpl-{request_id}", int(time.time()))
