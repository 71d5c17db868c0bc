"""vLLM's own /metrics and log lines show the counts of our connectors."""

from tests.vllm.engines import Server
from tests.vllm.prompts import prompts

PROMPT = prompts()[13]
BYTES, SECONDS = "baton:kv_transfer_bytes", "baton:kv_transfer_seconds"
LOG = r"KV Transfer metrics: .*transfers=[1-9]"


def test_both_sides_of_a_handoff_are_counted(plain_pair: tuple[Server, Server]) -> None:
    p, d = plain_pair
    num_loans = p.metric("baton:kv_loans_total")
    num_transfers, num_bytes = d.metric(f"{SECONDS}_count"), d.metric(f"{BYTES}_total")
    salt = {"cache_salt": "metrics"}
    d.tokens(PROMPT, p.prefill(PROMPT, **salt), **salt)
    p.wait_metric("baton:kv_loans_total", lambda count: count == num_loans + 1)
    d.wait_metric(f"{SECONDS}_count", lambda count: count == num_transfers + 1)
    # K and V of 4 heads of 32 floats in 4 layers: 4 KiB a token, in whole blocks of D's or of P's.
    moved = d.metric(f"{BYTES}_total") - num_bytes
    assert 4096 * len(PROMPT) <= moved <= 4096 * (len(PROMPT) + 128)


def test_nothing_failed_in_a_healthy_handoff(plain_pair: tuple[Server, Server]) -> None:
    p, d = plain_pair
    p.wait_all_returned(prompts()[0])  # Otherwise loans of other tests would expire meanwhile.
    before = d.metric("baton:kv_transfer_failures_total"), p.metric("baton:kv_loans_expired_total")
    salt = {"cache_salt": "healthy"}
    d.tokens(PROMPT, p.prefill(PROMPT, **salt), **salt)
    after = d.metric("baton:kv_transfer_failures_total"), p.metric("baton:kv_loans_expired_total")
    assert after == before


def test_the_log_has_the_counts(plain_pair: tuple[Server, Server]) -> None:
    """vLLM writes a line every ten seconds if there is something to report."""
    p, d = plain_pair
    salt = {"cache_salt": "log"}
    d.tokens(PROMPT, p.prefill(PROMPT, **salt), **salt)
    d.wait_log(LOG)
    p.wait_log(r"KV Transfer metrics: .*loans=[1-9]")


def test_tokens_of_a_peer_are_not_counted_as_local_prefix_hits(plain_pair: tuple[Server, Server]) -> None:
    p, d = plain_pair
    hits = d.metric("vllm:external_prefix_cache_hits_total")
    salt = {"cache_salt": "hits"}
    d.tokens(PROMPT, p.prefill(PROMPT, **salt), **salt)
    d.wait_metric("vllm:external_prefix_cache_hits_total", lambda count: count >= hits + len(PROMPT) - 1)
