"""Pickles steps and their results, and drops connector data that cannot be pickled.

Dropped data counts as if its half had raised. The rest is sent:

    the scheduler half's metadata   the ranks get none of the step's loads, and the scheduler fails them
    a worker half's report          ended requests and bad blocks are kept; stats, events and metadata are
    lost
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
    """Pickle `step`, which contains this output.

    Also returns why the connector's metadata was dropped, or None.
    """

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
        result.connector_error = result.connector_error or "its report cannot be pickled"
        return True

    return _packed_without(result, "report after a step", leave_out)[0]


def _packed_without(message: Any, what: str, leave_out: Callable[[], bool]) -> tuple[bytes, str | None]:
    try:
        return packed(message), None
    except Exception as error:  # Pickling calls the connector's code, which may raise anything.
        if not leave_out():
            raise
        logger.exception("the connector's %s cannot be pickled and is dropped", what)
        return packed(message), f"{what}: {type(error).__name__}: {error}"
