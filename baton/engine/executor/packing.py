"""Steps and their results as bytes: pickled, since both ends are ours. What a connector says in them is not.

If that cannot be pickled it is lost, as if the half that says it had raised, and the rest travels:

    the scheduler half's metadata   ranks hear nothing of the step's loads, and the scheduler gives them up
    a worker half's report          what has ended and which blocks are bad; not stats, events and metadata
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import Any

from baton.contract import KVConnectorOutput
from baton.engine.step import ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger(__name__)


def packed(message: Any) -> bytes:
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def packed_step(step: Any, scheduler_output: SchedulerOutput) -> tuple[bytes, str | None]:
    """`step` with this output in it, and why the connector's metadata was taken out of it, if it was."""

    def leave_out() -> bool:
        has_any = scheduler_output.kv_connector_metadata is not None
        scheduler_output.kv_connector_metadata = None
        return has_any

    return _packed_without(step, "build_connector_meta", leave_out)


def packed_result(result: ModelRunnerOutput) -> bytes:
    def leave_out() -> bool:
        report = result.kv_connector_output
        if report is None:
            return False
        result.kv_connector_output = KVConnectorOutput(
            finished_sending=report.finished_sending,
            finished_recving=report.finished_recving,
            failed_recving=report.failed_recving,
            invalid_block_ids=report.invalid_block_ids,
            expected_finished_count=report.expected_finished_count,
        )
        result.connector_error = result.connector_error or "its report cannot be sent"
        return True

    return _packed_without(result, "report after a step", leave_out)[0]


def _packed_without(message: Any, what: str, leave_out: Callable[[], bool]) -> tuple[bytes, str | None]:
    try:
        return packed(message), None
    except Exception as error:  # Whoever wrote what is to be pickled decides what it raises.
        if not leave_out():
            raise
        logger.exception("the connector's %s cannot be sent; the rest is", what)
        return packed(message), f"{what}: {type(error).__name__}: {error}"
