"""Mutants of full worlds, by mode and guard.

Guards of the protocol's machines are in `machines`. Here the halves, the scheduler and the transport around
them lack one. What the engine has no constructor for is changed on the booted engine.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import msgspec

from baton.connectors.pull.consumer.fetch import Fetch
from baton.connectors.pull.intent import FetchIntent, hash_of_tokens
from baton.core.errors import PeerError
from baton.core.ids import Address
from baton.core.reasons import Fault
from baton.protocol.effects import Part
from baton.protocol.grouped_prompt import GroupedPrompt
from baton.protocol.messages import decode_envelope
from baton.protocol.signed_frame import ForgedFrame, OpenedFrame, ProcessKey
from baton.protocol.ticket import BadTicket, open_ticket
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
from lab.sim.hosts.full.engine import Engine
from lab.sim.kernel.parts import Parts, machines
from lab.sim.kernel.windows import shortened
from lab.sim.mutants import halves
from lab.sim.mutants import machines as m
from lab.sim.mutants import weights as w
from lab.sim.mutants.fast import OF_PULL, SHARED


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


def _cache_within_block(engine: Engine) -> None:
    """The prefix cache takes the state within a block for that at its end."""
    kv_cache = engine.scheduler.kv_cache
    size = kv_cache.block_size

    def cache_state(request: Any, table: Any, group: int) -> None:
        last = -(-request.num_computed_tokens // size)
        if 0 < last <= min(len(table.blocks), len(request.block_hashes)):
            engine.pool.cache_full_blocks(request, table.blocks, last - 1, last, group)

    kv_cache._cache_state = cache_state  # type: ignore[method-assign]


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


PULL: dict[str, Parts] = {
    **SHARED,
    **OF_PULL,
    "ticket_hash": Parts(half=halves.IgnoresPrompt),
    "missing_blocks": Parts(half=halves.ForgetsMissing),
    "loan": Parts(half=halves.LendsNothing),
    "aborted_load_held": Parts(tamper=_free_early),
    "filled_before_cached": Parts(tamper=_find_unfilled),
    "checksum": Parts(verified_reads=False),
    "take_back": Parts(takes_back=False),
    "frame_mac": Parts(process_key=_AnyWriter),
    "sender_bound": Parts(process_key=_AnyMember),
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
    "state_boundary": Parts(tamper=_cache_within_block),
    "state_missing": Parts(tamper=_forget_states),
    # Weights
    "weights_ticket": Parts(tamper=w.believe_tickets),
    "weights_load": Parts(tamper=_load_on),
    "weights_cache": Parts(tamper=_keep_prefixes),
    "weights_computed": Parts(tamper=_keep_computed),
    "weights_chunk": Parts(offload_half=halves.NamesNoWeights),
    "weights_answer": Parts(router=_FollowsAny),
    # The router
    "tells_all": Parts(router=_TellsAll),
    "resumes_short": Parts(router=_ResumesShort),
    "keeps_places": Parts(router=_KeepsPlaces),
    "probes_told": Parts(replica=_HearsNoProbes),
    "silent_router": Parts(peers=_NeverSilent),
    "last_members": Parts(membership=_EmptiesRoles),
    # Offload and Multi
    "store_fence": Parts(offload_half=halves.StoresUnfenced),
    "store_failed": Parts(offload_half=halves.FindsFailedStores),
    "store_states": Parts(offload_half=halves.FindsNoStates),
    "store_state_length": Parts(offload_half=halves.StoresAnyState),
    "loader_told": Parts(multi_half=halves.TellsNoLoader),
    "lender_counts": Parts(multi_half=halves.LendsNothing),
}
PUSH: dict[str, Parts] = {
    **PULL,
    "run": machines(streams=m.AnyRunAndBlocks),
    "preempted": machines(prefills=m.SameRun),
    "drain_early_reads": machines(streams=m.NoStreamDrain),
    "computed_first": Parts(half=halves.AnnouncesEarly),
    "early_tables": machines(streams=m.OneTable),
}
MUTANTS = {"pull": PULL, "push": PUSH}
