"""What counts as a tie: nothing but what the engines' own rounding explains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from baton.engine.checkpoints.random_model import write_checkpoint
from benchmarks.compare.journal import Journal, read_journal
from benchmarks.compare.tie_analysis import Exact, Said, compare, exact_model, hold, write

VOCAB = 4


def exact_of(gap: float) -> Exact:
    """Token 0 is the best, 1 falls short by `gap`, everything else by a lot."""

    def logprobs(prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        logits = torch.tensor([2.0, 2.0 - gap, -5.0, -6.0], dtype=torch.float64)
        return torch.log_softmax(logits, dim=-1).expand(len(answer), VOCAB)

    return logprobs


def said(token_ids: Sequence[int], exact: Exact, error: float) -> Said:
    """By an engine whose logprobs are all too small by `error`."""
    logprobs = exact((7,), token_ids)
    return Said((7,), tuple(token_ids), tuple(float(logprobs[i, t]) - error for i, t in enumerate(token_ids)))


@pytest.mark.parametrize(("gap", "num_tied"), [(1.9e-5, 1), (2.1e-5, 0), (0.5, 0)])
def test_a_tie_is_what_twice_the_error_explains(gap: float, num_tied: int) -> None:
    exact = exact_of(gap)
    ours, theirs = said([0, 0, 1, 3], exact, 1e-5), said([0, 0, 0, 0], exact, 1e-5)
    found = compare([ours], [theirs], exact)
    assert (found.num_equal, len(found.differences), found.num_tied) == (0, 1, num_tied)
    assert found.error_max == pytest.approx(1e-5)
    (difference,) = found.differences
    assert difference.index == 2, "what comes behind it answers another question"
    assert difference.ours.shortfalls == pytest.approx((0, 0, gap))


def test_a_token_that_both_said_wrongly_before_is_no_tie() -> None:
    exact = exact_of(1e-5)
    ours, theirs = said([3, 1], exact, 1e-5), said([3, 0], exact, 1e-5)
    assert compare([ours], [theirs], exact).num_tied == 0


def test_the_error_at_a_wrong_token_does_not_excuse_it() -> None:
    exact = exact_of(0.5)
    right = said([0, 0], exact, 1e-6)
    wrong = Said(right.prompt, (0, 1), (right.logprobs[0], right.logprobs[1] + 1.0))
    assert compare([wrong], [right], exact).num_tied == 0


def test_equal_answers_say_how_large_errors_are() -> None:
    exact = exact_of(1e-5)
    equal = said([0, 0], exact, 2e-5)
    tied = said([1, 0], exact, 0.0)
    found = compare([equal, tied], [equal, said([0, 0], exact, 0.0)], exact)
    assert (found.num_equal, found.num_tied) == (1, 1)


def test_the_exact_model_is_transformers_in_float64(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, hidden=32, layers=2, heads=4, kv_heads=2, vocab=512)
    exact = exact_model(tmp_path)
    prompt, answer = [5, 9, 11], [3, 4]
    by_itself = [exact([*prompt, *answer[:n]], answer[n : n + 1])[0] for n in range(len(answer))]
    together = exact(prompt, answer)
    assert together.dtype is torch.float64
    torch.testing.assert_close(together, torch.stack(by_itself), atol=1e-12, rtol=0)
    best = together.argmax(dim=-1).tolist()
    held = hold(Said(tuple(prompt), (best[0], 0), (float(together[0, best[0]]) + 1e-3, 0.0)), exact, 1)
    assert held.shortfalls == (0.0,)
    assert held.errors == pytest.approx((1e-3,))


def test_what_was_found_is_written(tmp_path: Path) -> None:
    exact = exact_of(0.5)
    right = said([0, 0], exact, 1e-5)
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        write(journal, "a load", compare([said([1, 0], exact, 0.0), right], [right, right], exact))
    findings = read_journal(path)
    counts = {
        kind: findings.values("ties", "a load", "baton", kind) for kind in ("equal", "tied", "different")
    }
    assert counts == {"equal": [1], "tied": [0], "different": [1]}
    assert max(findings.values("ties", "a load", "baton", "shortfall")) == pytest.approx(0.5)
