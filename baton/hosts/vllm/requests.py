"""Inputs of vLLM's requests: finds those that Baton does not know, and watches which adapters are loaded."""

from __future__ import annotations

import inspect
import logging
from functools import cache
from typing import Any, Final

from vllm.v1.request import Request

from baton.connectors.adapters import Adapters
from baton.connectors.jobs import Jobs
from baton.connectors.prompt_identity import RequestNames

logger = logging.getLogger(__name__)

NAMED_INPUTS: Final = frozenset(
    {
        "prompt_token_ids",
        "prompt_embeds",
        "prompt_is_token_ids",
        "mm_features",
        "lora_request",
        "cache_salt",
        "resumable",  # Such a request is not named, and none with `extra_kwargs` of these:
        "pooling_params",
    }
)
"""Inputs of a request that change its KV: `RequestNames` names them."""

OTHER_INPUTS: Final = {
    "self": "is the request",
    "request_id": "names the request",
    "sampling_params": "is used after the KV of a token is computed",
    "client_index": "names the front end that gets the answer",
    "arrival_time": "orders requests",
    "priority": "orders requests",
    "trace_headers": "is for spans",
    "block_hasher": "makes vLLM's own names of blocks",
    "session_id": "groups requests",
    "reasoning_ended": "constrains which tokens are sampled",
    "reasoning_parser_kwargs": "constrains which tokens are sampled",
    "abort_immediately": "ends the request before it is computed",
    "kv_hints": "orders what leaves caches",
}
"""The other inputs, each with the reason why it cannot change the KV of given tokens."""


def names_of(vllm_config: Any, *, with_adapters: bool = False) -> RequestNames:
    """`with_adapters`: requests with adapters are named too. Chunks that last are not stored of them."""
    unknown = inspect.signature(Request.__init__).parameters.keys() - NAMED_INPUTS - OTHER_INPUTS.keys()
    if unknown:
        logger.warning("KV of requests with %s is not shared: Baton does not know them", sorted(unknown))
    has_adapters = with_adapters and getattr(vllm_config, "lora_config", None) is not None
    return RequestNames(_watched_adapters() if has_adapters else None, sorted(unknown))


@cache
def _watched_adapters() -> Adapters:
    """Those of this process's engine, from now on: its connector is made before it loads any.

    An engine loads an adapter when its server is told to, which no connector learns. Else it does so in the
    first step that needs it, which its first request precedes.
    """
    from vllm.v1.executor.abstract import Executor

    adapters, load = Adapters(Jobs("kv-adapters").put), Executor.add_lora

    def add_lora(executor: Any, lora_request: Any) -> Any:
        adapters.loading(lora_request)
        return load(executor, lora_request)

    Executor.add_lora = add_lora
    return adapters
