"""Request fields that completions and chat share, and their conversion to `SamplingParams`."""

from typing import Any, Literal, Self

import msgspec

from baton.core.errors import UserError
from baton.core.retention import SESSION_CHARS_MAX
from baton.engine.api import MAX_LOGPROBS, SamplingParams
from baton.server.protocol.structured import (
    Constraint,
    ResponseFormat,
    StructuredOutputs,
    constraint_of,
)

MAX_SAMPLES = 128  # `n`; OpenAI's limit.
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024  # Length of one stop string: up to this much text is held back.
MAX_STOP_TOKEN_IDS = 1024
MAX_BIASED_TOKENS = 1024
MAX_BIAS = 100.0
MIN_TEMPERATURE = 0.01  # vLLM's, for all but greedy choice.
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
PRIORITY_MAX = 2**31
MAX_TOP_K = 2**31 - 1
MAX_CACHE_SALT_CHARS = 1024
MAX_ALLOWED_IDS = 1 << 20  # Times choices: 20 ms of checking and copying.
MAX_PROMPT_LOGPROBS = 1 << 17  # Tokens of prompts, with their alternatives, in one answer.
MAX_BAD_WORDS = 128  # vLLM's.
MAX_BAD_WORD_CHARS = 256
ALL_THAT_FITS = -1  # `truncate_prompt_tokens`: leaves one token of the context for the answer.


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields common to both APIs.

    None: not given; the value is from the checkpoint's generation_config.json, or the API's default.
    """

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def num_samples(self) -> int:
        if self.n is None:
            return 1
        if not 1 <= self.n <= MAX_SAMPLES:
            raise UserError(f"must be in [1, {MAX_SAMPLES}], is {self.n}", field="n")
        return self.n

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def includes_continuous_usage(self) -> bool:
        """Return whether each chunk has usage: as in vLLM, only together with `include_usage`."""
        return (
            self.includes_usage
            and self.stream_options is not None
            and bool(self.stream_options.continuous_usage_stats)
        )

    def check_stream_options(self) -> None:
        if self.stream_options not in (None, StreamOptions()) and not self.stream:
            raise UserError("is only allowed with stream: true", field="stream_options")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        strings = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if len(strings) > MAX_STOP_STRINGS:
            raise UserError(f"at most {MAX_STOP_STRINGS} strings, are {len(strings)}", field="stop")
        for string in strings:
            if not 0 < len(string) <= MAX_STOP_CHARS:
                raise UserError(f"each string has 1 to {MAX_STOP_CHARS} characters", field="stop")
        return strings

    @property
    def checked_bad_words(self) -> tuple[str, ...]:
        """Return the bad words without duplicates, in order."""
        words = tuple(dict.fromkeys(self.bad_words or ()))
        if len(words) > MAX_BAD_WORDS:
            raise UserError(f"at most {MAX_BAD_WORDS} words, are {len(words)}", field="bad_words")
        for index, word in enumerate(words):
            if not 0 < len(word) <= MAX_BAD_WORD_CHARS:
                raise UserError(
                    f"must have 1 to {MAX_BAD_WORD_CHARS} characters", field=f"bad_words[{index}]"
                )
        return words

    @property
    def checked_prompt_logprobs(self) -> int | None:
        count = check_logprobs(self.prompt_logprobs, "prompt_logprobs")
        if count and self.stream:
            raise UserError("must be 0 with stream: true, which shows none", field="prompt_logprobs")
        return count

    @property
    def constraint(self) -> Constraint | None:
        """Return what the answer must be. Raises UserError."""
        return constraint_of(self.response_format, self.structured_outputs)

    def truncate(self, token_ids: list[int], max_model_len: int) -> list[int]:
        """Return the part of a prompt that `truncate_prompt_tokens` keeps. Raises UserError."""
        limit = self.truncate_prompt_tokens
        if limit is None:
            return token_ids
        if limit == ALL_THAT_FITS:
            limit = max_model_len - 1
        elif not 1 <= limit <= max_model_len:
            raise UserError(
                f"must be {ALL_THAT_FITS}, or in [1, {max_model_len}], is {limit}",
                field="truncate_prompt_tokens",
            )
        if len(token_ids) <= limit:
            return token_ids
        return token_ids[:limit] if self.truncation_side == "right" else token_ids[-limit:]

    @property
    def checked_priority(self) -> int:
        priority = self.priority or 0
        if not -PRIORITY_MAX <= priority < PRIORITY_MAX:
            raise UserError(f"must be in [{-PRIORITY_MAX}, {PRIORITY_MAX}), is {priority}", field="priority")
        return priority

    @property
    def checked_cache_salt(self) -> str | None:
        if self.cache_salt is not None and not 0 < len(self.cache_salt) <= MAX_CACHE_SALT_CHARS:
            raise UserError(f"must have 1 to {MAX_CACHE_SALT_CHARS} characters", field="cache_salt")
        return self.cache_salt

    def in_session(self, header: str | None) -> Self:
        """Return the fields with the session of the header X-Session-Id, unless `session_id` names one."""
        for field, session in (("session_id", self.session_id), ("X-Session-Id", header)):
            if session is not None and not 0 < len(session) <= SESSION_CHARS_MAX:
                raise UserError(f"must have 1 to {SESSION_CHARS_MAX} characters", field=field)
        if header is None or self.session_id is not None:
            return self
        return msgspec.structs.replace(self, session_id=header)

    def sampling_params(
        self,
        *,
        max_tokens: int,
        logprobs: int | None,
        vocab_size: int,
        defaults: dict[str, Any],
        prompt_logprobs: int | None = None,
        allowed_token_ids: tuple[int, ...] | None = None,
        bad_words: tuple[tuple[int, ...], ...] = (),
        grammar: str | None = None,
    ) -> SamplingParams:
        """Convert to SamplingParams. Raises UserError.

        `defaults`: the checkpoint's generation_config.json. `bad_words`: as token ids.
        """
        if self.seed is not None and not SEED_MIN <= self.seed <= SEED_MAX:
            raise UserError(f"must be in [{SEED_MIN}, {SEED_MAX}], is {self.seed}", field="seed")
        if self.top_k is not None and not -1 <= self.top_k <= MAX_TOP_K:
            raise UserError(f"must be in [-1, {MAX_TOP_K}]", field="top_k")

        def chosen(name: str, default: float) -> float:
            given = getattr(self, name)
            if given is not None:
                return float(given)
            value = defaults.get(name)
            return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default

        temperature = chosen("temperature", 1.0)
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            temperature=max(temperature, MIN_TEMPERATURE) if temperature > 0 else temperature,
            top_p=chosen("top_p", 1.0),
            top_k=int(chosen("top_k", 0)),
            min_p=chosen("min_p", 0.0),
            seed=self.seed,
            repetition_penalty=chosen("repetition_penalty", 1.0),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self._checked_bias(vocab_size),
            allowed_token_ids=allowed_token_ids,
            bad_words_token_ids=bad_words,
            grammar=grammar,
            stop_token_ids=self._checked_stop_ids(vocab_size),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def checked_allowed_ids(self, vocab_size: int, num_choices: int) -> tuple[int, ...] | None:
        """Return the allowed ids without duplicates, ascending; the engine keeps a list per choice. Raises
        UserError.
        """
        if self.allowed_token_ids is None:
            return None
        if len(self.allowed_token_ids) > min(vocab_size, MAX_ALLOWED_IDS // num_choices):
            raise UserError(
                f"at most {vocab_size} ids, and {MAX_ALLOWED_IDS} for all choices together",
                field="allowed_token_ids",
            )
        if not self.allowed_token_ids:
            raise UserError(
                "must have at least one token id; leave it out to allow all", field="allowed_token_ids"
            )
        check_token_ids(self.allowed_token_ids, vocab_size, "allowed_token_ids")
        return tuple(sorted(set(self.allowed_token_ids)))

    def _checked_bias(self, vocab_size: int) -> dict[int, float]:
        if not self.logit_bias:
            return {}
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise UserError(f"at most {MAX_BIASED_TOKENS} tokens", field="logit_bias")
        bias: dict[int, float] = {}
        for key, value in self.logit_bias.items():
            try:
                token_id = int(key)
            except ValueError:
                token_id = -1
            if not 0 <= token_id < vocab_size:
                raise UserError(
                    f"keys are token ids in [0, {vocab_size}), is {key[:20]!r}", field="logit_bias"
                )
            bias[token_id] = min(MAX_BIAS, max(-MAX_BIAS, value))
        return bias

    def _checked_stop_ids(self, vocab_size: int) -> tuple[int, ...]:
        ids = tuple(self.stop_token_ids or ())
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise UserError(f"at most {MAX_STOP_TOKEN_IDS} ids", field="stop_token_ids")
        check_token_ids(ids, vocab_size, "stop_token_ids")
        return ids


def check_token_ids(ids: tuple[int, ...] | list[int], vocab_size: int, field: str) -> None:
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise UserError(f"must be in [0, {vocab_size}), is {token_id}", field=f"{field}[{index}]")


def check_logprobs(count: int | None, field: str) -> int | None:
    """Check under the field's own name; the engine would use its name."""
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise UserError(f"must be in [0, {MAX_LOGPROBS}], is {count}", field=field)
    return count
