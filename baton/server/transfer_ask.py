"""`kv_transfer_params` of an HTTP request, parsed once: what the server itself does for them.

The connector gets the mapping as it is, and checks its own keys. The server has keys of its own:

    baton_first_token         first token from P, the rest from D: one answer by two engines
    baton_token_ids           each chunk has its token ids: see `continuation`
    baton_output_token_ids    another engine has begun the answer: see `continuation`

`"baton_first_token": true` is on both legs, whose bodies are otherwise the client's own, limits included:

    P  (do_remote_decode)  ends after the first token. Unless that ends the answer, `finish_reason` is null
                           and text that is held back (a part of a character, or of a stop string) stays so:
                           D holds it back too, and shows it with the next token.
    D                      as usual. Both send the chunk of the first token even if it has no text, with its
                           `token_ids`, so that a router can compare them.

If P is an engine without this feature, the router shows P's token, and D continues after it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, TypeAlias

import msgspec

from baton.core.errors import UserError
from baton.core.retention import NEEDS_SESSION, RETENTION, TENANT, parse_retention, parse_tenant
from baton.core.transfer_params import FIELD, LEND_STORED, parse_cached_tokens
from baton.engine.api import SamplingParams
from baton.server.protocol.sampling import SamplingFields, check_token_ids

CheckParams: TypeAlias = Callable[[Mapping[str, Any] | None], None]
"""Raises UserError for `kv_transfer_params` that this engine's connector cannot honour."""

FIRST_TOKEN: Final = "baton_first_token"
NAMES_TOKENS: Final = "baton_token_ids"
GIVEN: Final = "baton_output_token_ids"
# Params that each sample gets. The others belong to a handoff: only the first sample gets them.
_OF_ALL_SAMPLES = frozenset({"baton_offload", RETENTION, TENANT})


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferAsk:
    fetches: bool  # Another engine computes the prompt.
    is_prefill_leg: bool  # This engine computes the prompt and the first token; another one continues.
    names_first: bool  # The first chunk is sent in any case, with its token ids.
    names_tokens: bool  # Each chunk has the token ids since the last one.
    given: list[int]  # Tokens that the client has; none if the answer begins here.
    # Tokens of the prompt that the prefill engine had in its cache. None: there is no prefill engine.
    num_cached_at_prefill: int | None
    params: dict[str, Any] | None  # The connector gets these: all but the given tokens.

    @classmethod
    def parse(
        cls, fields: SamplingFields, check_params: CheckParams, *, num_prompts: int, vocab_size: int
    ) -> Self:
        """Raises UserError."""
        params = fields.kv_transfer_params
        check_params(params)
        parse_tenant(params)
        if parse_retention(params).ends_session and fields.session_id is None:
            raise UserError(NEEDS_SESSION, field=f"{FIELD}.{RETENTION}.ends_session")
        raw, num_choices = params or {}, num_prompts * fields.num_samples
        # The check above has reduced these flags to a bool or absence.
        fetches, prefills = bool(raw.get("do_remote_prefill")), bool(raw.get("do_remote_decode"))
        lends = prefills or bool(raw.get(LEND_STORED))
        if (fetches or lends) and num_prompts > 1:
            raise UserError("is for one prompt; send each prompt in its own request", field=FIELD)
        if lends and fields.num_samples > 1:
            raise UserError(f"must be 1 with do_remote_decode or {LEND_STORED}: one loan", field="n")
        names_first = _flag(raw, FIRST_TOKEN)
        if names_first and num_choices > 1:
            raise UserError(
                "needs a request for one answer (one prompt, n=1)", field=f"{FIELD}.{FIRST_TOKEN}"
            )
        names_tokens = _flag(raw, NAMES_TOKENS)
        given = _given(raw.get(GIVEN), fields, vocab_size, num_choices, names_first=names_first)
        if GIVEN in raw:
            params = {key: value for key, value in raw.items() if key != GIVEN} or None
        return cls(
            fetches=fetches,
            is_prefill_leg=names_first and prefills,
            names_first=names_first,
            names_tokens=names_tokens,
            given=given,
            num_cached_at_prefill=parse_cached_tokens(raw) if fetches else None,
            params=params,
        )

    def params_of(self, *, hands_over: bool) -> dict[str, Any] | None:
        """Return the connector's params of one sample; only one that `hands_over` has those of a handoff."""
        if hands_over or self.params is None:
            return self.params
        return {name: value for name, value in self.params.items() if name in _OF_ALL_SAMPLES} or None


def first_of(params: SamplingParams) -> SamplingParams:
    """Return params that choose only the first token of an answer, exactly as in the whole answer."""
    return msgspec.structs.replace(params, max_tokens=1, min_tokens=min(1, params.min_tokens))


def given_refusal(message: str) -> UserError:
    return UserError(message, field=f"{FIELD}.{GIVEN}")


def _given(
    given: Any, fields: SamplingFields, vocab_size: int, num_choices: int, *, names_first: bool
) -> list[int]:
    if given is None:
        return []
    if not isinstance(given, list) or not given or not all(type(token_id) is int for token_id in given):
        raise given_refusal("must be a list of token ids, with at least one; leave it out to begin an answer")
    check_token_ids(given, vocab_size, f"{FIELD}.{GIVEN}")
    if num_choices > 1:
        raise given_refusal("needs a request for one answer (one prompt, n=1)")
    if not fields.stream:
        raise given_refusal("needs stream: true; an answer that is not streamed is asked for again")
    if getattr(fields, "echo", None):
        raise given_refusal("cannot be combined with echo; the client has the echo")
    if names_first:
        raise given_refusal(f"cannot be combined with {FIRST_TOKEN}; the client has the first token")
    return given


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"must be true or false, not {type(value).__name__}", field=f"{FIELD}.{key}")
    return bool(value)
