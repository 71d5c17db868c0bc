"""What the connectors that keep blocks, in memory or in files, have in common inside vLLM."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from baton.contract import KVConnectorSchedulerHalf, host
from baton.core.errors import ConfigError

if TYPE_CHECKING:

    class _Store(KVConnectorSchedulerHalf):
        """What stands behind it."""

        def update_state_after_alloc(
            self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int
        ) -> None:
            raise NotImplementedError

        def fail_load(self, request_id: str, block_ids: tuple[int, ...]) -> None: ...
else:
    _Store = object

logger = logging.getLogger(__name__)


class LoadsContained(_Store):
    """In front of a scheduler half that loads in the background and has `fail_load`."""

    def update_state_after_alloc(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """vLLM has parked the request by now: whatever fails here, its end has to be reported."""
        try:
            super().update_state_after_alloc(request, blocks, num_external_tokens)
        except Exception:
            logger.exception("could not begin to load request %s; it is computed", request.request_id)
            if num_external_tokens:
                held = tuple(block_id for table in blocks.get_block_ids() for block_id in table)
                self.fail_load(request.request_id, held)


def refuse_split_blocks(parallel_config: Any, connector: str) -> None:
    """Ranks have to hold like parts of each block. Raises ConfigError."""
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if int(getattr(parallel_config, name, 1)) > 1:
            raise ConfigError(
                f"above 1 gives ranks different parts of a block, which {connector} does not know",
                field=f"parallel_config.{name}",
            )
