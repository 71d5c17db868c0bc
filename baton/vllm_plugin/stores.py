"""What the connectors that keep blocks, in memory or in files, have in common inside vLLM."""

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
    """`begin`, a scheduler half's `update_state_after_alloc`; what it raises ends the load as failed.

    vLLM has parked the request by now: it waits until a rank reports the end of the load.
    """
    try:
        begin(request, blocks, num_external_tokens)
    except Exception:  # The border of one request's load.
        logger.exception("could not begin to load request %s; it is computed", request.request_id)
        if num_external_tokens:
            held = tuple(block_id for table in blocks.get_block_ids() for block_id in table)
            fail_load(request.request_id, held)


def refuse_split_blocks(parallel_config: Any, connector: str) -> None:
    """Ranks have to hold like parts of each block. Raises ConfigError."""
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if int(getattr(parallel_config, name, 1)) > 1:
            raise ConfigError(
                f"above 1 gives ranks different parts of a block, which {connector} does not know",
                field=f"parallel_config.{name}",
            )
