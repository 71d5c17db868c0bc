"""All mutants, by mode and guard, and the faults of the worlds that look for them.

Guards of the protocol's machines are in `machines`. Here the halves, the scheduler and the transport around
them lack one. What the engine has no constructor for is changed on the booted engine.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import msgspec

from baton.connectors.pull.consumer.fetch import Fetch
from baton.connectors.pull.control.agent import Machines
from baton.connectors.pull.intent import FetchIntent, hash_of_tokens
from baton.connectors.pull.reads.link import Link, LinkOpener
from baton.connectors.pull.reads.operations import Ready
from baton.core.errors import PeerError
from baton.core.ids import Address
from baton.core.layout import CopySpan
from baton.core.reasons import Fault
from baton.protocol.effects import Part
from baton.protocol.grouped_prompt import GroupedPrompt
from baton.protocol.messages import decode_envelope
from baton.protocol.signed_frame import ForgedFrame, OpenedFrame, ProcessKey
from baton.protocol.ticket import BadTicket, open_ticket
from baton.transport.base.interface import PeerHandle, Prepared
from baton.router.request.answers import LegAnswer
from baton.router.request.events import Leg
from baton.router.request.tokens.stream import FirstToken
from baton.router.request.tokens.first_tokens import Given
from baton.router.fleet.view import FleetView
from baton.router.request.machine import Machine, Request
from baton.router.values.members import Membership, Order
from baton.router.fleet.notes import Note, Probed
from baton.router.fleet.peers import Peers
from baton.router.fleet.replica import Replica
from baton.router.values.settings import EngineKey
from lab.sim.host.engine import Engine
from lab.sim.host.port import Port
from lab.sim.kernel.connection import Checks
from lab.sim.kernel.parts import Parts, machines
from lab.sim.kernel.windows import shortened
from lab.sim.mutants import halves
from lab.sim.mutants import machines as m
from lab.sim.mutants import weights as w


def _free_early(engine: Engine) -> None:
    """An aborted load's blocks are freed while the reads are being cancelled."""
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
    """A frame is authentic if any member of the cluster wrote it, whatever sender it names."""

    def open(self, frame: bytes, own_address: Address) -> OpenedFrame:
        try:
            return super().open(frame, own_address)
        except ForgedFrame:
            _, public_key, mac, body = msgspec.msgpack.decode(frame)
            if mac != hmac.digest(self._pair_key(public_key), body, "sha256"):
                raise
            envelope = decode_envelope(body)
            return OpenedFrame(envelope, public_key, is_proved=envelope.target == own_address)


# --- Layouts --------------------------------------------------------------------------------------


def _from_first_unit(span: CopySpan) -> CopySpan:
    """The span, if each rank had the same heads, or the same units of a state."""
    return msgspec.structs.replace(
        span,
        local_offset=span.local_offset - span.local_offset % span.local_stride,
        remote_offset=span.remote_offset - span.remote_offset % span.remote_stride,
    )


def _slice_no_heads(engine: Engine) -> None:
    """The KV heads of each rank are taken for the first ones."""

    def prepare(port: Port, peer: PeerHandle, spans: Sequence[CopySpan]) -> Prepared:
        return Port.prepare(port, peer, tuple(map(_from_first_unit, spans)))

    for port in engine.ports:
        port.prepare = partial(prepare, port)  # type: ignore[method-assign]


class _SlicesNoStates(LinkOpener):
    def open(self, link: Link) -> Ready:
        ready = LinkOpener.open(self, link)
        spans = {name: tuple(map(_from_first_unit, of_state)) for name, of_state in ready.states.items()}
        ready.states = spans
        return ready


def _slice_no_states(engine: Engine) -> None:
    """The units of a state of each rank are taken for the first ones."""
    for worker in engine.workers:
        assert worker._links is not None
        opener = worker._links._opener
        worker._links._opener = _SlicesNoStates(*(getattr(opener, field.name) for field in fields(opener)))


# --- Cache groups ---------------------------------------------------------------------------------


