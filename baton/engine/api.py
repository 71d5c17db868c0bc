"""Requests and outputs of an engine, as they cross the process boundary (msgpack).

Imports no torch and reads no clock, because the server, the scheduler and the simulator use these types.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from baton.core.errors import UserError

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20
SAMPLING_EPS = 1e-5
_ITEM_BYTES = 4  # Size of an int32 and of a float32.


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters, with the names and ranges of vLLM and OpenAI.

    There is no `n`: the server makes one engine request per sample.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # Below SAMPLING_EPS: greedy.
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens.
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0  # Applies to tokens of prompt and output; above 1 discourages them.
    presence_penalty: float = 0.0  # Applies once to each token of the output.
    frequency_penalty: float = 0.0  # Applies to a token of the output once per occurrence.
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None  # Each once, ascending. None: all.
    # The last token of a word is not generated directly after its other tokens, if these are all output.
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: str | None = None  # The answer belongs to it: text of `baton.engine.text.grammar`.
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: off; n: those of the chosen token and the n most likely ones.
    # Logprobs of the prompt's tokens except the first. The prompt is then computed here, without cache or
    # load.
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        def need(ok: bool, field: str, requirement: str) -> None:
            if not ok:
                raise UserError(f"{requirement}, is {getattr(self, field)}", field=field)

        need(self.max_tokens >= 1, "max_tokens", "must be at least 1")
        need(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "must be in [0, max_tokens]")
        need(0.0 <= self.temperature <= 100.0, "temperature", "must be in [0, 100]")
        need(0.0 < self.top_p <= 1.0, "top_p", "must be in (0, 1]")
        need(self.top_k >= -1, "top_k", "must be -1, 0 (both: all tokens) or positive")
        need(0.0 <= self.min_p <= 1.0, "min_p", "must be in [0, 1]")
        need(0.0 < self.repetition_penalty <= 100.0, "repetition_penalty", "must be in (0, 100]")
        need(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "must be in [-2, 2]")
        need(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "must be in [-2, 2]")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            need(count is None or 0 <= count <= MAX_LOGPROBS, name, f"must be in [0, {MAX_LOGPROBS}]")
        need(self.allowed_token_ids != (), "allowed_token_ids", "must have at least one token id")
        need(all(self.bad_words_token_ids), "bad_words_token_ids", "must have at least one token each")
        bans = {
            "min_tokens": self.min_tokens,
            "allowed_token_ids": self.allowed_token_ids,
            "bad_words": self.bad_words_token_ids,
        }
        if self.grammar is not None and (names := [name for name, value in bans.items() if value]):
            raise UserError(
                "cannot be combined with a constrained answer: together they could leave no token",
                field=names[0],
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < SAMPLING_EPS


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, one completion. Validated by the server; the engine core trusts it."""

    request_id: str  # Unique inside this engine.
    prompt_token_ids: list[int]
    # The answer's first tokens, if another engine has generated them. They count as output of this engine,
    # but do not end the answer and are not reported again.
    output_token_ids: list[int] = []
    sampling_params: SamplingParams
    arrival_time_s: float  # The front end's monotonic clock; for ordering and metrics only.
    priority: int = 0  # Lower runs first (policy "priority").
    cache_salt: str | None = None
    session_id: str | None = None  # Id of the conversation, for connectors.
    kv_transfer_params: dict[str, Any] | None = None


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural logarithm of the raw model probability: temperature and penalties are *not* applied."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token.


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Logprobs of one position: the chosen token, then the most likely tokens, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of N consecutive prompt tokens, as raw arrays: many objects would block an event loop.

    W is 1 + the number of most likely tokens. A row has the prompt's token first, then the most likely ones.
    """

    width: int  # W.
    token_ids: bytes  # int32 [N, W].
    logprobs: bytes  # float32 [N, W].
    ranks: bytes  # int32 [N]; ranks of the prompt's tokens.

    def __len__(self) -> int:
        return len(self.ranks) // _ITEM_BYTES

    @classmethod
    def joined(cls, parts: Sequence["PromptLogprobs"], *, width: int) -> "PromptLogprobs":
        return cls(
            width,
            b"".join(part.token_ids for part in parts),
            b"".join(part.logprobs for part in parts),
            b"".join(part.ranks for part in parts),
        )

    def rows(self, start: int, stop: int) -> list[TokenLogprobs]:
        """Decode the rows `start` to `stop`, or to the end."""
        width = self.width
        span = slice(start * width * _ITEM_BYTES, stop * width * _ITEM_BYTES)
        token_ids = memoryview(self.token_ids[span]).cast("i").tolist()
        logprobs = memoryview(self.logprobs[span]).cast("f").tolist()
        ranks = memoryview(self.ranks[start * _ITEM_BYTES : stop * _ITEM_BYTES]).cast("i").tolist()
        entries = []
        for index, rank in enumerate(ranks):
            first, *top = zip(
                token_ids[index * width : (index + 1) * width],
                logprobs[index * width : (index + 1) * width],
                [rank, *range(1, width)],
                strict=True,
            )
            entries.append(TokenLogprobs(TokenLogprob(*first), tuple(TokenLogprob(*one) for one in top)))
        return entries


class RequestError(msgspec.Struct, frozen=True):
    """Reason that a request ended without an answer, for its client."""

    message: str
    is_users: bool = False  # True: HTTP 400; False: HTTP 500.
    field: str | None = None  # The faulty field of the request, for a user's error.
    load_failure: str | None = None  # Why its KV could not be loaded, if that ended the request.

    @classmethod
    def of_user(cls, error: UserError) -> "RequestError":
        return cls(str(error), is_users=True, field=error.field)


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Result of one step for one request. `finish_reason` is set exactly once, in the last output."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: list[TokenLogprobs] | None = None
    # A row for each token of the prompt except the first; comes with the first token, if requested.
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # The stop token id that ended the output, if any.
    error: RequestError | None = None  # Set with finish_reason "error".
    kv_transfer_params: dict[str, Any] | None = None  # Set in the last output, if the connector returns any.
    num_cached_tokens: int = 0  # Prompt tokens not computed here: local prefix hits and transferred tokens.
    num_transferred_tokens: int = 0  # Part of `num_cached_tokens`: tokens that a connector loaded.
    weights_id: str = ""  # `KVIdentity.weights_id`; set with the first tokens and with the last.
    scheduled_at_s: float = 0.0  # When its first step began, monotonic clock; 0.0: there was none.


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Counters and gauges after one step."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_for_remote_kvs: int = 0
    num_delayed_free: int = 0  # Finished requests whose blocks are still lent.
    kv_cache_usage: float = 0.0  # Blocks in use / blocks of the pool, in [0, 1].
    num_preempted: int = 0  # Preemptions in this step.
    prefix_cache_queries: int = 0  # Tokens, in this step.
    prefix_cache_hits: int = 0
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0
    num_kv_load_failures: int = 0  # Requests whose load failed, in this step.
    num_prompt_tokens: int = 0  # Prompt tokens computed in this step.
    num_generation_tokens: int = 0
    num_kv_connector_errors: int = 0  # Contained exceptions of the connector's scheduler half, in this step.
    kv_connector_retired: bool = False  # The connector failed permanently; the engine goes on without it.
    kv_connector_stats: dict[str, Any] | None = None  # KVConnectorStats.to_dict() of this step.


class EngineOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """All outputs of one step, sent to the front end."""

    outputs: list[EngineOutput]
    stats: SchedulerStats | None = None
