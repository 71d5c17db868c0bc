"""`POST /v1/completions`: from body to answer, whole or streamed."""

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET, UnsetType

from baton.core.errors import UserError
from baton.engine.api import TokenLogprobs
from baton.server.collect import TokenCount, collect
from baton.server.logprobs import LogprobFormat
from baton.server.protocol.completion import (
    DEFAULT_MAX_TOKENS,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from baton.server.protocol.parse import refuse_unsupported
from baton.server.protocol.sampling import check_logprobs
from baton.server.samples import Piece, RunningSamples, Sample
from baton.server.service import Service


@dataclass(frozen=True, slots=True)
class CompletionWork:
    """An admitted request: nothing about it can be the client's fault any more, but what the engine finds."""

    service: Service
    request: CompletionRequest
    samples: Sequence[Sample]
    echoes: Sequence[str]  # By prompt; empty strings without `echo`.
    id: str
    created: int

    async def answer(self) -> Completion:
        async with RunningSamples(self.service.engine, self.samples, self.service.metrics) as running:
            answer = await collect(running, self.samples)
        return self.body(
            choices=[
                CompletionChoice(
                    index=choice.sample.index,
                    text=self.echoes[choice.sample.prompt_index] + choice.text,
                    logprobs=self.logprobs(
                        choice.logprobs, offset=len(self.echoes[choice.sample.prompt_index])
                    ),
                    finish_reason=choice.finish.reason,
                    stop_reason=choice.finish.stop_reason,
                    token_ids=choice.token_ids if self.request.return_token_ids else UNSET,
                    prompt_token_ids=self.prompt_token_ids(choice.sample),
                )
                for choice in answer.choices
            ],
            usage=answer.usage,
            kv_transfer_params=answer.kv_transfer_params,
        )

    async def chunks(self) -> AsyncGenerator[Completion, None]:
        count = TokenCount(self.samples)
        stream = _ChunkStream(self)
        async with RunningSamples(self.service.engine, self.samples, self.service.metrics) as running:
            async for piece in running.pieces():
                count.add(piece)
                if (chunk := stream.chunk(piece)) is not None:
                    yield chunk
        if self.request.includes_usage:
            yield self.body(choices=[], usage=count.usage())

    def body(self, *, choices: list[CompletionChoice], **fields: Any) -> Completion:
        return Completion(
            id=self.id, created=self.created, model=self.service.model_name, choices=choices, **fields
        )

    def logprobs(self, logprobs: Sequence[TokenLogprobs], *, offset: int) -> CompletionLogprobs | None:
        num_top = self.request.logprobs
        if num_top is None:
            return None
        return LogprobFormat(self.service.tokenizer).completion(logprobs, num_top=num_top, offset=offset)

    def prompt_token_ids(self, sample: Sample) -> list[int] | UnsetType:
        return sample.request.prompt_token_ids if self.request.return_token_ids else UNSET


class _ChunkStream:
    """Makes chunks; knows what each choice has shown so far."""

    def __init__(self, work: CompletionWork) -> None:
        self._work = work
        self._num_shown: dict[int, int] = {}  # By choice: characters of its tokens so far, for offsets.

    def chunk(self, piece: Piece) -> Completion | None:
        """None when the piece has nothing to show yet."""
        work, sample = self._work, piece.sample
        is_first = sample.index not in self._num_shown
        echo = work.echoes[sample.prompt_index] if is_first else ""
        wants_ids = work.request.return_token_ids or (is_first and sample.names_first_token)
        wants_tokens = wants_ids or work.request.logprobs is not None
        if not (echo or piece.text or piece.finish or wants_tokens):
            return None
        offset = self._num_shown.get(sample.index, 0) + len(echo)
        logprobs = work.logprobs(piece.logprobs, offset=offset)
        self._num_shown[sample.index] = offset + sum(map(len, logprobs.tokens if logprobs else ()))
        finish = piece.finish
        return work.body(
            choices=[
                CompletionChoice(
                    index=sample.index,
                    text=echo + piece.text,
                    logprobs=logprobs,
                    finish_reason=finish.reason if finish else None,
                    stop_reason=finish.stop_reason if finish else None,
                    token_ids=piece.token_ids if wants_ids else UNSET,
                    prompt_token_ids=work.prompt_token_ids(sample) if is_first else UNSET,
                )
            ],
            usage=None if work.request.includes_usage else UNSET,
            kv_transfer_params=(finish.kv_transfer_params if finish else None) or UNSET,
        )


async def admit_completion(service: Service, request: CompletionRequest, request_id: str) -> CompletionWork:
    """Raises UserError or ApiError; the engine has not heard of the request then."""
    service.check_model(request.model)
    refuse_unsupported(
        {
            "suffix": (request.suffix, "is not supported"),
            "best_of": (
                (request.best_of or request.num_samples) != request.num_samples,
                "must be equal to n",
            ),
        }
    )
    logprobs = check_logprobs(request.logprobs, "logprobs")
    if request.echo and logprobs is not None:
        raise UserError(
            "is not supported together with logprobs: those of the prompt are not computed", field="echo"
        )
    prompts = request.prompts()
    special = request.add_special_tokens is not False
    encoded = [
        await service.encoder.encode(
            prompt, add_special_tokens=special, field="prompt" if len(prompts) == 1 else f"prompt[{index}]"
        )
        for index, prompt in enumerate(prompts)
    ]
    samples = service.make_samples(
        request,
        encoded,
        request_id=f"cmpl-{request_id}",
        # An explicit null asks for the default too: JSON clients send it for "not set".
        max_tokens=DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        max_tokens_field="max_tokens",
        logprobs=logprobs,
        prompt_field="prompt",
    )
    echoes = [""] * len(prompts)
    if request.echo:
        echoes = [
            prompt if isinstance(prompt, str) else service.tokenizer.decode(prompt, skip_special_tokens=True)
            for prompt in prompts
        ]
    return CompletionWork(service, request, samples, echoes, f"cmpl-{request_id}", int(time.time()))
