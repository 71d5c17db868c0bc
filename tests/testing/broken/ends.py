"""Faults at the ends of loads and loans: not reported, reported twice, or for another id; blocks never
freed.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from baton.contract import KVConnectorMetadata, KVConnectorOutput, KVConnectorTransferResults, host
from tests.testing.broken import breaks
from tests.testing.sound import Loan, MemoryScheduler, MemoryWorker, Metadata


@breaks("load-never-ends")
class ForgetsShortLoads(MemoryWorker):
    """Does not report a load of a single block, unless the request ends meanwhile."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.forgotten: set[str] = set()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self.forgotten |= {load.request_id for load in self.late_loads if len(load.blocks) == 1}
        sent, received = super().get_finished(finished_req_ids)
        received = (received or set()) - self.forgotten | (self.forgotten & finished_req_ids)
        self.forgotten -= finished_req_ids
        return sent, received or None


@breaks("empty-step-skipped")
class LeavesOutEndedLoads(MemoryWorker):
    """Takes part in steps that order something, but not in those in which a load ends."""

    def takes_part(self, connector_metadata: KVConnectorMetadata) -> bool:
        assert isinstance(connector_metadata, Metadata)
        return bool(connector_metadata.loads or connector_metadata.saves or self.late_saves)


@breaks("finished-twice")
class TellsTwice(MemoryWorker):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.last: set[str] = set()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        _, received = super().get_finished(finished_req_ids)
        reported = self.last | (received or set())
        self.last = received or set()
        return None, reported or None


@breaks("unknown-id-reported", extra={"async": False})
class TellsOfSyncLoads(MemoryWorker):
    """Reports every load as received, including synchronous ones."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        _, received = super().get_finished(finished_req_ids)
        return None, (received or set()) | {load.request_id for load in self.metadata.loads} or None


@breaks("sent-before-finished")
class SendsEarly(MemoryScheduler):
    """Reports a request as sent when a step's saves are done, although the request still runs."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        before = {i: bool(t.unsaved_steps) for i, t in self.tracked.items()}
        super().update_connector_output(connector_output)
        done = {i for i, t in self.tracked.items() if before.get(i) and not t.unsaved_steps}
        if done:
            connector_output.finished_sending = (connector_output.finished_sending or set()) | done


@breaks("delayed-free-never-returned")
class NeverGivesBack(MemoryScheduler):
    """Keeps the blocks of every request, including those with nothing to send."""

    def request_finished(self, request: host.Request, block_ids: list[int]) -> Loan:
        is_lent, params = super().request_finished(request, block_ids)
        return is_lent or not request.status.name.endswith("ABORTED"), params


@breaks("abort-leaks", seed=2)  # This seed finds it in a second; others need up to 36.
class ForgetsAborted(MemoryWorker):
    """Reports no end of a load if its request has ended."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        for loads in (self.late_loads, self.new_loads):
            loads[:] = [load for load in loads if load.request_id not in finished_req_ids]
        return super().get_finished(finished_req_ids)


@breaks("failed-but-not-finished")
class FailsWithoutEnding(MemoryWorker):
    """Reports a load as failed but not as finished."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        return KVConnectorTransferResults(results.finished_sending, set(), results.finished_recving)


@breaks("load-error-too-late", breaks_store=True)
class ChecksTooLate(MemoryWorker):
    """Checks loaded blocks one step after they were used."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.found: set[int] = set()

    def get_block_ids_with_load_errors(self) -> set[int]:
        late, self.found = self.found, super().get_block_ids_with_load_errors()
        return late


@breaks("foreign-block-reported", breaks_store=True)
class NamesForeignBlocks(MemoryWorker):
    """Names blocks by their position in the prompt."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        places = {
            i for load in self.late_loads for i, (name, _) in enumerate(load.blocks) if name not in self.store
        }
        places |= {i for i, _ in enumerate(super().get_block_ids_with_load_errors())}
        return {10_000 + place for place in places}


@breaks("work-pending-for-ever")
class NeverRests(MemoryScheduler):
    def has_pending_push_work(self) -> bool:
        return self.step > 0


@breaks("ids-left")
class RemembersEverybody(MemoryScheduler):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.seen: dict[str, int] = {}

    def on_new_request(self, request: host.Request) -> None:
        super().on_new_request(request)
        self.seen[request.request_id] = request.num_tokens


@breaks("threads-left")
class LeavesThreads(MemoryWorker):
    """Starts a thread that waits for an event that is never set."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.stop = threading.Event()
        threading.Thread(target=self.stop.wait, args=(30.0,), daemon=True, name="saver").start()


@breaks("files-left", examples=6)
class LeavesFiles(MemoryWorker):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.opened = os.open(__file__, os.O_RDONLY)


@breaks("shutdown-raised")
class ShutsDownOnce(MemoryScheduler):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.is_open = True

    def shutdown(self) -> None:
        if not self.is_open:
            raise RuntimeError("is shut down already")
        self.is_open = False
