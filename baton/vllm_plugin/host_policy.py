"""Host policy of vLLM: its differences from the connector contract, for the halves of pull and push."""

from __future__ import annotations

from baton.connectors.pull.scheduler import HostPolicy
from baton.vllm_plugin.idle_backoff import IdleBackoff
from baton.vllm_plugin.lent_blocks import LentBlocks

EMPTY_STEP_S = 0.003  # What the report of the next step would cost: a round through two processes.


def vllm_policy() -> HostPolicy:
    """Of one engine.

    * References of our own hold lent blocks (`LentBlocks`): `delay_free` would keep the engine awake.
    * Empty steps wait while the engine waits for a producer only: vLLM steps about 1,000 times a second.
    * An exception in `build_connector_meta` ends vLLM, so a dead control thread does not raise there.
    * Routers ask by a request: vLLM's server has no other way to its scheduler.
    """
    return HostPolicy(
        holder=LentBlocks(), idle_wait=IdleBackoff(), survives_dead_control=True, answers_by_request=True
    )
