"""Report of the demo: criteria for success, and a table that fits a plain terminal."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from baton.cli.demo_check import Outcome
from baton.cli.demo_prompts import DemoPrompt
from baton.cli.demo_report import make_table, print_summary

GOOD = Outcome(
    prompt=DemoPrompt("below one block", tuple(range(2600))),
    must_move=True,
    expected=(1, 2, 3),
    got=(1, 2, 3),
    first_token_s=1.2345,
    cached_tokens=2496,
    moved_bytes=123_456_789,
    transfer_s=0.1234,
    wire_s=0.0123,
)


def shown(*outcomes: Outcome) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(make_table(outcomes))
    print_summary(console, outcomes, took_s=28.0, model=Path("m"), log_folder=Path("logs"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_row_fits_into_eighty_columns_uncut() -> None:
    text = shown(*[GOOD] * 20)
    assert "…" not in text
    row = ["20", "below", "one", "block", "2,600", "2,496", "123.5", "MB", "123.4", "10.04", "1234", "yes"]
    assert row in [line.split() for line in text.splitlines()]
    assert "20 of 20 answers equal" in text
    assert "Next: baton up m" in text


@pytest.mark.parametrize(
    ("outcome", "complaint"),
    [
        (replace(GOOD, got=(1, 9, 3)), "#1 differs at token 1: 9 instead of 2"),
        (replace(GOOD, got=(1, 2)), "#1 differs at its length: 2 tokens instead of 3"),
        (replace(GOOD, expected=(), got=()), "#1 differs"),
        (replace(GOOD, moved_bytes=0), "#1 was not handed over"),
    ],
)
def test_bad_rows_are_named(outcome: Outcome, complaint: str) -> None:
    assert not outcome.is_good
    text = shown(outcome)
    assert complaint in text
    assert "logs are in logs" in text
    assert "Next:" not in text


def test_a_handoff_without_bytes_is_good_if_the_decode_engine_had_all_blocks() -> None:
    assert replace(GOOD, must_move=False, moved_bytes=0).is_good
