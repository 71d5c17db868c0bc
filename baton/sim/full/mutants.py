"""Each safeguard around the connector taken away, one at a time, to prove that full worlds miss it.

The guards of the protocol's machines have their mutants in `baton.sim.mutants`; here the machines sit in real
halves, and what is tampered with is mostly what the halves, the scheduler and the transport add to them. An
engine is changed when it has booted; nothing in production can be switched off.
"""

from __future__ import annotations

import hmac
from typing import Any

import msgspec

from baton.connectors.pull.intent import Borrow, read_params
from baton.connectors.push.prefills import _Step
from baton.connectors.push.scheduler import PushSchedulerHalf
from baton.core.errors import BadTransferParams, PeerError
from baton.core.ids import Address, TransferId
from baton.core.reasons import Fault
from baton.protocol.effects import Send, StreamEffect
from baton.protocol.messages import decode_envelope
from baton.protocol.push_consumer import PushConsumer
from baton.protocol.push_producer import PushProducer
from baton.protocol.push_stream import PushStream
from baton.protocol.signed_frame import ForgedFrame, OpenedFrame, ProcessKey
from baton.protocol.ticket import BadTicket
from baton.sim.connection import Checks
from baton.sim.full.engine import Engine
from baton.sim.full.group_mutants import EARLY_GROUPS, GROUPS
from baton.sim.full.parts import Parts
from baton.sim.mutants import AnyRank, NoDrain, NoExpiry, NoFence


def _machine(name: str, of: type[Any]) -> Parts:
    """The agent's machine of that name forgets a guard."""

    def tamper(engine: Engine) -> None:
        machine = getattr(engine.half._agent, name)
        assert type(machine) in of.__mro__
        machine.__class__ = of  # Others hold on to it.

    return Parts(tamper=tamper)


def _ignore_prompt(engine: Engine) -> None:
    """D takes a ticket for whatever prompt it comes with."""
    borrower = engine.half._borrower
    verify = borrower.verify

    def verify_all_but_prompt(request: Any) -> Any:
        try:
            return verify(request)
        except BadTicket as error:
            if error.reason is not Fault.PROMPT:
                raise
        borrower._incoming.pop(request.request_id)
        wish = read_params(request.kv_transfer_params, borrower._identity)
        assert isinstance(wish, Borrow)
        if wish.ticket.num_tokens > len(request.prompt_token_ids):
            raise BadTransferParams("longer than the prompt", field="ticket")
        return wish

    borrower.verify = verify_all_but_prompt  # type: ignore[method-assign]


def _forget_missing(engine: Engine) -> None:
    """A failed load is reported as received, its blocks not as invalid."""
    borrower = engine.half._borrower

    def order_failure(incoming: Any) -> None:
        borrower._orders.fail_load(incoming.request_id, ())

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


class _AnyRun(PushConsumer):
    """D believes in what it read before the prefill was preempted."""

    def _is_void(self, stream: PushStream, run: int) -> bool:
        stream.run, stream.blocks = run, ()  # The blocks would give it away.
        return False


class _NoStreamDrain(PushConsumer):
    """D frees the destination while early reads run."""

    def _has_unended(self, stream: PushStream) -> bool:
        return False

    def _drained(self, stream: PushStream) -> list[StreamEffect]:
        stream.reading.clear()
        return super()._drained(stream)


class _SameRun(PushProducer):
    """P takes blocks back and does not say so."""

    def preempted(self, transfer_id: TransferId, now: float) -> list[Send]:
        return []


def _announce_early(engine: Engine) -> None:
    """P tells of tokens when they are scheduled, not when they are computed."""
    half = engine.half
    if not isinstance(half, PushSchedulerHalf):
        return
    prefills = half._prefills
    scheduled = prefills.scheduled

    def scheduled_and_told(step: int, output: Any, now: float) -> bool:
        is_computing = scheduled(step, output, now)
        prefills.step_done(step, now)
        prefills._steps.setdefault(step, _Step())
        return is_computing

    prefills.scheduled = scheduled_and_told  # type: ignore[method-assign]


class _AnyWriter(ProcessKey):
    """Frames are not authenticated."""

    def open(self, frame: bytes, own_address: Address) -> OpenedFrame:
        try:
            _, public_key, _, body = msgspec.msgpack.decode(frame)
        except (ValueError, TypeError) as error:
            raise PeerError("malformed") from error
        envelope = decode_envelope(body)
        return OpenedFrame(envelope, public_key, is_proved=envelope.target == own_address)


class _AnyMember(ProcessKey):
    """A frame is authentic if some member of the cluster wrote it, whatever sender it names."""

    def open(self, frame: bytes, own_address: Address) -> OpenedFrame:
        try:
            return super().open(frame, own_address)
        except ForgedFrame:
            _, public_key, mac, body = msgspec.msgpack.decode(frame)
            if mac != hmac.digest(self._pair_key(public_key), body, "sha256"):
                raise
            envelope = decode_envelope(body)
            return OpenedFrame(envelope, public_key, is_proved=envelope.target == own_address)


def _keep_links(engine: Engine) -> None:
    """D goes on with a connection that is lost."""
    for worker in engine.workers:
        links = worker._links
        assert links is not None
        links._drop_lost_links = lambda: None  # type: ignore[method-assign]


def _key(of: type[ProcessKey]) -> Parts:
    def tamper(engine: Engine) -> None:
        engine.station._key.__class__ = of

    return Parts(tamper=tamper)


PULL: dict[str, Parts] = {
    "fence": _machine("_consumer", NoFence),
    "drain_reads": _machine("_consumer", NoDrain),
    "all_ranks": _machine("_consumer", AnyRank),
    "lease_expiry": _machine("_producer", NoExpiry),
    "ticket_hash": Parts(tamper=_ignore_prompt),
    "missing_blocks": Parts(tamper=_forget_missing),
    "loan": Parts(tamper=_lend_nothing),
    "hold_aborted": Parts(tamper=_free_early),
    "unfilled_unfindable": Parts(tamper=_find_unfilled),
    "bound_reads": Parts(bound_reads=False),
    "checksum": Parts(verified_reads=False),
    "take_back": Parts(takes_back=False),
    "request_mac": Parts(checks=Checks(requests=False)),
    "bound_answers": Parts(checks=Checks(requests=False, bound_answers=False)),
    "counters": Parts(checks=Checks(counters=False)),
    "link_replaced": Parts(tamper=_keep_links),
    "frame_mac": _key(_AnyWriter),
    "sender_bound": _key(_AnyMember),
}

PUSH: dict[str, Parts] = {
    "run": _machine("_streams", _AnyRun),
    "preempted": _machine("_prefills", _SameRun),
    "drain_early_reads": _machine("_streams", _NoStreamDrain),
    "computed_first": Parts(tamper=_announce_early),
}

MUTANTS: dict[str, dict[str, Parts]] = {
    "pull": {**PULL, **GROUPS},
    "push": {**PULL, **PUSH, **GROUPS, **EARLY_GROUPS},
}
