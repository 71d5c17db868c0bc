"""Fresh prompts share no chunks, and a slice of a trace keeps its properties."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.bench.compare.prompts import (
    FreshPrompts,
    Prompt,
    offset_chunks,
    shared_share,
    slice_of_trace,
    write_trace,
)
from lab.bench.compare.session import FULL, QUICK, TRACE_PATH


def line(at_ms: int, num_tokens: int, answer_tokens: int, *chunks: int) -> str:
    entry = {"timestamp": at_ms, "input_length": num_tokens, "output_length": answer_tokens}
    return json.dumps({**entry, "hash_ids": list(chunks)})


TRACE = [
    line(1000, 600, 100, 0, 1),
    line(2000, 9000, 10, *range(50, 68)),  # Too long.
    line(3000, 1000, 5, 0, 2),
    line(5000, 700, 1000, 0, 1),
    line(9000, 100, 10, 7),
]


def sliced(**changes: Any) -> list[Prompt]:
    given = {"num_requests": 3, "tokens_max": 4000, "answer_tokens_max": 20, "answer_share": 0.1}
    return slice_of_trace(TRACE, **{**given, "duration_s": 8.0, **changes})


def times_of(trace: list[str], num_requests: int, duration_s: float) -> list[float]:
    limits: dict[str, Any] = {"tokens_max": 100, "answer_tokens_max": 1, "answer_share": 1}
    return [p.at_s for p in slice_of_trace(trace, num_requests=num_requests, duration_s=duration_s, **limits)]


def test_a_slice_takes_the_first_that_fit_and_keeps_their_order_and_gaps() -> None:
    prompts = sliced()
    assert [prompt.num_tokens for prompt in prompts] == [600, 1000, 700]
    assert [prompt.at_s for prompt in prompts] == [0.0, 4.0, 8.0]
    assert [prompt.answer_tokens for prompt in prompts] == [10, 1, 20]


def test_requests_of_one_tick_are_spread_over_it() -> None:
    """If they arrived together, their order would be random: a median of eight was 2.5 s or 5 s."""
    trace = [line(at, 100, 10, at) for at in (0, 0, 3000, 9000, 9000, 9000)]
    times = times_of(trace, 6, 22.0)
    assert times == pytest.approx([0, 3, 6, 18, 20, 22])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_a_slice_keeps_order_and_length_whatever_the_clock(ticks: list[int]) -> None:
    trace = [line(3000 * at, 100, 10, at) for at in sorted(ticks)]
    times = times_of(trace, 12, 5.0)
    assert all(before < after for before, after in pairwise(times))
    assert times[0] == 0
    assert len(ticks) == 1 or times[-1] == pytest.approx(5.0)


def test_the_included_trace_fills_a_session() -> None:
    for size in (QUICK, FULL):
        with TRACE_PATH.open(encoding="utf-8") as lines:
            prompts = slice_of_trace(
                lines,
                num_requests=size.trace_requests,
                tokens_max=4000,
                answer_tokens_max=64,
                answer_share=0.1,
                duration_s=size.trace_duration_s,
            )
        assert len(prompts) == size.trace_requests


def test_a_slice_may_be_empty_or_have_one_request() -> None:
    assert sliced(tokens_max=10) == []
    assert [prompt.at_s for prompt in sliced(num_requests=1)] == [0.0]


def test_the_share_of_tokens_seen_before_counts_equal_prefixes_only() -> None:
    one, other = Prompt(600, 1, (0, 1)), Prompt(700, 1, (0, 1))
    assert shared_share([one, other]) == (512 + 188) / 1300
    assert shared_share([one, Prompt(600, 1, (1, 0))]) == 0
    assert shared_share([]) == 0


def test_other_tokens_keep_the_common_prefixes() -> None:
    prompts = sliced()
    moved = offset_chunks(prompts, 1000)
    assert shared_share(moved) == shared_share(prompts)
    assert not {c for p in moved for c in p.chunks} & {c for p in prompts for c in p.chunks}
    assert [prompt.at_s for prompt in moved] == [prompt.at_s for prompt in prompts]


def test_fresh_prompts_share_nothing() -> None:
    fresh = FreshPrompts()
    prompts = [*fresh.take(3, 1300, 4), *fresh.take(2, 64, 4)]
    chunks = [chunk for prompt in prompts for chunk in prompt.chunks]
    assert len(set(chunks)) == len(chunks) == 3 * 3 + 2


def test_vllms_client_reads_a_written_trace(tmp_path: Path) -> None:
    write_trace([Prompt(600, 8, (4, 5), 1.5)], tmp_path / "trace.jsonl")
    (entry,) = map(json.loads, (tmp_path / "trace.jsonl").read_text().splitlines())
    assert entry == {"timestamp": 1.5, "input_length": 600, "output_length": 8, "hash_ids": [4, 5]}
