"""Watched worker half: forwards every call to the connector and notes broken rules.

Methods without a rule of their own are forwarded by the contract's table (`pass_on`). It runs in the rank's
process; the notes are sent in the rank's report.
"""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from baton.contract import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorSchedulerHalf,
    KVConnectorStats,
    KVConnectorTransferResults,
    KVConnectorWorkerHalf,
    KVConnectorWorkerMetadata,
)
from baton.contract.surface import SURFACE, Half, Row, Scope, completed, rows_of
from baton.core.config import EngineConfig
from baton.testing.contract.case import make_half
from baton.testing.contract.envelopes import RankNotes, WatchedMetadata, WatchedReport
from baton.testing.contract.leaks import RankLeaks
from baton.testing.contract.story import short, why

T = TypeVar("T")


def pass_on(row: Row) -> Callable[..., Any]:
    """Make the watcher's method or property for one row: asks `inner` and checks only that it does not raise.

    Connectors written for other hosts may lack the method. Errors of start-up are reported elsewhere.
    """

    def ask(self: Any, *arguments: Any) -> Any:
        if not hasattr(self.inner, row.name):
            return row.safe_answer()
        if row.scope is Scope.START:
            asked = getattr(self.inner, row.name)
            return asked if row.kind == "property" else asked(*arguments)
        return self._ask(row.name, *arguments, shown_arguments=tuple(filter(is_plain, arguments)))

    return ask


