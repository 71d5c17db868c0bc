"""Worker half of a connector that loads in the background: reports each load once, after its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.contract import KVConnectorTransferResults
from baton.contract.defaults import NoLayerHooks
from baton.core.kv_groups import KVCacheGroup, has_tables


class BackgroundLoads(NoLayerHooks):
    """Requests wait for their loads, so no layer of a step does.

    With one block table the blocks of a failed load are reported as invalid. With several tables a block id
    does not tell which tokens are missing, so the whole request is reported as failed.
    """

    def __init__(self, groups: Sequence[KVCacheGroup]) -> None:
        self._has_tables = has_tables(groups)
        self._received: set[str] = set()  # Requests for this step's report, failed loads included.
        self._failed: set[str] = set()
        self._invalid_blocks: set[int] = set()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received, self._received = self._received, set()
        return None, received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        _, received = self.get_finished(finished_req_ids)
        failed = self._failed & (received or set())
        self._failed -= failed
        return KVConnectorTransferResults(set(), received or set(), failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def _note_end(self, request_id: str, not_loaded: Iterable[int] | None = None) -> None:
        """`not_loaded`: blocks of a load that failed; None: it succeeded."""
        self._received.add(request_id)
        if not_loaded is None:
            return
        if self._has_tables:
            self._failed.add(request_id)
        else:
            self._invalid_blocks.update(not_loaded)
