"""State of one request for scheduler and connectors: tokens, computed tokens, status.

    WAITING --> RUNNING --> FINISHED_*
       |  ^        |  ^
       |  |        v  |
       |  |     PREEMPTED          (blocks lost; starts again from its tokens)
       v  |
    WAITING_FOR_REMOTE_KVS         (holds blocks that a connector fills; back to WAITING or PREEMPTED)

Status names are vLLM's, because connectors read them. Satisfies `baton.contract.host.Request`.
"""

from __future__ import annotations

import enum
from typing import Any, ClassVar

from baton.core.hashing import HASH_SEED, BlockHash, block_hashes, extra_key, root_hash
from baton.core.prefilled import PrefilledTokens
from baton.core.transfer_params import lends_stored
from baton.engine.api import EngineRequest, FinishReason, PromptLogprobs, TokenLogprobs
from baton.engine.prefilled import prefilled_by


class RequestStatus(enum.IntEnum):
    """State of a request; vLLM's names."""

    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    # Everything from here on is final.
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()

    @staticmethod
    def is_finished(status: RequestStatus) -> bool:
        return status >= RequestStatus.FINISHED_STOPPED


FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class Request:
    """One request of the engine.

    `order` is its position in every queue and in the running list: the smallest runs first, the largest is
    preempted first. Its first number is the request's `rank`: prompts wait for requests of a smaller one.
    """

    # vLLM's, for connectors that read them. This engine has no multimodal inputs and no adapters.
    mm_features: ClassVar[tuple[Any, ...]] = ()
    lora_request: ClassVar[None] = None
    prompt_embeds: ClassVar[None] = None

    __slots__ = (
        "_block_size",
        "_extra",
        "_hash_seed",
        "_prompt_logprobs",
        "all_token_ids",
        "arrival_time",
        "asks_connector",
        "block_hashes",
        "cache_salt",
        "computes_nothing",
        "is_arriving",
        "is_known_to_ranks",
        "is_truncated",
        "kv_transfer_params",
        "last_step",
        "load_failure",
        "max_tokens",
        "min_tokens",
        "needs_resend",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_given_tokens",
        "num_prompt_tokens",
        "num_transferred_tokens",
        "order",
        "output_logprobs",
        "priority",
        "prompt_token_ids",
        "request_id",
        "sampling_params",
        "scheduled_at_s",
        "session_id",
        "skip_reading_prefix_cache",
        "status",
        "stop_token_ids",
        "void_step",
    )

    def __init__(
        self,
        asked: EngineRequest,
        *,
        block_size: int,
        eos_token_ids: tuple[int, ...] = (),
        hash_seed: str = HASH_SEED,
        order: tuple[float, ...] = (0,),
    ) -> None:
        sampling = asked.sampling_params
        self.request_id = asked.request_id
        self.prompt_token_ids = asked.prompt_token_ids
        self.sampling_params = sampling
        self.arrival_time = asked.arrival_time_s
        self.scheduled_at_s = 0.0  # Begin of the first step on the same clock, set by the core; 0.0: not yet.
        self.priority = asked.priority
        self.cache_salt = asked.cache_salt
        self.session_id = asked.session_id
        # Connectors change it to mark what they have done, so the request has its own copy.
        self.kv_transfer_params: dict[str, Any] | None = (
            None if asked.kv_transfer_params is None else dict(asked.kv_transfer_params)
        )
        # A request for a loan of what is stored ends when the stored KV has been found or loaded.
        self.computes_nothing = lends_stored(asked.kv_transfer_params)
        self.order = order

        self.status = RequestStatus.WAITING
        self.num_prompt_tokens = len(asked.prompt_token_ids)
        self.num_given_tokens = len(asked.output_token_ids)  # First tokens of the answer, by another engine.
        self.num_computed_tokens = 0
        self.num_cached_tokens = -1  # Number reported to the client; -1 until the request first runs.
        self.num_transferred_tokens = 0
        self.output_logprobs: list[
            TokenLogprobs
        ] = []  # Logprobs of all output tokens, if the client or a ticket needs them.
        # Rows of the prompt's tokens after the first, as far as computed. None: not wanted, or already taken.
        self._prompt_logprobs: list[PromptLogprobs] | None = None if sampling.prompt_logprobs is None else []
        # vLLM's name, for connectors. True: the whole prompt is computed here, without cache or load.
        self.skip_reading_prefix_cache = sampling.prompt_logprobs is not None
        # True: the request runs while a load fills its blocks, and keeps them until the load ends.
        self.is_arriving = False
        self.is_known_to_ranks = False
        # True: the prompt lacks its last token, so the request ends without an answer.
        self.is_truncated = False
        self.needs_resend = False  # The ranks' copy is stale: send tokens and block table whole.
        self.last_step = 0  # Number of the last step that computes for the request; see `in_flight_steps`.
        self.void_step = 0  # Number of the step whose tokens for this request are dropped, if any.
        self.load_failure: str | None = None  # Reason that the last load of its KV failed, if it did.
        self.asks_connector = True  # False after a connector has failed this request: recompute it.

        self.max_tokens = sampling.max_tokens
        self.min_tokens = sampling.min_tokens
        eos = () if sampling.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset((*eos, *sampling.stop_token_ids))

        # Prompt and output. Only the request changes the list. An attribute, because steps read it often.
        self.all_token_ids = [*asked.prompt_token_ids, *asked.output_token_ids]
        self._block_size = block_size
        self._hash_seed = hash_seed
        self._extra = extra_key(cache_salt=asked.cache_salt)
        self.block_hashes: list[BlockHash] = []  # Hash of every full block of known tokens, computed or not.
        self._hash_full_blocks()

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, "
            f"computed {self.num_computed_tokens}/{self.num_tokens}, prompt {self.num_prompt_tokens})"
        )

    @property
    def rank(self) -> float:
        return self.order[0]

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status >= RequestStatus.FINISHED_STOPPED

    @property
    def finish_reason(self) -> FinishReason | None:
        return FINISH_REASONS.get(self.status)

    @property
    def prefilled_tokens(self) -> PrefilledTokens | None:
        """The output so far, for the engine that continues the request."""
        if self.is_truncated:
            return None
        return prefilled_by(
            self.output_token_ids, self.output_logprobs, self.sampling_params, self.stop_token_ids
        )

    def add_prompt_logprobs(self, position: int, part: PromptLogprobs) -> None:
        """Add the rows of the tokens from `position` on.

        Rows start again at position 1 after a preemption.
        """
        if self._prompt_logprobs is None:
            return
        if position == 1:
            self._prompt_logprobs.clear()
        assert position == 1 + sum(map(len, self._prompt_logprobs)), "chunks of a prompt come in order"
        self._prompt_logprobs.append(part)

    def take_prompt_logprobs(self) -> PromptLogprobs | None:
        """Remove and return all rows. Called with the first token, when the whole prompt is computed."""
        parts, self._prompt_logprobs = self._prompt_logprobs, None
        if parts is None:
            return None
        return PromptLogprobs.joined(parts, width=parts[0].width if parts else 1)

    def drop_last_prompt_token(self) -> None:
        """Leave the prompt's last token, if there are others, to the engine that decodes.

        Called before the first step.
        """
        if self.num_prompt_tokens == 1 or self.num_output_tokens or self.skip_reading_prefix_cache:
            return
        self.is_truncated = True
        self.prompt_token_ids = self.prompt_token_ids[:-1]
        self.all_token_ids.pop()
        self.num_prompt_tokens -= 1
        del self.block_hashes[self.num_prompt_tokens // self._block_size :]

    def append_output_token(self, token_id: int) -> None:
        tokens = self.all_token_ids
        tokens.append(token_id)
        if not len(tokens) % self._block_size:
            self._hash_full_blocks()

    def _hash_full_blocks(self) -> None:
        size, hashes = self._block_size, self.block_hashes
        parent = hashes[-1] if hashes else root_hash(self._hash_seed)
        hashes += block_hashes(parent, self.all_token_ids[len(hashes) * size :], size, self._extra)
