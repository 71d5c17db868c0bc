"""`POST /v1/chat/completions`: from request body to answer, whole or streamed."""

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from baton.core.errors import UserError
from baton.engine.api import PromptLogprobs, TokenLogprobs
from baton.server.collect import TokenCount, TokenNames, collect, prompt_header
from baton.server.logprobs import LogprobFormat
from baton.server.protocol.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    Delta,
    plain_messages,
    plain_tools,
)
from baton.server.protocol.sampling import check_logprobs
from baton.server.protocol.usage import Usage
from baton.server.samples import Piece, RunningSamples, Sample
from baton.server.service import Service


@dataclass(frozen=True, slots=True)
class ChatWork:
    """An admitted request: its fields are valid; only the engine can still refuse it."""

    service: Service
    request: ChatRequest
    samples: Sequence[Sample]
    id: str
    created: int
    headers: dict[str, str] = field(default_factory=dict)  # The answer's headers; known with the first token.

    async def answer(self) -> ChatCompletion:
        async with RunningSamples(self.service.engine, self.samples, self.service.metrics) as running:
            answer = await collect(running, self.samples)
        self.headers.update(answer.headers)
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.service.model_name,
            choices=[
                ChatChoice(
                    index=choice.sample.index,
                    message=ChatMessage(content=choice.text),
                    logprobs=self._logprobs(self._new_format(), choice.logprobs),
                    finish_reason=choice.finish.reason,
                    stop_reason=choice.finish.stop_reason,
                    token_ids=choice.token_ids if self.request.return_token_ids else UNSET,
                )
                for choice in answer.choices
            ],
            usage=answer.usage,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=await self._prompt_logprobs(answer.choices[0].prompt_logprobs),
            kv_transfer_params=answer.kv_transfer_params,
        )

    async def chunks(self) -> AsyncGenerator[ChatChunk, None]:
        count = TokenCount(self.samples)
        names = TokenNames(wants_all=bool(self.request.return_token_ids))
        begun = await self.service.formats_begun(self.request, self.samples)
        async with RunningSamples(self.service.engine, self.samples, self.service.metrics) as running:
            async for piece in running.pieces():
                count.add(piece)
                if not self.headers:
                    self.headers.update(prompt_header(piece))
                index = piece.sample.index
                is_first = index not in begun
                if is_first:
                    yield self._opening(piece.sample, is_first=not begun)
                    begun[index] = self._new_format()
                usage = count.usage_of(piece.sample) if self.request.includes_continuous_usage else None
                if (chunk := self._chunk(piece, usage, names, begun[index], is_first=is_first)) is not None:
                    yield chunk
        if self.request.includes_usage:
            yield self._body([], usage=count.usage())

    def _opening(self, sample: Sample, *, is_first: bool) -> ChatChunk:
        """Return a choice's first chunk, which has only the role, as in OpenAI's API."""
        opening = ChatChunkChoice(index=sample.index, delta=Delta(role="assistant", content=""))
        fields: dict[str, Any] = {}
        if self.request.includes_continuous_usage:
            fields["usage"] = Usage.of(len(sample.request.prompt_token_ids), 0)
        return self._body([opening], prompt_token_ids=self._prompt_token_ids if is_first else UNSET, **fields)

    def _chunk(
        self, piece: Piece, usage: Usage | None, names: TokenNames, form: LogprobFormat, *, is_first: bool
    ) -> ChatChunk | None:
        """Return None if the piece has nothing to show yet. `usage`: the usage so far, if wanted."""
        names_ids = names.add(piece, is_first=is_first)
        finish = piece.finish
        if not (piece.text or finish or names_ids or self.request.logprobs):
            return None
        has_ended = finish is not None and finish.reason is not None
        choice = ChatChunkChoice(
            index=piece.sample.index,
            delta=Delta(content=piece.text) if piece.text or not has_ended else Delta(),
            logprobs=self._logprobs(form, piece.logprobs),
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop_reason if finish and has_ended else UNSET,
            token_ids=names.take(piece),
        )
        fields: dict[str, Any] = {} if usage is None else {"usage": usage}
        return self._body(
            [choice], kv_transfer_params=(finish.kv_transfer_params if finish else None) or UNSET, **fields
        )

    def _body(self, choices: list[ChatChunkChoice], **fields: Any) -> ChatChunk:
        if self.request.includes_usage:
            fields.setdefault("usage", None)
        return ChatChunk(
            id=self.id, created=self.created, model=self.service.model_name, choices=choices, **fields
        )

    def _logprobs(self, form: LogprobFormat, logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if not self.request.logprobs:
            return None
        return form.chat(logprobs, num_top=self.request.top_logprobs or 0)

    async def _prompt_logprobs(self, logprobs: PromptLogprobs | None) -> msgspec.Raw | UnsetType:
        if logprobs is None:
            return UNSET
        return await self._new_format().prompt(self.samples[0].request.prompt_token_ids[0], logprobs)

    def _new_format(self) -> LogprobFormat:
        return self.service.logprob_format(self.request)

    @property
    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return self.samples[0].request.prompt_token_ids if self.request.return_token_ids else UNSET


async def admit_chat(service: Service, request: ChatRequest, request_id: str) -> ChatWork:
    """Check the request and make its samples. Raises UserError or ApiError before the engine has the
    request.
    """
    service.check_model(request.model)
    request.check_tool_choice()
    if request.top_logprobs is not None and not request.logprobs:
        raise UserError("needs logprobs: true", field="top_logprobs")
    top_logprobs = check_logprobs(request.top_logprobs, "top_logprobs")
    token_ids = await service.encoder.encode_chat(
        plain_messages(request.messages),
        add_generation_prompt=request.add_generation_prompt,
        variables=request.template_variables,
        tools=plain_tools(request.tools),
    )
    by_new_name = request.max_completion_tokens is not None
    samples = service.make_samples(
        request,
        [request.truncate(token_ids, service.model_config.max_model_len)],
        request_id=f"chatcmpl-{request_id}",
        max_tokens=request.max_completion_tokens if by_new_name else request.max_tokens,
        max_tokens_field="max_completion_tokens" if by_new_name else "max_tokens",
        logprobs=(top_logprobs or 0) if request.logprobs else None,
        prompt_field="messages",
        prompt_logprobs=request.checked_prompt_logprobs,
        bad_words=await service.encoder.encode_bad_words(request.checked_bad_words),
    )
    await service.replay_given(samples)
    return ChatWork(service, request, samples, f"chatcmpl-{request_id}", int(time.time()))
