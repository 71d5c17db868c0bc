"""Host policy of vLLM: its differences from the connector contract, for the halves of pull and push."""

from __future__ import annotations

from typing import Any

from baton.connectors.host_view import HostPolicy
from baton.hosts.vllm.idle_backoff import IdleBackoff
from baton.hosts.vllm.lent_blocks import LentBlocks

EMPTY_STEP_S = 0.003  # What the report of the next step would cost: a round through two processes.


def vllm_policy(**of_half: Any) -> HostPolicy:
    """Policy of one half. `of_half`: what it needs to know of its engine.

    * References of our own hold lent blocks (`LentBlocks`): `delay_free` would keep the engine awake.
    * Empty steps wait while the engine waits for a producer only: vLLM steps about 1,000 times a second.
    * An exception in `build_connector_meta` ends vLLM, so a dead control thread does not raise there.
    * Routers ask by a request: vLLM's server has no other way to its scheduler.
    """
    return HostPolicy(
        holder=LentBlocks(),
        idle_wait=IdleBackoff(),
        survives_dead_control=True,
        answers_by_request=True,
        truncate_prompt=_drop_last_prompt_token,
        empty_step_wait_s=EMPTY_STEP_S,
        **of_half,
    )


def _drop_last_prompt_token(request: Any) -> None:
    """Drop the last token as vLLM's NIXL connector does (`_truncate_request_for_prefill`).

    The one token of the answer has no meaning.
    """
    if request.num_prompt_tokens < 2 or request.prompt_token_ids is None or request.num_output_tokens:
        return
    if request.skip_reading_prefix_cache:
        return  # The consumer computes the whole prompt.
    del request.prompt_token_ids[-1:]
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
