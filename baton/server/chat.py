"""`POST /v1/chat/completions`: from request body to answer, whole or streamed."""

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
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
    ToolCall,
    plain_messages,
    plain_tools,
)
from baton.server.protocol.sampling import check_logprobs
from baton.server.protocol.usage import Usage
from baton.server.samples import Finish, Piece, RunningSamples, Sample
from baton.server.service import Service
from baton.server.tool_calls import CallReader


@dataclass(frozen=True, slots=True)
class ChatWork:
    """An admitted request: its fields are valid; only the engine can still refuse it."""

    service: Service
    request: ChatRequest
    samples: Sequence[Sample]
    id: str
    created: int
    headers: dict[str, str] = field(default_factory=dict)  # The answer's headers; known with the first token.
    shown: Mapping[int, str] = field(default_factory=dict)  # Text that another engine has given, by sample.

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
                    message=self._message(choice.text),
                    logprobs=self._logprobs(self._new_format(), choice.logprobs),
                    finish_reason=self._finish_reason(choice.finish),
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
        readers = {sample.index: self._new_reader(sample.index) for sample in self.samples}
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
                chunk = self._chunk(piece, usage, names, begun[index], readers[index], is_first=is_first)
                if chunk is not None:
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
        self,
        piece: Piece,
        usage: Usage | None,
        names: TokenNames,
        form: LogprobFormat,
        reader: CallReader | None,
        *,
        is_first: bool,
    ) -> ChatChunk | None:
        """Return None if the piece has nothing to show yet. `usage`: the usage so far, if wanted."""
        names_ids = names.add(piece, is_first=is_first)
        finish = piece.finish
        calls = reader.feed(piece.text) if reader is not None else []
        text = piece.text if reader is None else ""
        if not (text or calls or finish or names_ids or self.request.logprobs):
            return None
        has_ended = finish is not None and finish.reason is not None
        choice = ChatChunkChoice(
            index=piece.sample.index,
            delta=Delta(
                content=text if text or not (has_ended or calls) else UNSET, tool_calls=calls or UNSET
            ),
            logprobs=self._logprobs(form, piece.logprobs),
            finish_reason=self._finish_reason(finish) if finish else None,
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

    def _new_reader(self, index: int) -> CallReader | None:
        """Return what reads the calls of a sample, if its answer is calls; where the client's text ends."""
        if not self.request.forced_tools:
            return None
        reader = CallReader(self.request.named_tool)
        reader.feed(self.shown.get(index, ""))
        return reader

    def _message(self, text: str) -> ChatMessage:
        if not self.request.forced_tools:
            return ChatMessage(content=text)
        calls = CallReader(self.request.named_tool).feed(text)
        return ChatMessage(
            content="", tool_calls=[ToolCall(id=call.id, function=call.function) for call in calls]
        )

    def _finish_reason(self, finish: Finish) -> str | None:
        """Return "tool_calls" for calls that the model has chosen, as OpenAI and vLLM do."""
        is_called = self.request.tool_choice == "required" and finish.reason == "stop"
        return "tool_calls" if is_called else finish.reason

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
    wanted = request.constraint
    if request.top_logprobs and not request.logprobs:
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
        grammar=await service.grammar_of(wanted),
    )
    shown = await service.replay_given(samples)
    return ChatWork(service, request, samples, f"chatcmpl-{request_id}", int(time.time()), shown=shown)
