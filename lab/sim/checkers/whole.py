"""I5 whole: at rest every pool is full again; no request, block, loan, claim, read or waiting peer is
left over. Before that, a loan keeps what it lends and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from baton.protocol.ticket import open_ticket
from lab.sim.checkers.violation import Violation

if TYPE_CHECKING:
    from lab.sim.host.engine import Engine
    from lab.sim.host.processes import Process as RouterProcess
    from lab.sim.kernel.process import Process
    from lab.sim.kernel.reads import Write

TAKEN_BACK_S = 3.0  # A few steps, and less than ttl_s.


def check_engine(engine: Engine) -> None:
    scheduler, half = engine.scheduler, engine.half
    _check_left(
        engine,
        {
            "a request": len(scheduler.requests)
            + len(scheduler.queues.running)
            + scheduler.queues.num_waiting,
            "an open load": scheduler.remote.num_loading,
            "a held block table": scheduler.remote.num_held,
            "a store": int(engine.offload is not None and engine.offload.has_pending_push_work()),
            "a loan": half.num_open_loans,
            "a fetch": half.num_open_fetches,
            "a prefill or a want": half._agent.prefills.num_open,
            "a read in a rank's links": sum(
                w._links.num_open for w in engine.workers if w._links is not None
            ),
        },
        engine.cluster.reads.live,
    )
    try:
        scheduler.kv_cache.assert_empty()
    except AssertionError as error:
        raise Violation("I5", "a block is left over", f"{engine.name}: {error}") from error


def check_router(process: RouterProcess, name: str) -> None:
    admission = process.admission
    left = {
        "a request at an engine": sum(engine.load for engine in process.fleet.engines),
        "a prompt at an engine": sum(engine.queued_tokens for engine in process.fleet.engines),
        "a place in the queue": 0
        if admission is None
        else admission.num_waiting + sum(pool["running"] for pool in admission.snapshot()),
    }
    for what, count in left.items():
        if count:
            raise Violation("I5", f"{what} is left over", name)


def check_dropped(engine: Engine, ticket: str, stood_s: float) -> None:
    """TAKEN_BACK_S after an answer was dropped: its loan has ended, or a consumer has claimed it."""
    if not engine.is_alive or engine.world.paused_s + engine.hung_s > stood_s:
        return
    loan_id = open_ticket(ticket, engine.half._identity.ticket_key).loan_id
    loan = engine.half._agent.producer._loans.get(loan_id)
    if loan is not None and loan.claimer is None:
        raise Violation("I5", "a loan outlives its dropped answer", engine.name)


def check_loans(engine: Engine) -> None:
    """When a request has ended, it holds no blocks outside its windows."""
    kv_cache, size = engine.scheduler.kv_cache, engine.spec.block_tokens
    for request_id, hold in engine.scheduler.remote._held.items():
        if not hold.is_lent:
            continue
        tables = kv_cache._tables[request_id]
        for group, table in zip(kv_cache.groups, tables, strict=True):
            if table.first_kept != group.first_kept(hold.request.num_computed_tokens, size):
                raise Violation("I5", "a loan keeps blocks outside a window", request_id)


def _check_left(host: Process, left: Mapping[str, int], reads: Iterable[Write]) -> None:
    for what, count in left.items():
        if count:
            raise Violation("I5", f"{what} is left over", host.name)
    if any(read.consumer is host for read in reads):
        raise Violation("I5", "a running read is left over", host.name)
