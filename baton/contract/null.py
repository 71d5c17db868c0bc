"""Connector of an engine without one: every answer is empty, so that hosts need no special case."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.contract.base import KVConnectorMetadata
from baton.contract.defaults import FinishesByFirstGroup, NoLayerHooks

if TYPE_CHECKING:
    from baton.contract import host


class NullConnectorMetadata(KVConnectorMetadata):
    """Has no content."""


class NullSchedulerHalf(FinishesByFirstGroup):
    def get_num_new_matched_tokens(
        self, request: host.Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        assert num_external_tokens == 0, "the null connector never offers tokens"

    def build_connector_meta(self, scheduler_output: host.SchedulerOutput) -> KVConnectorMetadata:
        return NullConnectorMetadata()

    def reset_cache(self) -> bool | None:
        """A connector that is derived from this one may store KV, and has to answer for itself."""
        return True if type(self) is NullSchedulerHalf else None


class NullWorkerHalf(NoLayerHooks):
    """Does nothing."""
