"""Mutants of fast worlds, by mode and guard."""

from baton.connectors.pull.control.agent import Machines
from lab.sim.kernel.connection import Checks
from lab.sim.kernel.parts import Parts, machines
from lab.sim.mutants import machines as m
from lab.sim.mutants import weights

SHARED: dict[str, Parts] = {
    "fence": machines(consumer=m.NoFence),
    "bound_ops": Parts(bound_reads=False),
    "window_length": Parts(window_error=1),
    "request_mac": Parts(checks=Checks(requests=False)),
    "bound_answers": Parts(checks=Checks(requests=False, bound_answers=False)),
    "counters": Parts(checks=Checks(counters=False)),
    "link_replaced": Parts(replaces_links=False),
}
"""Guards that every kind and mode of world needs."""

OF_PULL: dict[str, Parts] = {
    "drain_reads": machines(consumer=m.NoDrain),
    "all_ranks": machines(consumer=m.AnyRank),
    "lease_expiry": machines(producer=m.NoExpiry),
}
"""Guards of pull in fast and full worlds."""

FAST: dict[str, Parts] = {
    **SHARED,
    "window_drop": Parts(drops_early=1),
    "head_slices": Parts(slices_heads=False),
    "layer_missing": Parts(reads_all_layers=False),
    "state_slices": Parts(slices_states=False),
    "state_lent": Parts(keeps_lent_states=False),
    "frame_mac": Parts(seals_frames=False),
    "sender_bound": Parts(binds_senders=False),
    "weights_ticket": Parts(tamper=weights.believe_tickets),
    "weights_load": Parts(tamper=weights.load_on),
}
PULL: dict[str, Parts] = {
    **FAST,
    **OF_PULL,
    "drift": machines(consumer=m.NoDrift),
    "from_send": machines(consumer=m.FromReceipt),
    "claim": machines(producer=m.AnyClaimer),
    "claim_number": machines(producer=m.AnyClaim),
    "claim_epoch": machines(producer=m.AnyEpoch),
    "ticket_hash": Parts(prompts_differ=False),
    "loan_cap": machines(producer=m.NoCap),
    "promises": machines(producer=m.Abandon),
    "deadline": machines(consumer=m.NoDeadline),
    "weights_lent": Parts(tamper=weights.lend_on),  # Consumers of a push hear of the update.
    "incarnation": machines(admit=m.admit_all, consumer=m.AnySender),
}
PUSH: dict[str, Parts] = {
    **FAST,
    "run_check": machines(streams=m.AnyRun),
    "run_count": machines(prefills=m.OneRun),
    "clear_first": machines(streams=m.ReadsOver),
    "void_first": machines(consumer=m.StartsOver),
    "drain_early": machines(streams=m.NoEarlyDrain),
    "drain_handed": machines(consumer=m.NoHandedDrain),
    "prompt_check": Parts(machines=Machines(prefills=m.AnyPrompt, streams=m.AnyTicket), prompts_differ=False),
    "pair_by_transfer": Parts(
        machines=Machines(prefills=m.AnyPrefill, streams=m.AnyTicket), prompts_differ=False
    ),
    "hold": machines(prefills=m.NoHold),
    "silence": machines(streams=m.NoSilence),
    "stream_deadline": machines(streams=m.NoStreamDeadline),
    "early_tables": machines(streams=m.OneTable),
    "early_first": machines(streams=m.FromTokenZero),
    "state_after_stream": machines(streams=m.ForgetsStates),
    "weights_stream": Parts(tamper=weights.stream_on),
}
MUTANTS = {"pull": PULL, "push": PUSH}
