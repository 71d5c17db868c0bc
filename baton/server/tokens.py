"""Encoding of prompts to token ids, off the event loop.

Text is encoded in threads, because the tokenizers library releases the interpreter's lock. Chat templates
are rendered in worker processes, because a template's loop holds that lock.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from baton.core.config import ModelConfig
from baton.core.errors import UserError
from baton.engine.text.tokenizer import Tokenizer
from baton.http.bodies import PAUSE_S
from baton.http.errors import ApiError
from baton.http.settings import HttpSettings
from baton.http.workers import Job, WorkerOutOfMemory, WorkerPool, WorkerTimeout
from baton.server.protocol.completion import Prompt
from baton.server.protocol.sampling import check_token_ids
from baton.server.protocol.structured import Constraint

T = TypeVar("T")

_RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "self"})
MAX_CHARS_PER_TOKEN = 128  # The longest tokens of today's vocabularies; prompts have about four.
MAX_BAD_WORDS_TOKENS = 1024  # Tokens of all forms together; vLLM's limit.
SHORT_CHARS = 4096  # Encoded on the event loop in less than a millisecond, cheaper than in a thread.
SHORT_TOKENS = 1024  # Decoded on the event loop.
LONG_TOKENS = 1 << 16  # More ids are checked with a pause before and after: 2^20 ids take 24 ms.
NUM_THREADS = 2  # A long text leaves one for the others.


class PromptEncoder:
    """Encodes prompts. Owns the encoding threads, which `close` ends; the worker pool is the caller's."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: ModelConfig,
        workers: WorkerPool,
        limits: HttpSettings = HttpSettings(),  # noqa: B008  It is frozen.
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = model.vocab_size
        self._max_model_len = model.max_model_len
        self._max_chars = min(model.max_model_len * MAX_CHARS_PER_TOKEN, limits.max_text_chars)
        self._workers = workers
        self._limits = limits
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="encode")

    async def check_template(self) -> None:
        """Compile the model's chat template. Raises UserError if it fails or costs too much."""
        template = self._tokenizer.chat_template
        if template is None:
            return
        job = Job("baton.engine.text.chat_template:check_job", self._limits.admission_s)
        try:
            await self._workers.run(job, template.source, template.special_tokens)
        except (WorkerTimeout, WorkerOutOfMemory) as error:
            raise UserError(f"cannot be compiled and rendered: it {error}", field="chat_template") from error

    async def encode(
        self, prompt: Prompt, *, add_special_tokens: bool = True, field: str = "prompt"
    ) -> list[int]:
        """Return the prompt as token ids. Raises UserError, or ApiError for one that is too long."""
        if not isinstance(prompt, str):
            await self._check_ids(prompt, field)
            return prompt
        self._check_chars(len(prompt), field)
        return await self._run(
            len(prompt), lambda: self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        )

    async def decode(self, token_ids: list[int], field: str, *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids. Raises UserError."""
        await self._check_ids(token_ids, field)
        return await self._run(
            len(token_ids) * SHORT_CHARS // SHORT_TOKENS,
            lambda: self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens),
        )

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Render a chat with the model's template and encode it. Raises UserError, ApiError as `encode`.

        `variables` are the client's own for the template. The template writes the special tokens, so none
        are added.
        """
        variables = variables or {}
        for name in _RESERVED_VARIABLES & variables.keys():
            raise UserError(
                "is reserved in templates; choose another name", field=f"chat_template_kwargs.{name}"
            )
        template = self._tokenizer.chat_template
        if template is None:
            raise UserError("the model has no chat template; use /v1/completions", field="messages")
        job = Job("baton.engine.text.chat_template:render_job", self._limits.render_s)
        try:
            text: str = await self._workers.run(
                job,
                template.source,
                template.special_tokens,
                messages,
                add_generation_prompt,
                tools,
                variables,
                self._max_chars,
            )
        except (WorkerTimeout, WorkerOutOfMemory) as error:
            raise UserError(f"the model's chat template {error}", field="messages") from error
        except (UnicodeEncodeError, OverflowError) as error:
            raise UserError(f"cannot be rendered: {error}", field="messages") from error
        self._check_chars(len(text), "messages")
        return await self._run(len(text), lambda: self._tokenizer.encode(text, add_special_tokens=False))

    async def _check_ids(self, token_ids: list[int], field: str) -> None:
        if len(token_ids) > self._limits.max_token_ids:
            raise UserError(
                f"has {len(token_ids)} token ids; at most {self._limits.max_token_ids} are allowed",
                field=field,
            )
        if len(token_ids) > LONG_TOKENS:
            await asyncio.sleep(PAUSE_S)
        check_token_ids(token_ids, self._vocab_size, field)
        if len(token_ids) > LONG_TOKENS:
            await asyncio.sleep(PAUSE_S)

    async def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Encode each word, as at the beginning of a text and within one. Raises UserError."""
        return await self._run(sum(map(len, words)), lambda: bad_words_in_tokens(words, self._tokenizer))

    async def grammar_of(self, wanted: Constraint) -> str:
        """Return the grammar for `SamplingParams`. Raises UserError."""
        job = Job("baton.engine.text.grammar:compile_job", self._limits.admission_s)
        try:
            grammar: str = await self._workers.run(job, wanted.kind, wanted.text)
        except UserError as error:
            raise UserError(str(error), field=wanted.field) from error
        except (WorkerTimeout, WorkerOutOfMemory) as error:
            raise UserError(f"cannot be compiled: it {error}", field=wanted.field) from error
        return grammar

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run work on many tokens, each decoded alone."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _check_chars(self, num_chars: int, field: str) -> None:
        """Refuse a text that is far too long before it is encoded: all requests share the threads."""
        if num_chars > self._max_chars:
            raise too_long(f"more than {self._max_chars} characters", self._max_model_len, field=field)

    async def _run(self, num_chars: int, work: Callable[[], T]) -> T:
        if num_chars <= SHORT_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=True)


def bad_words_in_tokens(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Encode bad words as vLLM does.

    The form with a space before counts if it begins with another token and has as many tokens.
    """
    forms: list[tuple[int, ...]] = []
    for index, word in enumerate(words):
        bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        if not bare:
            raise UserError("must have at least one token", field=f"bad_words[{index}]")
        forms.append(bare)
        spaced = tuple(tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False))
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            forms.append(spaced)
    if sum(map(len, forms)) > MAX_BAD_WORDS_TOKENS:
        raise UserError(f"at most {MAX_BAD_WORDS_TOKENS} tokens in all", field="bad_words")
    return tuple(dict.fromkeys(forms))