def _believe_windows(engine: Engine) -> None:
    """D takes a ticket with any groups and blocks."""
    fetches, agent = engine.half._fetches, engine.half._agent
    verify = fetches.verify

    def verify_all_but_layout(request: Any, fetch: FetchIntent) -> None:
        try:
            verify(request, fetch)
        except BadTicket as error:
            if error.reason is not Fault.LAYOUT:
                raise

    def accept_of_stream(fetch: Fetch, text: str, now: float) -> None:
        ticket = open_ticket(text, fetches._identity.ticket_key)
        agent.carry_out(agent.streams.accept(fetch.claim, ticket, now), now)

    fetches.verify = verify_all_but_layout  # type: ignore[method-assign]
    fetches._reads.open_ticket = accept_of_stream  # type: ignore[method-assign]
    fetches._reads.planner.check_windows = lambda group_routes, ticket: None  # type: ignore[method-assign]


def _free_lent_windows(engine: Engine) -> None:
    """P frees a lent window's blocks."""
    remote, kv_cache = engine.scheduler.remote, engine.scheduler.kv_cache
    hold = remote.hold

    def hold_and_free(request: Any, *, is_lent: bool) -> bool:
        if not hold(request, is_lent=is_lent):
            return False
        if is_lent:
            for group, table in zip(kv_cache.groups, kv_cache._tables[request.request_id], strict=True):
                if group.window is not None:
                    dropped, table.blocks = table.blocks[table.first_kept :], []
                    engine.pool.free_blocks(reversed(dropped))
        return True

    remote.hold = hold_and_free  # type: ignore[method-assign]


def _drop_early(engine: Engine) -> None:
    """Blocks are freed one token before the window has left them."""
    kv_cache = engine.scheduler.kv_cache
    kv_cache.groups = shortened(kv_cache.groups, 1)


def _keep_outside(engine: Engine) -> None:
    """A request keeps blocks outside its windows when it ends."""
    engine.scheduler.kv_cache.drop_outside_windows = lambda request: None  # type: ignore[method-assign]


def _believe_half(engine: Engine) -> None:
    """A load that failed in part goes on from its valid beginning, also with windows."""
    remote, kv_cache = engine.scheduler.remote, engine.scheduler.kv_cache
    settle = remote.settle

    def settle_as_one_table(load: Any, **how: Any) -> bool:
        is_hybrid, kv_cache.is_hybrid = kv_cache.is_hybrid, False
        is_of_use = settle(load, **how)
        kv_cache.is_hybrid = is_hybrid
        return is_of_use

    remote.settle = settle_as_one_table  # type: ignore[method-assign]


# --- Recurrent states -------------------------------------------------------------------------------


def _lend_as_shorter(engine: Engine) -> None:
    """The ticket names one token less than the state has."""
    loans = engine.half._loans
    lend = loans._lend

    def lend_as_shorter(
        request: Any,
        loan_id: Any,
        held: Any,
        num_tokens: int,
        prompt_hash: Any,
        transfer_id: Any,
        now: Any,
        prefilled: Any = None,
    ) -> dict[str, Any]:
        if engine.cluster.has_states and num_tokens > 1:
            num_tokens, prefilled = num_tokens - 1, None
            prompt_hash = hash_of_tokens(request, request.all_token_ids, num_tokens, loans._identity)
        return lend(request, loan_id, held, num_tokens, prompt_hash, transfer_id, now, prefilled)

    loans._lend = lend_as_shorter  # type: ignore[method-assign]


def _count_last_twice(engine: Engine) -> None:
    """A consumer that does not take the producer's token computes the last one on the state after it."""
    remote, kv_cache, half = engine.scheduler.remote, engine.scheduler.kv_cache, engine.half
    settle = remote.settle

    def settle_as_attention(load: Any, *, is_continued: bool = False) -> bool:
        has_states, kv_cache.has_states = kv_cache.has_states, False
        is_of_use = settle(load, is_continued=is_continued)
        kv_cache.has_states = has_states
        return is_of_use

    remote.settle = settle_as_attention  # type: ignore[method-assign]
    take = half.take_prefilled_tokens
    half.take_prefilled_tokens = (  # type: ignore[method-assign]
        lambda request_id: None if engine.cluster.has_states else take(request_id)
    )


