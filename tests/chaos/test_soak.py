"""Verdicts and the report of a soak run, from given samples."""

import msgspec
import pytest

from lab.chaos.soak import (
    GROWTH_MAX,
    SAMPLE_EVERY_S,
    Outcome,
    Sample,
    growth_defects,
    num_expired_loans,
    write_soak_report,
)

NUM_SAMPLES = 400


def sample(index: int, *, name: str = "p1", pid: int = 7, **fields: float) -> Sample:
    steady = Sample(index * SAMPLE_EVERY_S, name, pid, 300.0, 40, 12, 0.0, 0.1)
    return msgspec.structs.replace(steady, **fields)


def test_a_steady_run_and_a_run_without_samples_have_no_defect() -> None:
    assert growth_defects([sample(index) for index in range(NUM_SAMPLES)]) == []
    assert growth_defects([]) == []


@pytest.mark.parametrize("what", GROWTH_MAX)
def test_steady_growth_is_a_defect(what: str) -> None:
    slope = 3 * GROWTH_MAX[what] / NUM_SAMPLES
    samples = [sample(index, **{what: 50 + slope * index}) for index in range(NUM_SAMPLES)]
    [defect] = growth_defects(samples)
    assert defect.startswith(f"p1: {what} grew")


def test_growth_in_the_first_quarter_is_no_defect() -> None:
    samples = [sample(index, rss_mib=min(900.0, 100.0 + 9 * index)) for index in range(NUM_SAMPLES)]
    assert growth_defects(samples) == []


def test_short_peaks_are_no_defect() -> None:
    samples = [sample(index, descriptors=900 if index % 20 == 0 else 40) for index in range(NUM_SAMPLES)]
    assert growth_defects(samples) == []


def test_a_restarted_process_is_not_compared_with_the_previous_one() -> None:
    samples = [
        sample(index, pid=1 + index // 100, rss_mib=100.0 * (1 + index // 100))
        for index in range(NUM_SAMPLES)
    ]
    assert growth_defects(samples) == []


def test_expired_loans_are_a_defect_only_where_no_fault_is_their_reason() -> None:
    samples = [sample(index, pid=pid, expired=index) for pid in (1, 2) for index in range(3)]
    assert num_expired_loans(samples) == 4
    for faults, defects in (({"disconnects": 9}, ["4 loans expired"]), ({"disconnects": 1, "kill-d": 1}, [])):
        outcome = Outcome(hours=1, commit="c", num_clients=1, pause_s=1, faults=faults, expired_loans=4)
        assert outcome.defects == defects


def test_the_report_has_the_verdict() -> None:
    samples = [sample(index) for index in range(NUM_SAMPLES)]
    good = Outcome(
        hours=2,
        commit="abc",
        num_clients=6,
        pause_s=0.5,
        verdicts={"right": 5, "clear error": 1},
        faults={"kill-p": 3},
    )
    bad = msgspec.structs.replace(good, verdicts={"wrong": 1}, held=["p1 x=1"], growth=["p1: rss"])
    assert "Verdict: **good**" in write_soak_report(good, samples, machine="m", date="d")
    text = write_soak_report(bad, samples, machine="m", date="d")
    for words in ("1 wrong", "held: p1 x=1", "p1: rss", "| p1 | 300 | 300 | 40 | 40 | 12 | 12 |"):
        assert words in text
