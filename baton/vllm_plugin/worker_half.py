"""The worker halves of pull and push, as vLLM needs them.

An order that fails costs its own claim only. How blocks are packed is asked when the cache is registered,
since vLLM has chosen its attention by then. In a step that computes nothing a short read is waited for, so
that it is reported in this step: the next one comes a millisecond and a round through two processes later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.metadata import Order
from baton.connectors.pull.worker import PullWorkerHalf
from baton.connectors.push.worker import PushWorkerHalf
from baton.contract import host

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

EMPTY_STEP_S = 0.003  # What the next report would cost; a longer read is better not waited for.


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
        self._has_news = threading.Event()  # Some read has ended.
        self._hears_of_news = self.bind_wake(self._has_news.set)

    def start_load_kv(self, forward_context: host.ForwardContext, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        if self._links is None or not self._hears_of_news or forward_context.attn_metadata is not None:
            return
        give_up_at = time.monotonic() + EMPTY_STEP_S
        while True:
            self._has_news.clear()
            remaining_s = give_up_at - time.monotonic()
            if self._links.num_moving == 0 or remaining_s <= 0:
                return
            self._has_news.wait(remaining_s)

    def _packing_of(self, kv_caches: dict[str, torch.Tensor]) -> str:
        packing = self._find_packing(kv_caches)
        logger.info("the cache's blocks are packed as %r", packing)
        return packing

    def _carry_out(self, order: Order) -> None:
        """Whatever goes wrong, the scheduler half hears how each read that it ordered has ended."""
        try:
            super()._carry_out(order)
        except Exception as error:  # The border of one order: the step's others are carried out.
            self._fail(order, error)


class VllmPushWorkerHalf(VllmPullWorkerHalf, PushWorkerHalf):
    """The same, over push's."""
