"""Ledger of what a connector owes its host: loads that must end, and lent blocks that must come back.

update_state_after_alloc(n > 0) --> loading --finished_recving--> (ended)
request_finished -> True        --> lent    --finished_sending--> (ended)
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from baton.contract import KVConnectorOutput
from baton.testing.contract.envelopes import RankNotes
from baton.testing.contract.story import Story


@dataclass(slots=True)
class OpenLoad:
    """A load of any KV-cache groups."""

    request_id: str
    block_ids: list[int]  # All blocks that the request holds of the prefix that is computed or loaded.
    filled_block_ids: list[int]  # The subset of `block_ids` that the connector may write to.
    num_tokens: int
    is_async: bool


@dataclass(slots=True)
class Ledger:
    story: Story
    num_ranks: int = 1
    num_faults: int = 0  # Faults that the kit injected, in the store or in writes into the KV cache.
    num_store_faults: int = 0
    # Blocks of loads with a failed write that no rank has reported.
    faulted_blocks: set[int] = field(default_factory=set)
    known: set[str] = field(default_factory=set)  # Requests that were passed to the scheduler half.
    ended: set[str] = field(default_factory=set)  # request_finished was called.
    aborted: set[str] = field(default_factory=set)
    loading: dict[str, OpenLoad] = field(default_factory=dict)
    # Loads of the step that is being scheduled.
    sync_loads: dict[str, OpenLoad] = field(default_factory=dict)
    landed: set[str] = field(default_factory=set)  # Subset of `loading` whose end all ranks have reported.
    opened: set[str] = field(default_factory=set)  # Loads whose metadata has not been sent to the ranks.
    lent: set[str] = field(default_factory=set)
    stale: set[str] = field(default_factory=set)  # Requests that were open when the weights changed.
    stale_loads: set[str] = field(default_factory=set)  # Loads since then that no report has failed.
    received: set[str] = field(default_factory=set)
    sent: set[str] = field(default_factory=set)
    loaded_blocks: set[int] = field(default_factory=set)  # Blocks of loads that have ended.
    # Ranks that reported a request id in finished_recving (since its last load began) or in finished_sending.
    _received_by: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    _sent_by: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    # Ranks that reported a block id as invalid.
    _invalid_by: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    # Synchronous loads of each step that has not reported, oldest first.
    _steps: deque[dict[str, OpenLoad]] = field(default_factory=deque)

    def open_load(self, load: OpenLoad) -> None:
        (self.loading if load.is_async else self.sync_loads)[load.request_id] = load
        self.received.discard(load.request_id)  # Once preempted, a request may load again.
        self.landed.discard(load.request_id)
        self._received_by.pop(load.request_id, None)
        self.faulted_blocks.difference_update(load.filled_block_ids)
        self.opened.add(load.request_id)
        self.story.seen["loads in the background" if load.is_async else "loads in a step"] += 1

    def end_request(self, request_id: str, *, is_lent: bool, is_aborted: bool) -> None:
        self.ended.add(request_id)
        if is_aborted:
            self.aborted.add(request_id)
            self.story.seen["aborts while loading" if request_id in self.loading else "other aborts"] += 1
        if is_lent:
            self.lent.add(request_id)
            self.story.seen["delayed frees"] += 1

    def change_weights(self) -> None:
        self.stale = self.known - self.ended
        self.stale_loads |= self.loading.keys()

    def begin_step(self) -> None:
        """Close the step that is being scheduled. Its report comes after the reports of earlier steps."""
        self._steps.append(self.sync_loads)
        self.sync_loads = {}

    def writable_blocks(self) -> set[int]:
        loads = [load for load in self.loading.values() if load.request_id not in self.landed]
        for of_step in self._steps:
            loads += of_step.values()
        return {block_id for load in loads for block_id in load.filled_block_ids}

    def blocks_of_loads(self, request_ids: Iterable[str]) -> set[int]:
        """Return the blocks that the open loads of these requests will fill."""
        tables = (self.loading, self.sync_loads, *self._steps)
        loads = [table[id_] for table in tables for id_ in request_ids if id_ in table]
        return {block_id for load in loads for block_id in load.filled_block_ids}

    def note_landed(self, request_ids: Iterable[str]) -> None:
        """Note that all ranks have reported the end of these loads: no rank may write any more."""
        self.landed.update(self.loading.keys() & set(request_ids))

    def note_store_fault(self) -> None:
        self.num_faults += 1
        self.num_store_faults += 1

    def note_write_fault(self) -> None:
        self.num_faults += 1
        self.faulted_blocks |= self.writable_blocks()

    def take_notes(self, name: str, notes: RankNotes) -> None:
        """Record what one rank of the engine `name` noted."""
        for request_id in notes.received:
            self._received_by[request_id].add(notes.rank)
        for request_id in notes.sent:
            self._sent_by[request_id].add(notes.rank)
        if notes.invalid_block_ids:
            self.faulted_blocks.clear()
        for block_id in notes.invalid_block_ids:
            self._invalid_by[block_id].add(notes.rank)
        if notes.raised_after_fault:
            self.story.end_inconclusive(f"{name} rank {notes.rank}: {notes.raised_after_fault}")
        self.story.take_notes(name, notes)

    def ranks_that_received(self, request_id: str) -> str:
        """Describe which ranks reported the request in finished_recving, and which did not."""
        return _which_ranks(self._received_by.get(request_id, ()), self.num_ranks)

    def ranks_that_sent(self, request_id: str) -> str:
        """Describe which ranks reported the request in finished_sending, and which did not."""
        return _which_ranks(self._sent_by.get(request_id, ()), self.num_ranks)

    def take_report(self, report: KVConnectorOutput) -> None:
        """Take the aggregated report of the oldest open step, as the scheduler does."""
        of_step = self._steps.popleft() if self._steps else {}
        self._check_blocks(report.invalid_block_ids, of_step)
        if report.failed_recving:
            self.faulted_blocks.clear()
        self.stale_loads -= report.failed_recving or set()
        self.stale_loads = {
            id_ for id_ in self.stale_loads if report.invalid_block_ids.isdisjoint(self._filled_by(id_))
        }
        for request_id in sorted(report.finished_recving or ()):
            self._take_received(request_id)
        for request_id in sorted(report.finished_sending or ()):
            self._take_sent(request_id)
        self.loaded_blocks.update(b for load in of_step.values() for b in load.filled_block_ids)
        for block_id in report.invalid_block_ids:
            self._invalid_by.pop(block_id, None)

    def _filled_by(self, request_id: str) -> list[int]:
        return self.loading[request_id].filled_block_ids

    def _check_blocks(self, invalid: set[int], of_step: dict[str, OpenLoad]) -> None:
        if not invalid:
            return
        self.story.seen["failed loads"] += 1
        loads = (*self.loading.values(), *of_step.values())
        fillable = {block_id for load in loads for block_id in load.block_ids}
        if strangers := sorted(invalid - fillable):
            is_late = set(strangers) <= self.loaded_blocks
            rule = "load-error-too-late" if is_late else "foreign-block-reported"
            ranks = set().union(*(self._invalid_by.get(block_id, ()) for block_id in strangers))
            detail = f"blocks {strangers} are reported as invalid ({_which_ranks(ranks, self.num_ranks)})"
            self.story.check(rule, False, f"{detail}; open loads: {loads}")
        self.story.check("foreign-block-reported", True)
        self.story.check("load-error-too-late", True)

    def _take_received(self, request_id: str) -> None:
        load = self.loading.pop(request_id, None)
        if load is not None:
            is_old = request_id in self.stale_loads
            self.stale_loads.discard(request_id)
            if request_id not in self.ended:  # Otherwise its blocks are not used.
                detail = f"the load of {request_id} has begun before the weights changed, and is delivered"
                self.story.check("old-weights-loaded", not is_old, detail)
            self.received.add(request_id)
            self.landed.discard(request_id)
            self.loaded_blocks.update(load.filled_block_ids)
        is_double = load is None and request_id in self.received
        ranks = self.ranks_that_received(request_id)
        self.story.check(
            "finished-twice", not is_double, f"finished_recving has {request_id} again ({ranks})"
        )
        self.story.check(
            "unknown-id-reported",
            load is not None or is_double,
            f"finished_recving has {request_id!r}, which has no open load ({ranks})",
        )

    def _take_sent(self, request_id: str) -> None:
        story = self.story
        is_lent = request_id in self.lent
        self.lent.discard(request_id)
        is_double = not is_lent and request_id in self.sent
        is_early = not is_lent and request_id in self.known and request_id not in self.ended
        ranks = self.ranks_that_sent(request_id)
        story.check("finished-twice", not is_double, f"finished_sending has {request_id} again ({ranks})")
        story.check(
            "sent-before-finished",
            not is_early,
            f"finished_sending has {request_id}, which still runs ({ranks})",
        )
        story.check(
            "unknown-id-reported",
            is_lent or is_double or is_early,
            f"finished_sending has {request_id!r}, whose blocks were not lent ({ranks})",
        )
        self.sent.add(request_id)


def _which_ranks(reported: Collection[int], num_ranks: int) -> str:
    missing = sorted(set(range(num_ranks)) - set(reported))
    parts = [f"reported by {_ranks(sorted(reported))}"] if reported else []
    parts += [f"not reported by {_ranks(missing)}"] if missing else []
    return ", ".join(parts)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
