"""What a connector has to keep, rule by rule. A rule's name is what the kit reports when it is broken.

They are vLLM's contract as `baton.contract.base` writes it down, and what hosts have learned the hard way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Rule:
    """`promise` is what holds of a sound connector."""

    name: str
    promise: str


_RULES = (
    # --- Answers -------------------------------------------------------------------------------
    Rule("raised", "No method raises; about one request, a UserError says what its client did wrong."),
    Rule("never-returned", "Every method returns: the whole engine waits for it."),
    Rule("wrong-type", "Every method answers with what the contract says it answers with."),
    Rule(
        "argument-modified", "Scheduler outputs, block lists and params are the host's: read, never changed."
    ),
    Rule("not-serialisable", "What one half says to the other can be pickled: they live in two processes."),
    Rule("params-not-plain", "kv_transfer_params are JSON: they travel in an HTTP answer."),
    Rule("stats-not-plain", "Stats are JSON: they travel to the process that serves metrics."),
    # --- Lookup and allocation -----------------------------------------------------------------
    Rule("lookup-has-side-effects", "get_num_new_matched_tokens may be asked any number of times."),
    Rule("match-out-of-range", "A match lies between 0 and the tokens that are not computed yet."),
    Rule(
        "async-without-tokens", "A match of no tokens is not asynchronous: nobody would ever report its end."
    ),
    Rule("lookup-deferred-for-ever", "Whoever says None to a lookup says something else in bounded time."),
    Rule("foreign-group", "A load fills KV-cache groups that exist."),
    # --- Steps ---------------------------------------------------------------------------------
    Rule("bind-not-kept", "Between bind and clear the metadata is bound: has_connector_metadata() is true."),
    Rule("bind-without-clear", "After clear_connector_metadata nothing is bound, whatever the step was."),
    Rule("empty-step-raised", "A step without tokens is a step: its hooks do what they always do."),
    Rule("empty-step-skipped", "Transfers go on in steps without tokens: often there are no others."),
    Rule(
        "dummy-run-raised", "Layer hooks captured in a dummy run take metadata of an empty scheduler output."
    ),
    Rule("dummy-run-touched", "A dummy run, in which nothing is computed, changes no byte of the KV cache."),
    Rule(
        "unknown-id-raised", "A request may end before a half has seen it run: no method raises for its id."
    ),
    # --- Ends of transfers -----------------------------------------------------------------------
    Rule("unknown-id-reported", "Only loads and loans that are open are reported as ended."),
    Rule("finished-twice", "The end of a load or of a loan is reported once."),
    Rule(
        "sent-before-finished", "A request is reported as sent only after request_finished lent its blocks."
    ),
    Rule(
        "failed-but-not-finished", "A failed receive is in finished_recving too, or it would wait for ever."
    ),
    Rule("foreign-block-reported", "Only blocks that a load was to fill are reported as invalid."),
    Rule("load-error-too-late", "A bad block is reported no later than the end of its load."),
    Rule(
        "load-never-ends", "Every asynchronous load is reported in finished_recving one day, failed or not."
    ),
    Rule(
        "delayed-free-never-returned", "Blocks kept by delay_free are reported in finished_sending one day."
    ),
    Rule("abort-leaks", "A request may be aborted at any time, and what it held comes back all the same."),
    Rule("work-pending-for-ever", "At rest nothing is pending: the engine could never sleep."),
    # --- Bytes -----------------------------------------------------------------------------------
    Rule("wrong-bytes", "A loaded block holds exactly the KV of the tokens that it stands for."),
    Rule("failed-load-unreported", "What could not be loaded is reported: as invalid blocks, or as failed."),
    Rule("lost-on-preemption", "A preempted request's blocks become others'; what is saved of them is not."),
    Rule("salt-ignored", "Requests of different cache_salt never share KV."),
    Rule(
        "params-believed", "kv_transfer_params that were made for another prompt bring no KV of that prompt."
    ),
    Rule("wrote-outside-load", "A connector writes into blocks of open loads, and into no others."),
    Rule("wrong-token", "With the connector an engine says what it says without."),
    Rule("reset-ignored", "After reset_cache() returned True, nothing that was stored before matches."),
    # --- The end ---------------------------------------------------------------------------------
    Rule("ids-left", "What is remembered about requests is forgotten when they have ended."),
    Rule("shutdown-raised", "shutdown ends a half, and may be called twice."),
    Rule("threads-left", "After shutdown no thread that the connector started is alive."),
    Rule("files-left", "After shutdown no file or socket that the connector opened is open."),
)

RULES: Final = {rule.name: rule for rule in _RULES}
