"""Rules that every connector must keep. The kit reports a broken rule by its name.

They are vLLM's contract as written in `baton.contract.base`, plus rules that hosts rely on in practice.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Rule:
    """`promise`: what holds for a correct connector."""

    name: str
    promise: str


_RULES = (
    # --- Answers -------------------------------------------------------------------------------
    Rule("raised", "No method raises, except a UserError about one request for its client's mistake."),
    Rule("never-returned", "Every method returns: the whole engine waits for it."),
    Rule("wrong-type", "Every method returns the type that the contract names."),
    Rule(
        "argument-modified", "Scheduler outputs, block lists and params are the host's: read, never changed."
    ),
    Rule("not-serialisable", "What the halves send each other can be pickled: they are in two processes."),
    Rule("params-not-plain", "kv_transfer_params are JSON: they are sent in an HTTP response."),
    Rule("stats-not-plain", "Stats are JSON: they are sent to the process that serves metrics."),
    # --- Lookup and allocation -----------------------------------------------------------------
    Rule("lookup-has-side-effects", "get_num_new_matched_tokens may be asked any number of times."),
    Rule("match-out-of-range", "A match lies between 0 and the tokens that are not computed yet."),
    Rule("async-without-tokens", "A match of no tokens is not asynchronous: no rank would report its end."),
    Rule("lookup-deferred-for-ever", "A lookup that returns None returns a count after a bounded time."),
    Rule("foreign-group", "A load fills KV-cache groups that exist."),
    # --- Steps ---------------------------------------------------------------------------------
    Rule("bind-not-kept", "Between bind and clear the metadata is bound: has_connector_metadata() is true."),
    Rule("bind-without-clear", "After clear_connector_metadata nothing is bound, after any step."),
    Rule("empty-step-raised", "No hook raises in a step without tokens."),
    Rule("empty-step-skipped", "Transfers progress in steps without tokens: there may be no others."),
    Rule("dummy-run-raised", "In a dummy run, layer hooks accept the metadata of an empty scheduler output."),
    Rule("dummy-run-touched", "A dummy run, in which nothing is computed, changes no byte of the KV cache."),
    Rule("unknown-id-raised", "A request may end before it was scheduled: no method raises for its id."),
    # --- Ends of transfers -----------------------------------------------------------------------
    Rule("unknown-id-reported", "Only loads and loans that are open are reported as ended."),
    Rule("finished-twice", "The end of a load or of a loan is reported once."),
    Rule(
        "sent-before-finished", "A request is reported as sent only after request_finished lent its blocks."
    ),
    Rule(
        "failed-but-not-finished",
        "A failed receive is in finished_recving too: otherwise its request waits for ever.",
    ),
    Rule("foreign-block-reported", "Only blocks that an open load should fill are reported as invalid."),
    Rule("load-error-too-late", "A bad block is reported no later than the end of its load."),
    Rule("load-never-ends", "Every asynchronous load ends with finished_recving, failed or not."),
    Rule("delayed-free-never-returned", "Blocks kept by delay_free end with finished_sending."),
    Rule("abort-leaks", "A request may be aborted at any time, and its blocks are still returned."),
    Rule("work-pending-for-ever", "At rest no work is pending: otherwise the engine could never sleep."),
    # --- Bytes -----------------------------------------------------------------------------------
    Rule("wrong-bytes", "A loaded block holds exactly the KV of its tokens."),
    Rule("failed-load-unreported", "A failed load is reported: as invalid blocks, or as a failed request."),
    Rule("lost-on-preemption", "KV of a preempted request is not saved from blocks that have a new owner."),
    Rule("salt-ignored", "Requests of different cache_salt never share KV."),
    Rule("params-believed", "kv_transfer_params made for another prompt do not load that prompt's KV."),
    Rule("wrote-outside-load", "A connector writes only into blocks of open loads."),
    Rule("wrong-token", "An engine generates the same tokens with and without the connector."),
    Rule("reset-ignored", "After reset_cache() returned True, nothing that was stored before matches."),
    Rule(
        "old-weights-found",
        "After set_weights() returned True, only what requests of the time since have computed matches.",
    ),
    Rule("old-weights-loaded", "A load under way when set_weights() returns True ends as failed."),
    Rule("old-weights-lent", "A request that was open when set_weights() returned True is not lent."),
    # --- The end ---------------------------------------------------------------------------------
    Rule("ids-left", "State about a request is dropped when the request has ended."),
    Rule("shutdown-raised", "shutdown does not raise, and may be called twice."),
    Rule("threads-left", "After shutdown no thread that the connector started is alive."),
    Rule("files-left", "After shutdown no file or socket that the connector opened is open."),
)

RULES: Final = {rule.name: rule for rule in _RULES}