def too_long(prompt: str, max_model_len: int, *, field: str) -> ApiError:
    """Return the error for a prompt beyond the model's context, whose size `prompt` says.

    litellm recognizes it by vLLM's phrase, and LangChain by OpenAI's code. Both then use their fallbacks.
    """
    return ApiError(
        400,
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
        f"{prompt}. Please reduce the length of the input prompt.",
        param=field,
        code="context_length_exceeded",
    )


def check_room(token_ids: list[int], max_model_len: int, *, field: str) -> int:
    """Return how many tokens fit after a prompt. Raises UserError for none, ApiError if no token fits."""
    room = max_model_len - len(token_ids)
    if not token_ids:
        raise UserError("must have at least one token", field=field)
    if room < 1:
        num = f"{len(token_ids)} input tokens, which leaves no room for an output token"
        raise too_long(num, max_model_len, field=field)
    return room


def check_length(
    token_ids: list[int],
    max_tokens: int | None,
    max_model_len: int,
    *,
    field: str,
    max_field: str,
    continues_elsewhere: bool = False,
) -> int:
    """Return how many tokens may be generated: `max_tokens`, or what the prompt leaves if that is less.

    Raises UserError for `max_tokens` below 1, ApiError for one above the model's length, and as `check_room`.
    An answer that `continues_elsewhere` needs room for one token here; the other engine knows its own length.
    """
    room = check_room(token_ids, max_model_len, field=field)
    if max_tokens is None:
        return room
    if max_tokens < 1:
        raise UserError(f"must be at least 1, is {max_tokens}", field=max_field)
    if continues_elsewhere:
        return max_tokens
    if max_tokens > max_model_len:
        raise ApiError(
            400,
            f"{max_field}={max_tokens} cannot be greater than max_model_len={max_model_len}. Please request "
            "fewer output tokens.",
            param=max_field,
        )
    return min(max_tokens, room)