def _compute_on(engine: Engine) -> None:
    """P computes one more token into a state that it has lent."""
    half = engine.half
    finished = half.request_finished_all_groups

    def compute(block_id: int, num_layers: int) -> None:
        for memory in engine.memories:
            memory.state(block_id, num_layers)[:] ^= 1

    def finish(request: Any, tables: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        is_lent, params = finished(request, tables)
        last = (request.num_computed_tokens - 1) // engine.spec.block_tokens
        for group, table in zip(engine.groups, tables, strict=True):
            if is_lent and group.is_state:
                engine.world.after(0.5, partial(compute, table[last], len(group.layers)))
        return is_lent, params

    half.request_finished_all_groups = finish  # type: ignore[method-assign, assignment]


def _forget_states(engine: Engine) -> None:
    """D does not read the states of one group."""
    orders = engine.half._fetches.orders
    read_lent = orders.read_lent

    def read_less(fetch: Fetch, pairs: Any) -> None:
        assert fetch.offer is not None
        ticket = fetch.offer.ticket
        assert ticket is not None
        prompt = GroupedPrompt(fetch.group_routes, ticket.num_tokens, ticket.block_tokens)
        if prompt.states() and fetch.unread is None:
            tokens = prompt.cut([Part(fetch.first_token, fetch.num_moved_tokens)])
            fetch.unread = tokens + prompt.states()[:-1]
        read_lent(fetch, pairs)

    orders.read_lent = read_less  # type: ignore[method-assign]


# --- Weights ----------------------------------------------------------------------------------------


def _load_on(engine: Engine) -> None:
    """A load that is under way when the weights change is used. The scheduler drops it, and the connector."""
    engine.scheduler.remote.make_loads_stale = lambda: None  # type: ignore[method-assign]
    w.load_on(engine)


def _keep_prefixes(engine: Engine) -> None:
    """The prefix cache finds blocks of the weights before."""
    engine.scheduler.kv_cache.reset_prefix_cache = lambda **_: True  # type: ignore[method-assign]


def _keep_computed(engine: Engine) -> None:
    """Requests go on with the KV that they have."""
    scheduler, change = engine.scheduler, engine.scheduler.change_weights

    def change_all_but_requests(weights: str, version: str | None) -> None:
        holders, scheduler.queues.holders = scheduler.queues.holders, list  # type: ignore[method-assign]
        change(weights, version)
        scheduler.queues.holders = holders  # type: ignore[method-assign]

    scheduler.change_weights = change_all_but_requests  # type: ignore[method-assign]


class _FollowsAny(Machine):
    """An answer is continued by an engine whose answer names other weights."""

    def __init__(self, view: FleetView, request: Request) -> None:
        super().__init__(view, request)
        self._engines.has_other_weights = lambda leg: False  # type: ignore[method-assign]


# --- The router ------------------------------------------------------------------------------------


class _TellsAll(Machine):
    """What D answers again after the first token goes to the client again."""

    def __init__(self, view: FleetView, request: Request) -> None:
        super().__init__(view, request)
        reply, tell_first = self._reply, self._reply.tell_first

        def tell_again(head: LegAnswer, first: FirstToken, where: str) -> bool:
            if not reply.has_begun:
                return tell_first(head, first, where)
            reply.send(first.events)
            return False

        reply.tell_first = tell_again  # type: ignore[method-assign]


class _ResumesShort(Machine):
    """The rest of a broken stream is asked for as if the client had a token less than it has."""

    def __init__(self, view: FleetView, request: Request) -> None:
        super().__init__(view, request)
        given_now = self._first.given

        def given() -> Given | None:
            given = given_now()
            return given and replace(given, token_ids=given.token_ids[:-1])

        self._first.given = given  # type: ignore[method-assign]


class _KeepsPlaces(Machine):
    """A request that has ended keeps its place in the engines."""

    def __init__(self, view: FleetView, request: Request) -> None:
        super().__init__(view, request)
        self._legs.leave_queue = lambda num_output: None  # type: ignore[method-assign]


class _HearsNoProbes(Replica):
    """A worker does not learn that an engine is back."""

    def apply(self, note: Note, now_s: float) -> None:
        if not isinstance(note, Probed):
            super().apply(note, now_s)


class _NeverSilent(Peers):
    """The load of a router that has died stays."""

    def expire(self, now_s: float) -> bool:
        return False


class _EmptiesRoles(Membership):
    """A source that has lost its members takes the last ones of a role away."""

    def _let_go(
        self, gone: list[EngineKey], last: set[EngineKey], ordered: Collection[EngineKey], now_s: float
    ) -> list[Order]:
        return super()._let_go(gone, set(), ordered, now_s)


SHARED: dict[str, Parts] = {
    "fence": machines(consumer=m.NoFence),
    "drain_reads": machines(consumer=m.NoDrain),
    "all_ranks": machines(consumer=m.AnyRank),
    "lease_expiry": machines(producer=m.NoExpiry),
    "bound_ops": Parts(bound_reads=False),
    "window_length": Parts(window_error=1),
    "request_mac": Parts(checks=Checks(requests=False)),
    "bound_answers": Parts(checks=Checks(requests=False, bound_answers=False)),
    "link_replaced": Parts(replaces_links=False),
    "ticket_hash": Parts(half=halves.IgnoresPrompt),
    "missing_blocks": Parts(half=halves.ForgetsMissing),
    "loan": Parts(half=halves.LendsNothing),
    "aborted_load_held": Parts(tamper=_free_early),
    "filled_before_cached": Parts(tamper=_find_unfilled),
    "checksum": Parts(verified_reads=False),
    "take_back": Parts(takes_back=False),
    "frame_mac": Parts(process_key=_AnyWriter),
    "sender_bound": Parts(process_key=_AnyMember),
    # Layouts
    "head_slices": Parts(tamper=_slice_no_heads),
    "state_slices": Parts(tamper=_slice_no_states),
    "layer_missing": Parts(half=halves.MissesLayer),
    # Cache groups
    "group_order": Parts(half=halves.ReadsNextGroup),
    "window_source": Parts(half=halves.ReadsFromFront),
    "window_target": Parts(half=halves.WritesNextGroup),
    "ticket_windows": Parts(tamper=_believe_windows),
    "lent_windows": Parts(tamper=_free_lent_windows),
    "window_drop": Parts(tamper=_drop_early),
    "window_keep": Parts(tamper=_keep_outside),
    "whole_load": Parts(tamper=_believe_half),
    # Recurrent states
    "state_length": Parts(tamper=_lend_as_shorter),
    "state_twice": Parts(tamper=_count_last_twice),
    "state_missing": Parts(tamper=_forget_states),
    "state_lent": Parts(tamper=_compute_on),
    # Weights
    "weights_ticket": Parts(tamper=w.believe_tickets),
    "weights_load": Parts(tamper=_load_on),
}
"""Guards of the handoff in both modes."""

PULL: dict[str, Parts] = {
    **SHARED,
    # Parts that know no mode
    "weights_cache": Parts(tamper=_keep_prefixes),
    "weights_computed": Parts(tamper=_keep_computed),
    "weights_chunk": Parts(offload_half=halves.NamesNoWeights),
    "weights_answer": Parts(router=_FollowsAny),
    "tells_all": Parts(router=_TellsAll),
    "resumes_short": Parts(router=_ResumesShort),
    "keeps_places": Parts(router=_KeepsPlaces),
    "probes_told": Parts(replica=_HearsNoProbes),
    "silent_router": Parts(peers=_NeverSilent),
    "last_members": Parts(membership=_EmptiesRoles),
    "store_fence": Parts(offload_half=halves.StoresUnfenced),
    "store_failed": Parts(offload_half=halves.FindsFailedStores),
    "store_states": Parts(offload_half=halves.FindsNoStates),
    "store_state_length": Parts(offload_half=halves.StoresAnyState),
    "loader_told": Parts(multi_half=halves.TellsNoLoader),
    "lender_counts": Parts(multi_half=halves.LendsNothing),
    # Leases
    "drift": machines(consumer=m.NoDrift),
    "from_send": machines(consumer=m.FromReceipt),
    "claim": machines(producer=m.AnyClaimer),
    "claim_number": machines(producer=m.AnyClaim),
    "claim_epoch": machines(producer=m.AnyEpoch),
    "loan_cap": machines(producer=m.NoCap),
    "promises": machines(producer=m.Abandon),
    "deadline": machines(consumer=m.NoDeadline),
}
PUSH: dict[str, Parts] = {
    **SHARED,
    "counters": Parts(checks=Checks(counters=False)),  # Transports know no mode, and this one is rare.
    "run": machines(streams=m.AnyRun),
    "preempted": machines(prefills=m.SameRun),
    "clear_first": machines(streams=m.ReadsOver),
    "void_first": machines(consumer=m.StartsOver),
    "drain_early": machines(streams=m.NoEarlyDrain),
    "prompt_check": Parts(machines=Machines(prefills=m.AnyPrompt, streams=m.AnyTicket)),
    "hold": machines(prefills=m.NoHold),
    "silence": machines(streams=m.NoSilence),
    "stream_deadline": machines(streams=m.NoStreamDeadline),
    "computed_first": Parts(half=halves.AnnouncesEarly),
    "early_tables": machines(streams=m.OneTable),
    "early_first": machines(streams=m.FromTokenZero),
    "state_after_stream": machines(streams=m.ForgetsStates),
}
# Faults that the worlds of a mutant have; all others are drawn. They make a rare case likely, and a world
# without the mutant holds all the same.
BARE = {"caches": 0.0, "offloads": 0.0, "streams": ("layer",)}
SLOW = {**BARE, "read_mean_s": 3.0}
AGAIN = {**SLOW, "again": 0.5, "new_name": 0.0, "crashes": 0.0}
SMALL = {
    **BARE,
    "spares": (0,),
    "budgets": (5,),
    "read_mean_s": 0.3,
    "read_slow": 0.4,
    "cancel_mean_s": 1.0,
}
FAULTS: dict[str, Mapping[str, Any]] = {
    "fence": {"pauses": 0.7, "suspends": 0.05, "crashes": 0.0, "read_mean_s": 0.3},
    "bound_ops": {**BARE, "read_mean_s": 0.3, "last_words": 0.3, "crashes": 0.0},
    "request_mac": {"read_lies": 0.15},
    "bound_answers": {"read_lies": 0.15},
    "counters": {"read_lies": 0.15},
    "link_replaced": {"link_loss": 0.2},
    "frame_mac": {"frame_lies": 0.3},
    "sender_bound": {"false_names": 0.2},
    "checksum": {"read_corrupt": 0.1},
    "filled_before_cached": {"read_mean_s": 3.0, "offloads": 0.0, "caches": 1.0},
    "ticket_hash": {**BARE, "ticket_replay": 1.0},
    "weights_ticket": {"updates": 3},
    "weights_load": {**SLOW, "updates": 3},
    "weights_cache": {"updates": 3},
    "weights_computed": {"updates": 3},
    "weights_chunk": {"updates": 3, "offloads": 1.0},
    "weights_answer": {"updates": 3, "crashes": 1.0},
    "store_fence": {"offloads": 1.0, "copy_mean_s": 0.5, "spares": (0,)},
    "store_failed": {"offloads": 1.0, "copy_error": 0.3},
    "store_states": {"offloads": 1.0},
    "store_state_length": {"offloads": 1.0},
    "drift": {**SLOW, "suspends": 0.2, "delay_mean_s": 0.001, "timer_late_s": 0.0},
    "from_send": {**SLOW, "ambush": 0.3, "delay_mean_s": 0.8, "crashes": 0.0},
    "claim": {**SLOW, "ticket_replay": 1.0},
    "claim_number": {**AGAIN, "delay_mean_s": 0.001},
    "claim_epoch": {**AGAIN, "delay_mean_s": 0.001, "last_words": 0.3},
    "loan_cap": {**SLOW, "clingy": True, "read_hang": 0.5, "crashes": 0.0},
    "promises": {**SLOW, "drains": 0.5},
    "deadline": {**SLOW, "read_hang": 0.1},
    "run": SMALL,
    "preempted": {**SMALL, "abort": 0.0, "crashes": 0.0, "leg_loss": 0.0},
    "clear_first": SMALL,
    "void_first": {**SMALL, "abort": 0.0, "crashes": 0.0, "leg_loss": 0.0},
    "drain_early": {**SLOW, "cancel_mean_s": 1.0, "abort": 0.25},
    "prompt_check": {**BARE, "ticket_replay": 1.0},
    "silence": {**BARE, "crashes": 1.0},
    "stream_deadline": {**BARE, "hung_steps": 0.02},
    "early_tables": BARE,
    "early_first": BARE,
    "state_after_stream": BARE,
}
MUTANTS = {
    mode: {guard: replace(parts, faults=FAULTS.get(guard, {})) for guard, parts in guards.items()}
    for mode, guards in (("pull", PULL), ("push", PUSH))
}
