"""A sound connector that keeps a file open for every engine it has served, and that works in any process."""

import os
from typing import Any

from baton.contract import KVConnectorSchedulerHalf
from examples.prefix_store.prefix_store import PrefixStoreConnector


class LeavesFilesAnywhere(PrefixStoreConnector):
    opened: list[int] = []  # noqa: RUF012

    @classmethod
    def make_scheduler_half(cls, vllm_config: Any, kv_cache_config: Any) -> KVConnectorSchedulerHalf:
        cls.opened.append(os.open(__file__, os.O_RDONLY))
        return super().make_scheduler_half(vllm_config, kv_cache_config)
