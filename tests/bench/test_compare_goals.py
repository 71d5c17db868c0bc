"""The median over rounds decides a goal; systems that are worse than a peer are named."""

import pytest

from lab.bench.compare.figures import Spread
from lab.bench.compare.goals import Verdict, is_worse, verdicts_of
from lab.bench.compare.journal import Findings, Samples
from lab.bench.compare.raw import RAW_PEERS
from lab.bench.compare.reasons import BOTH_SIDES, NOT_KNOWN, REASONS, Reason
from lab.bench.compare.systems import SYSTEMS


def findings(*samples: tuple[str, str, str, str, list[float]]) -> Findings:
    """Make findings of (part, setting, system, metric, values), one value per round."""
    return Findings(
        samples=[
            Samples(part, setting, system, metric, number, (value,))
            for part, setting, system, metric, values in samples
            for number, value in enumerate(values)
        ]
    )


def verdicts(goal: str, found: Findings) -> list[Verdict]:
    return [verdict for verdict in verdicts_of(found) if verdict.goal == goal]


def test_a_loaded_connector_may_cost_three_in_a_hundred() -> None:
    ours, peer = "vllm baton pull local", "vllm nixl pull"
    found = findings(
        ("a", "64 tokens, 1 at once", "vllm", "ttft_s", [1.0, 1.0, 1.0]),
        ("a", "64 tokens, 1 at once", ours, "ttft_s", [1.02, 1.5, 1.0]),
        ("a", "64 tokens, 1 at once", peer, "ttft_s", [2.0, 2.0, 2.0]),
    )
    mine, theirs = verdicts("a", found)
    assert mine.is_met is True
    assert mine.measured == "1.020 (1.000 to 1.500, 3 rounds)"
    assert theirs.is_met is None


def test_a_second_leg_has_a_limit_for_its_length() -> None:
    ours = "vllm baton pull local"
    found = findings(
        ("b", "513 tokens", ours, "leg_s", [0.112]),
        ("b", "513 tokens", ours, "cached_s", [0.1]),
        ("b", "3841 tokens", ours, "leg_s", [0.112]),
        ("b", "3841 tokens", ours, "cached_s", [0.1]),
    )
    assert [verdict.is_met for verdict in verdicts("b", found)] == [False, True]


def test_the_first_token_has_five_milliseconds_on_top() -> None:
    setting = "64 tokens, 1 at once"
    found = findings(
        ("c", setting, "vllm", "ttft_s", [0.1]),
        ("c", setting, "vllm baton push chunk", "ttft_s", [0.107]),
        ("c", setting, "vllm nixl push", "ttft_s", [0.2]),
        ("c", "256 tokens, 8 at once", "vllm", "ttft_s", [0.1]),
        ("c", "256 tokens, 8 at once", "vllm baton push chunk", "ttft_s", [0.9]),
    )
    assert [verdict.is_met for verdict in verdicts("c", found)] == [True, None]


def test_an_embedded_pair_is_compared_with_the_embedded_engine() -> None:
    setting = "64 tokens, 1 at once"
    found = findings(
        ("c", setting, "vllm", "ttft_s", [9.0]),
        ("c", setting, "baton", "ttft_s", [0.1]),
        ("c", setting, "baton pull", "ttft_s", [0.2]),
    )
    (verdict,) = verdicts("c", found)
    assert verdict.is_met is False
    assert "of baton's" in verdict.what


def test_the_embedded_engine_has_to_be_a_fifth_faster_than_vllm_in_its_dtype() -> None:
    setting = "128 tokens, 8 at once"
    found = findings(
        ("d", setting, "vllm", "tokens_per_s", [50.0, 50.0]),
        ("d", setting, "baton", "tokens_per_s", [61.0, 59.0]),
        ("d", setting, "vllm bfloat16", "tokens_per_s", [100.0]),
        ("d", setting, "baton bfloat16", "tokens_per_s", [110.0]),
    )
    wide, narrow = verdicts("d", found)
    assert wide.is_met is True
    assert wide.measured.startswith("1.200")
    assert narrow.is_met is False
    assert narrow.what == "baton bfloat16, 128 tokens, 8 at once: throughput of vllm bfloat16's"


def test_a_system_worse_than_its_peer_in_every_round_is_named() -> None:
    setting = "64 tokens, 1 at once"
    found = findings(
        ("c", setting, "vllm nixl pull", "ttft_s", [1.0, 1.0]),
        ("c", setting, "vllm baton pull local", "ttft_s", [1.2, 1.3]),
        ("c", setting, "vllm nixl pull", "tokens_per_s", [10.0, 10.0]),
        ("c", setting, "vllm baton pull local", "tokens_per_s", [20.0, 9.0]),
        ("raw", "16 KiB", "NIXL", "gb_per_s", [4.0, 4.0]),
        ("raw", "16 KiB", "baton local", "gb_per_s", [3.0, 3.0]),
    )
    first, second, summary = verdicts("e", found)
    assert "TTFT" in first.what
    assert "16 KiB, GB/s" in second.what
    assert not first.is_met
    assert summary.what == "1 of 3 comparisons with a peer"
    assert summary.is_met is False


def test_noise_is_not_worse() -> None:
    assert not is_worse(Spread(1.2, 0.99, 1.5, 3))
    assert not is_worse(Spread(1.02, 1.01, 1.03, 3))
    assert is_worse(Spread(1.2, 1.1, 1.5, 3))


def test_a_missed_goal_has_a_reason() -> None:
    tcp, push, setting = "vllm baton pull tcp", "vllm baton push chunk", "64 tokens, 1 at once"
    found = findings(
        ("b", "3841 tokens", tcp, "leg_s", [0.15, 0.15]),
        ("b", "3841 tokens", tcp, "cached_s", [0.1, 0.1]),
        ("c", setting, "vllm", "ttft_s", [0.1, 0.1, 0.1]),
        ("c", setting, push, "ttft_s", [0.1, 0.2, 0.3]),
        ("c", setting, tcp, "ttft_s", [0.2, 0.2, 0.3]),
        ("c", setting, "vllm nixl pull", "ttft_s", [0.2, 0.2, 0.3]),
        ("d", "128 tokens, 1 at once", "vllm", "tokens_per_s", [50.0]),
        ("d", "128 tokens, 1 at once", "baton", "tokens_per_s", [61.0]),
    )
    (known,), (noisy, unknown, peer), (met,) = (verdicts(goal, found) for goal in "bcd")
    assert "checksum" in known.why
    assert (noisy.why, unknown.why, peer.why, met.why) == (BOTH_SIDES, NOT_KNOWN, "", "")


def test_a_lost_comparison_has_a_reason() -> None:
    found = findings(
        ("raw", "1024 KiB", "NIXL, no reader thread", "gb_per_s", [4.0, 4.0]),
        ("raw", "1024 KiB", "baton local", "gb_per_s", [3.0, 3.0]),
    )
    assert [verdict.why for verdict in verdicts("e", found)] == [NOT_KNOWN, "see above"]


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason.text[:20])
def test_a_reason_names_measured_systems(reason: Reason) -> None:
    names = [*SYSTEMS, *RAW_PEERS]
    assert all(any(name.startswith(start) for name in names) for start in reason.systems)
    assert reason.goal in "abcde"


def test_without_measurements_there_are_no_verdicts() -> None:
    assert verdicts_of(Findings()) == []
