"""vLLM's own /metrics and log lines show the counts of our connectors."""

from tests.vllm.engines import Server
from tests.vllm.prompts import prompts

PROMPT = prompts()[13]


def test_both_sides_of_a_handoff_are_counted_and_nothing_fails(plain_pair: tuple[Server, Server]) -> None:
    p, d = plain_pair
    p.wait_all_returned(prompts()[0])  # Otherwise loans of other tests would expire meanwhile.
    counted = [
        (p, "baton:kv_loans_total"),
        (d, "baton:kv_transfer_seconds_count"),
        (d, "baton:kv_transfer_bytes_total"),
        (d, "vllm:external_prefix_cache_hits_total"),
    ]
    failed = [(p, "baton:kv_loans_expired_total"), (d, "baton:kv_transfer_failures_total")]
    before = [engine.metric(name) for engine, name in counted + failed]
    d.tokens(PROMPT, p.prefill(PROMPT, cache_salt="metrics"), cache_salt="metrics")
    for (engine, name), value in zip(counted, before, strict=False):
        engine.wait_metric(name, lambda count, value=value: count > value)
    loans, transfers, moved, hits, *failures = (
        engine.metric(name) - value for (engine, name), value in zip(counted + failed, before, strict=True)
    )
    assert (loans, transfers, failures) == (1, 1, [0, 0])
    # K and V of 4 heads of 32 floats in 4 layers: 4 KiB a token, in whole blocks of D's or of P's.
    assert 4096 * len(PROMPT) <= moved <= 4096 * (len(PROMPT) + 128)
    assert hits >= len(PROMPT) - 1


def test_the_log_has_the_counts(plain_pair: tuple[Server, Server]) -> None:
    """vLLM writes a line every ten seconds if there is something to report."""
    p, d = plain_pair
    d.tokens(PROMPT, p.prefill(PROMPT, cache_salt="log"), cache_salt="log")
    d.wait_log(r"KV Transfer metrics: .*transfers=[1-9]")
    p.wait_log(r"KV Transfer metrics: .*loans=[1-9]")
