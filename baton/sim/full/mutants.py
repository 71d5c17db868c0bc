"""Each safeguard around the connector taken away, one at a time, to prove that full worlds miss it.

The guards of the protocol's machines have their mutants in `baton.sim.mutants`; here the machines sit in real
halves, and what is tampered with is mostly what the halves, the scheduler and the transport add to them. An
engine is changed when it has booted; nothing in production can be switched off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.connectors.pull.door import Borrow, read_params
from baton.connectors.pull.metadata import FailedLoad
from baton.core.errors import BadTransferParams
from baton.protocol.pull_consumer import PullConsumer
from baton.protocol.pull_producer import PullProducer
from baton.protocol.ticket import BadTicket, TicketFault
from baton.sim.full.engine import Engine
from baton.sim.full.parts import Parts
from baton.sim.mutants import AnyRank, NoDeadline, NoDrain, NoExpiry, NoFence


def _consumer(of: Callable[[Any], PullConsumer]) -> Parts:
    def tamper(engine: Engine) -> None:
        engine.half._agent._consumer = of(engine.cluster.timers)

    return Parts(tamper=tamper)


def _producer(of: Callable[[Any, Any], PullProducer]) -> Parts:
    def tamper(engine: Engine) -> None:
        engine.half._agent._producer = of(engine.address.epoch, engine.cluster.timers)

    return Parts(tamper=tamper)


def _ignore_prompt(engine: Engine) -> None:
    """D takes a ticket for whatever prompt it comes with."""
    borrower = engine.half._borrower
    verify = borrower.verify

    def verify_all_but_prompt(request: Any) -> Any:
        try:
            return verify(request)
        except BadTicket as error:
            if error.reason is not TicketFault.PROMPT:
                raise
        borrower._incoming.pop(request.request_id)
        wish = read_params(request.kv_transfer_params, borrower._identity)
        assert isinstance(wish, Borrow)
        if wish.ticket.num_tokens > len(request.prompt_token_ids):
            raise BadTransferParams("longer than the prompt", field="ticket")
        return wish.ticket

    borrower.verify = verify_all_but_prompt  # type: ignore[method-assign]


def _forget_missing(engine: Engine) -> None:
    """A failed load is reported as received, its blocks not as invalid."""
    borrower = engine.half._borrower

    def order_failure(incoming: Any) -> None:
        borrower._orders.append(FailedLoad(incoming.request_id, ()))

    borrower._order_failure = order_failure  # type: ignore[method-assign]


def _lend_nothing(engine: Engine) -> None:
    """P signs a ticket and lets the blocks go."""
    lender = engine.half._lender
    finished = lender.finished

    def finished_and_free(*args: Any) -> Any:
        _, params = finished(*args)
        return False, params

    lender.finished = finished_and_free  # type: ignore[method-assign, assignment]
    lender.take_freed = set  # type: ignore[method-assign]


def _free_early(engine: Engine) -> None:
    """An aborted load's blocks are given back while the reads are being cancelled."""
    remote = engine.scheduler.remote
    hold = remote.hold

    def let_go(request: Any, *, is_lent: bool) -> bool:
        if is_lent:
            return hold(request, is_lent=is_lent)
        remote._loading.pop(request.request_id, None)
        return False

    remote.hold = let_go  # type: ignore[method-assign]


def _find_unfilled(engine: Engine) -> None:
    """The prefix cache finds blocks that a load is still filling."""
    remote = engine.scheduler.remote
    park = remote.park

    def park_and_cache(request: Any, num_local_tokens: int, num_external_tokens: int) -> None:
        park(request, num_local_tokens, num_external_tokens)
        engine.scheduler.kv_cache.cache_blocks(request, num_local_tokens + num_external_tokens)

    remote.park = park_and_cache  # type: ignore[method-assign]


MUTANTS: dict[str, Parts] = {
    "fence": _consumer(NoFence),
    "drain_reads": _consumer(NoDrain),
    "all_ranks": _consumer(AnyRank),
    "deadline": _consumer(NoDeadline),
    "lease_expiry": _producer(NoExpiry),
    "ticket_hash": Parts(tamper=_ignore_prompt),
    "missing_blocks": Parts(tamper=_forget_missing),
    "loan": Parts(tamper=_lend_nothing),
    "hold_aborted": Parts(tamper=_free_early),
    "unfilled_unfindable": Parts(tamper=_find_unfilled),
    "bound_reads": Parts(bound_reads=False),
}
