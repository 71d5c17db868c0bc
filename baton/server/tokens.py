"""What the server needs of a tokenizer, and prompts as token ids.

Text is encoded on one thread of its own: a long prompt takes tens of milliseconds, and other clients' streams
must not stop meanwhile.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import msgspec

from baton.core.config import ModelConfig
from baton.core.errors import UserError
from baton.server.protocol.completion import Prompt
from baton.server.protocol.sampling import check_token_ids
from baton.server.text import Detokenizer

T = TypeVar("T")

_RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})
MAX_CHARS_PER_TOKEN = 128  # The longest tokens of today's vocabularies; prompts have about four.
MAX_BAD_WORDS_TOKENS = 1024  # Of all forms together; vLLM's.
SHORT_CHARS = 4096  # Encoded at once, below a millisecond: cheaper than a change of threads.


class Tokenizer(Protocol):
    """`baton.engine.tokenizer.Tokenizer`, or a test's own."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...
    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Raises UserError if the model has no template or the template refuses the messages."""

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer: ...
    def token_text(self, token_id: int) -> str:
        """One token for people, special ones included."""


class PromptEncoder:
    """Owns the encoding thread; `close` ends it."""

    def __init__(self, tokenizer: Tokenizer, model: ModelConfig) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = model.vocab_size
        self._max_chars = model.max_model_len * MAX_CHARS_PER_TOKEN
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encode")

    async def encode(
        self, prompt: Prompt, *, add_special_tokens: bool = True, field: str = "prompt"
    ) -> list[int]:
        """Raises UserError."""
        if not isinstance(prompt, str):
            check_token_ids(prompt, self._vocab_size, field)
            return prompt
        text = prompt
        self._check_chars(len(text), field)
        return await self._run(
            len(text), lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """`variables` are the client's own for the template. Raises UserError."""
        variables = variables or {}
        for name in _RESERVED_VARIABLES & variables.keys():
            raise UserError("has a field of its own", field=f"chat_template_kwargs.{name}")
        num_chars = len(msgspec.json.encode((messages, tools, variables)))
        self._check_chars(num_chars, "messages")
        return await self._run(
            num_chars,
            lambda: self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables
            ),
        )

    async def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it stands at the beginning of a text, and within one. Raises UserError."""
        return await self._run(sum(map(len, words)), lambda: bad_words_in_tokens(words, self._tokenizer))

    def _check_chars(self, num_chars: int, field: str) -> None:
        """What is far too long is not even encoded: the thread is everybody's."""
        if num_chars > self._max_chars:
            raise UserError(f"has {num_chars} characters, more than the model can ever take", field=field)

    async def _run(self, num_chars: int, work: Callable[[], T]) -> T:
        if num_chars <= SHORT_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown(wait=True)


def bad_words_in_tokens(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """As vLLM: a form with a space before counts if it begins with another token and is as long in tokens."""
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


def check_length(
    token_ids: list[int],
    max_tokens: int | None,
    max_model_len: int,
    *,
    field: str,
    max_field: str,
    is_truncated: bool = False,
) -> int:
    """How many tokens may be generated. Raises UserError when the prompt leaves too little room.

    A client that has its prompt truncated does not know its length: `max_tokens` is then cut to the room.
    """
    room = max_model_len - len(token_ids)
    if not token_ids:
        raise UserError("must have at least one token", field=field)
    if room < 1:
        raise UserError(
            f"has {len(token_ids)} tokens; the model's {max_model_len} are for prompt and answer together",
            field=field,
        )
    if max_tokens is None:
        return room
    if is_truncated:
        max_tokens = min(max_tokens, room)
    if max_tokens > room:
        raise UserError(
            f"must be at most {room}: the prompt has {len(token_ids)} tokens of {max_model_len}",
            field=max_field,
        )
    if max_tokens < 1:
        raise UserError(f"must be at least 1, is {max_tokens}", field=max_field)
    return max_tokens
