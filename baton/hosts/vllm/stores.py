"""Functions shared by the vLLM connectors that store blocks, in memory or in files."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from baton.contract import host
from baton.core.errors import ConfigError

logger = logging.getLogger(__name__)


def begin_load(
    begin: Callable[[host.Request, host.KVCacheBlocks, int], None],
    fail_load: Callable[[str, tuple[int, ...]], None],
    request: host.Request,
    blocks: host.KVCacheBlocks,
    num_external_tokens: int,
) -> None:
    """Call `begin`, a half's `update_state_after_alloc`, and fail the load if it raises.

    vLLM has parked the request already: it waits until a rank reports the end of the load.
    """
    try:
        begin(request, blocks, num_external_tokens)
    except Exception:  # Contained: the load of one request.
        logger.exception(
            "the load of request %s could not start; its prompt is computed instead", request.request_id
        )
        if num_external_tokens:
            held = tuple(block_id for table in blocks.get_block_ids() for block_id in table)
            fail_load(request.request_id, held)


def refuse_split_blocks(parallel_config: Any, connector: str) -> None:
    """Raise ConfigError if ranks would hold different parts of a block."""
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if int(getattr(parallel_config, name, 1)) > 1:
            raise ConfigError(
                f"above 1 gives ranks different parts of a block, which {connector} does not support; "
                "set it to 1",
                field=f"parallel_config.{name}",
            )