@completed(rows_of(Half.WORKER), pass_on)
class WatchedWorker(KVConnectorWorkerHalf):
    def __init__(self, inner: Any, rank: int, leaks: RankLeaks | None = None) -> None:
        """`inner`: a worker half, or any object with its methods, such as vLLM's connectors.

        `leaks` are searched for at shutdown if the metadata names a folder for final notes.
        """
        self.inner = inner
        self.prefer_cross_layer_blocks = bool(getattr(inner, "prefer_cross_layer_blocks", False))
        self.rank = rank
        self._notes = RankNotes(rank)
        self._step: WatchedMetadata | None = None
        self._sent: set[str] = set()  # Reported by this rank before.
        self._received: set[str] = set()
        self.has_write_fault = False  # The kit made a write of this rank's connector fail.
        self._leaks = leaks
        self._final_notes: str | None = None

    # --- Start -----------------------------------------------------------------------------------

    def get_required_kvcache_layout(self, config: Any) -> str | None:
        """Return what the connector's class returns, because the host allocates what the connector is shown.

        A connector of vLLM's base class would read vLLM's configuration, and `config` is Baton's.
        """
        inner = self.inner
        return inner.get_required_kvcache_layout(config) if isinstance(inner, KVConnectorBase_V1) else None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        metadata: KVConnectorHandshakeMetadata | None = self._ask("get_handshake_metadata")
        self._check_pickles("get_handshake_metadata", metadata)
        return metadata

    # --- Step ------------------------------------------------------------------------------------

    def takes_part(self, connector_metadata: KVConnectorMetadata) -> bool:
        """Return the connector's answer. If it is False, the notes go with the report of a later step."""
        assert isinstance(connector_metadata, WatchedMetadata)
        self._begin(connector_metadata)
        takes_part = True
        if hasattr(self.inner, "takes_part"):
            takes_part = self._ask("takes_part", connector_metadata.inner, is_quiet=True)
            self._check("wrong-type", isinstance(takes_part, bool), f"takes_part answers {short(takes_part)}")
        if not takes_part:
            self._step = None
        return bool(takes_part)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, WatchedMetadata)
        self._begin(kv_connector_metadata)
        self._ask("handle_preemptions", kv_connector_metadata.inner)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, WatchedMetadata)
        self._step = connector_metadata
        self._ask("bind_connector_metadata", connector_metadata.inner)
        self._check(
            "bind-not-kept",
            self.inner.has_connector_metadata(),
            "has_connector_metadata() is false after bind_connector_metadata",
        )

    def clear_connector_metadata(self) -> None:
        self._ask("clear_connector_metadata")
        self._check(
            "bind-without-clear",
            not self.inner.has_connector_metadata(),
            "has_connector_metadata() is true after clear_connector_metadata"
            + (" of a step without tokens" if self._step is not None and self._step.is_empty else ""),
        )
        self._step = None

    def has_connector_metadata(self) -> bool:
        return bool(self.inner.has_connector_metadata())

    start_load_kv = pass_on(SURFACE["start_load_kv"])
    wait_for_layer_load = pass_on(SURFACE["wait_for_layer_load"])
    save_kv_layer = pass_on(SURFACE["save_kv_layer"])
    wait_for_save = pass_on(SURFACE["wait_for_save"])

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if hasattr(self.inner, "get_transfer_results"):
            answer = self._ask("get_transfer_results", finished_req_ids)
        else:
            sending, recving = self._ask("get_finished", finished_req_ids)
            answer = KVConnectorTransferResults(sending or set(), recving or set())
        names = ("finished_sending", "finished_recving", "failed_recving")
        results: list[Any] = [getattr(answer, name, answer) for name in names]
        are_ids = all(
            r is None or (isinstance(r, set) and all(isinstance(i, str) for i in r)) for r in results
        )
        self._check("wrong-type", are_ids, f"get_transfer_results answers {short(answer)}, not sets of ids")
        sent, received, failed = (set(ids) if isinstance(ids, set) else set() for ids in results)
        for ids, before, name in ((sent, self._sent, "sent"), (received, self._received, "received")):
            twice = sorted(ids & before)
            self._check("finished-twice", not twice, f"reports {twice} as {name} again")
            before |= ids
        self._notes.sent |= sent
        self._notes.received |= received
        if failed:
            strays = sorted(failed - received)
            self._check(
                "failed-but-not-finished",
                not strays,
                f"{strays} are in failed_recving, not in finished_recving",
            )
        return KVConnectorTransferResults(sent, received, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks = self._ask("get_block_ids_with_load_errors")
        are_blocks = isinstance(blocks, set) and all(isinstance(b, int) for b in blocks)
        self._check("wrong-type", are_blocks, f"get_block_ids_with_load_errors answers {short(blocks)}")
        invalid: set[int] = blocks if are_blocks else set()
        self._notes.invalid_block_ids |= invalid
        return invalid

    def get_expected_finished_count(self) -> int:
        count = self._ask_if_there("get_expected_finished_count")
        is_count = count is None or (isinstance(count, int) and count >= 0)
        self._check("wrong-type", is_count, f"get_expected_finished_count answers {short(count)}")
        return count if is_count and count is not None else 0

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        stats: KVConnectorStats | None = self._ask("get_kv_connector_stats", is_quiet=True)
        if stats is not None:
            self._check("stats-not-plain", is_plain(stats.to_dict()), f"stats are {short(stats.to_dict())}")
        return stats

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        inner = self._ask_if_there("build_connector_worker_meta")
        self._check_pickles("build_connector_worker_meta", inner)
        if inner is not None:
            is_report = callable(getattr(inner, "aggregate", None))
            self._check("wrong-type", is_report, f"build_connector_worker_meta answers {short(inner)}")
        notes, self._notes = self._notes, RankNotes(self.rank)
        return WatchedReport((notes,), inner)

    def shutdown(self) -> None:
        if self._leaks is None or self._final_notes is None:
            self.inner.shutdown()
            return
        try:
            self._ask("shutdown", rule="shutdown-raised")
        finally:
            for rule, left in self._leaks.find():
                self._check(rule, not left, f"after shutdown, in the process of the rank, {left}")
            write_final_notes(self._final_notes, self._notes)

    # --- Notes -----------------------------------------------------------------------------------

    def _begin(self, metadata: WatchedMetadata) -> None:
        self._step = metadata
        self._received -= metadata.opened_loads
        self._final_notes = metadata.final_notes

    def take_notes(self) -> RankNotes:
        """Take the notes that no report has carried; for a host in the same process."""
        notes, self._notes = self._notes, RankNotes(self.rank)
        return notes

    def _ask(
        self,
        method: str,
        *arguments: Any,
        shown_arguments: tuple[Any, ...] | None = None,
        is_quiet: bool = False,
        rule: str | None = None,
    ) -> Any:
        """Call the connector; an exception breaks `rule`.

        `shown_arguments`: the arguments that the story shows; None: all.
        """
        step = self._step
        try:
            answer = getattr(self.inner, method)(*arguments)
        except Exception as error:  # The exception is the breach.
            if self.has_write_fault:  # The host gets the error, which is all that the rule asks for.
                self._notes.raised_after_fault = f"{method} raised {why(error)}"
                raise
            rule = rule or self._rule_of_raising(method)
            self._check(rule, False, f"{method} raised {why(error)}")
            raise
        self._notes.checked["raised"] += 1
        if step is not None:
            if step.is_dummy:
                self._notes.checked["dummy-run-raised"] += 1
            elif step.is_empty:
                self._notes.checked["empty-step-raised"] += 1
            if step.unseen_finished_ids and method == "get_transfer_results":
                self._notes.checked["unknown-id-raised"] += 1
        if not is_quiet and is_news(answer):
            shown = ", ".join(map(short, arguments if shown_arguments is None else shown_arguments))
            self._notes.calls.append(
                f"rank {self.rank}.{method}({shown})" + (f" -> {short(answer)}" if answer is not None else "")
            )
        return answer

    def _ask_if_there(self, method: str) -> Any:
        """Call a method that connectors written for other hosts may lack."""
        return self._ask(method) if hasattr(self.inner, method) else None

    def _rule_of_raising(self, method: str) -> str:
        step = self._step
        if step is None:
            return "raised"
        if step.is_dummy:
            return "dummy-run-raised"
        if step.unseen_finished_ids and method == "get_transfer_results":
            return "unknown-id-raised"
        return "empty-step-raised" if step.is_empty else "raised"

    def _check(self, rule: str, holds: bool, detail: str) -> None:
        self._notes.checked[rule] += 1
        if not holds:
            self._notes.breaches.append((rule, f"rank {self.rank}: {detail}"))

    def _check_pickles(self, method: str, value: Any) -> None:
        if value is None:
            return
        problem = why_not_pickled(value)
        self._check(
            "not-serialisable", problem is None, f"what {method} answers cannot be pickled: {problem}"
        )


def why_not_pickled(value: Any) -> str | None:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception as error:  # Any error of a foreign __reduce__ is a breach.
        return f"{type(error).__name__}: {error}"
    return None


def is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def is_news(answer: Any) -> bool:
    """Return whether the answer is worth a line in the story even in an empty step."""
    if isinstance(answer, tuple):
        return any(map(is_news, answer))
    if isinstance(answer, KVConnectorTransferResults):
        return bool(answer.finished_sending or answer.finished_recving or answer.failed_recving)
    return answer is not None and answer is not False and answer != 0 and answer not in (set(), {}, [])


def write_final_notes(folder: str, notes: RankNotes) -> None:
    """Write the notes that no report can carry: one file per rank in a process of its own."""
    Path(folder, str(notes.rank)).write_bytes(pickle.dumps(notes))


def read_final_notes(folder: str, num_ranks: int) -> list[RankNotes | None]:
    """Read the final notes by rank after the processes have ended; None for a rank that wrote none."""
    files = [Path(folder, str(rank)) for rank in range(num_ranks)]
    return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


class WatchedFactory:
    """ConnectorFactory for ranks in other processes."""

    def scheduler_half(self, config: EngineConfig) -> KVConnectorSchedulerHalf:
        raise AssertionError("the kit makes the scheduler half itself, in the process of the story")

    def worker_half(self, config: EngineConfig, tp_rank: int) -> KVConnectorWorkerHalf:
        leaks = RankLeaks()  # Made before the half.
        return WatchedWorker(make_half(config, KVConnectorRole.WORKER, tp_rank), tp_rank, leaks)


watched_factory = WatchedFactory()
PATH = f"{__name__}:watched_factory"
