"""The worker halves of pull and push, as vLLM needs them.

An order that fails costs its own claim only. How blocks are packed is asked when the cache is registered,
since vLLM has chosen its attention by then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.metadata import Order, ReadBlocks
from baton.connectors.pull.worker import PullWorkerHalf
from baton.connectors.push.worker import PushWorkerHalf

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class VllmPullWorkerHalf(PullWorkerHalf):
    def __init__(
        self,
        identity: EngineIdentity,
        *,
        find_packing: Callable[[dict[str, torch.Tensor]], str],
        **arguments: Any,
    ) -> None:
        """`arguments`: see PullWorkerHalf."""
        super().__init__(identity, **arguments)
        self._find_packing = find_packing

    def _packing_of(self, kv_caches: dict[str, torch.Tensor]) -> str:
        packing = self._find_packing(kv_caches)
        logger.info("the cache's blocks are packed as %r", packing)
        return packing

    def _carry_out(self, order: Order) -> None:
        """Whatever goes wrong, the scheduler half hears how each read that it ordered has ended."""
        try:
            super()._carry_out(order)
        except Exception as error:
            logger.exception("could not carry out %s", type(order).__name__)
            if isinstance(order, ReadBlocks) and self._links is not None:
                self._links.fail(order, f"{type(error).__name__}: {error}")


class VllmPushWorkerHalf(VllmPullWorkerHalf, PushWorkerHalf):
    """The same, over push's."""
