"""Mutants of fast worlds, by mode and guard."""

from typing import Any

from baton.connectors.pull.control.agent import Machines
from baton.sim.hosts.fast.parts import Parts
from baton.sim.kernel.connection import Checks
from baton.sim.mutants import machines as m


def _machines(**replaced: Any) -> Parts:
    return Parts(machines=Machines(**replaced))


WIRES: dict[str, Parts] = {
    "request_mac": Parts(checks=Checks(requests=False)),
    "bound_answers": Parts(checks=Checks(requests=False, bound_answers=False)),
    "counters": Parts(checks=Checks(counters=False)),
    "link_replaced": Parts(replaces_links=False),
    "frame_mac": Parts(seals_frames=False),
    "sender_bound": Parts(binds_senders=False),
}
"""Guards of transports and of the control channel, which both modes need."""

PULL: dict[str, Parts] = {
    "fence": _machines(consumer=m.NoFence),
    "drift": _machines(consumer=m.NoDrift),
    "from_send": _machines(consumer=m.FromReceipt),
    "claim": _machines(producer=m.AnyClaimer),
    "claim_number": _machines(producer=m.AnyClaim),
    "claim_epoch": _machines(producer=m.AnyEpoch),
    "bound_ops": Parts(bound_reads=False),
    "drain_reads": _machines(consumer=m.NoDrain),
    "all_ranks": _machines(consumer=m.AnyRank),
    "ticket_hash": Parts(prompts_differ=False),
    "lease_expiry": _machines(producer=m.NoExpiry),
    "loan_cap": _machines(producer=m.NoCap),
    "promises": _machines(producer=m.Abandon),
    "deadline": _machines(consumer=m.NoDeadline),
    "incarnation": _machines(admit=m.admit_all, consumer=m.AnySender),
    "window_length": Parts(window_error=1),
    "window_drop": Parts(drops_early=1),
    **WIRES,
}

PUSH: dict[str, Parts] = {
    "fence": _machines(consumer=m.NoFence),
    "bound_ops": Parts(bound_reads=False),
    "run_check": _machines(streams=m.AnyRun),
    "run_count": _machines(prefills=m.OneRun),
    "clear_first": _machines(streams=m.ReadsOver),
    "void_first": _machines(consumer=m.StartsOver),
    "drain_early": _machines(streams=m.NoEarlyDrain),
    "drain_handed": _machines(consumer=m.NoHandedDrain),
    "prompt_check": Parts(machines=Machines(prefills=m.AnyPrompt, streams=m.AnyTicket), prompts_differ=False),
    "pair_by_transfer": Parts(
        machines=Machines(prefills=m.AnyPrefill, streams=m.AnyTicket), prompts_differ=False
    ),
    "hold": _machines(prefills=m.NoHold),
    "silence": _machines(streams=m.NoSilence),
    "stream_deadline": _machines(streams=m.NoStreamDeadline),
    "window_length": Parts(window_error=1),
    "window_drop": Parts(drops_early=1),
    "early_tables": _machines(streams=m.OneTable),
    "early_first": _machines(streams=m.FromTokenZero),
    **WIRES,
}

MUTANTS = {"pull": PULL, "push": PUSH}
