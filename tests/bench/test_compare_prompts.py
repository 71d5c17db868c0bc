"""Prompts are fresh when they have to be, and a slice of a trace keeps what makes the trace."""

import json
from pathlib import Path
from typing import Any

from baton.bench.compare.prompts import (
    FreshPrompts,
    Prompt,
    offset_chunks,
    shared_share,
    slice_of_trace,
    write_trace,
)


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


def test_a_slice_takes_the_first_that_fit_and_keeps_their_order_and_gaps() -> None:
    prompts = sliced()
    assert [prompt.num_tokens for prompt in prompts] == [600, 1000, 700]
    assert [prompt.at_s for prompt in prompts] == [0.0, 4.0, 8.0]
    assert [prompt.answer_tokens for prompt in prompts] == [10, 1, 20]


def test_a_slice_of_nothing_or_of_one_is_no_accident() -> None:
    assert sliced(tokens_max=10) == []
    assert [prompt.at_s for prompt in sliced(num_requests=1)] == [0.0]


def test_the_share_of_tokens_seen_before_counts_equal_prefixes_only() -> None:
    one, other = Prompt(600, 1, (0, 1)), Prompt(700, 1, (0, 1))
    assert shared_share([one, other]) == (512 + 188) / 1300
    assert shared_share([one, Prompt(600, 1, (1, 0))]) == 0
    assert shared_share([]) == 0


def test_other_tokens_share_what_the_first_ones_did() -> None:
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


def test_a_written_trace_is_one_that_vllms_client_reads(tmp_path: Path) -> None:
    write_trace([Prompt(600, 8, (4, 5), 1.5)], tmp_path / "trace.jsonl")
    (entry,) = map(json.loads, (tmp_path / "trace.jsonl").read_text().splitlines())
    assert entry == {"timestamp": 1.5, "input_length": 600, "output_length": 8, "hash_ids": [4, 5]}
