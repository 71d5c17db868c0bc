"""Mutants of full worlds, by mode and guard.

Guards of the protocol's machines are in `machines`. Here the halves, the scheduler and the transport around
them lack one. What the engine has no constructor for is changed on the booted engine.
"""

from __future__ import annotations

import hmac
from typing import Any

import msgspec

from baton.connectors.pull.control.agent import Machines
from baton.core.errors import PeerError
from baton.core.ids import Address
from baton.protocol.messages import decode_envelope
from baton.protocol.signed_frame import ForgedFrame, OpenedFrame, ProcessKey
from baton.sim.hosts.full.engine import Engine
from baton.sim.hosts.full.parts import Parts
from baton.sim.kernel.connection import Checks
from baton.sim.mutants import halves
from baton.sim.mutants import machines as m
from baton.sim.mutants.groups import EARLY_GROUPS, GROUPS


def _machines(**replaced: Any) -> Parts:
    return Parts(machines=Machines(**replaced))


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


PULL: dict[str, Parts] = {
    "fence": _machines(consumer=m.NoFence),
    "drain_reads": _machines(consumer=m.NoDrain),
    "all_ranks": _machines(consumer=m.AnyRank),
    "lease_expiry": _machines(producer=m.NoExpiry),
    "ticket_hash": Parts(half=halves.IgnoresPrompt),
    "missing_blocks": Parts(half=halves.ForgetsMissing),
    "loan": Parts(half=halves.LendsNothing),
    "hold_aborted": Parts(tamper=_free_early),
    "unfilled_unfindable": Parts(tamper=_find_unfilled),
    "bound_reads": Parts(bound_reads=False),
    "checksum": Parts(verified_reads=False),
    "take_back": Parts(takes_back=False),
    "request_mac": Parts(checks=Checks(requests=False)),
    "bound_answers": Parts(checks=Checks(requests=False, bound_answers=False)),
    "counters": Parts(checks=Checks(counters=False)),
    "link_replaced": Parts(replaces_links=False),
    "frame_mac": Parts(process_key=_AnyWriter),
    "sender_bound": Parts(process_key=_AnyMember),
}

PUSH: dict[str, Parts] = {
    "run": _machines(streams=m.AnyRunAndBlocks),
    "preempted": _machines(prefills=m.SameRun),
    "drain_early_reads": _machines(streams=m.NoStreamDrain),
    "computed_first": Parts(half=halves.AnnouncesEarly),
}

SECOND: dict[str, Parts] = {
    "store_fence": Parts(offload_half=halves.StoresUnfenced),
    "store_failed": Parts(offload_half=halves.FindsFailedStores),
    "loader_told": Parts(multi_half=halves.TellsNoLoader),
    "lender_counts": Parts(multi_half=halves.FirstEndCounts),
}
"""Guards of offload and of Multi."""

MUTANTS: dict[str, dict[str, Parts]] = {
    "pull": {**PULL, **GROUPS, **SECOND},
    "push": {**PULL, **PUSH, **GROUPS, **EARLY_GROUPS, **SECOND},
}
