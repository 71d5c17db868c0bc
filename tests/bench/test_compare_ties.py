"""A difference is a tie only if the engines' own rounding errors explain it."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from baton.checkpoints.random_model import write_checkpoint
from lab.bench.compare.journal import Journal, read_journal
from lab.bench.compare.tie_analysis import EngineAnswer, Exact, compare, exact_model, score, write

VOCAB = 4


def exact_of(gap: float) -> Exact:
    """Token 0 is the best, token 1 falls short by `gap`, all others by much more."""

    def logprobs(prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        logits = torch.tensor([2.0, 2.0 - gap, -5.0, -6.0], dtype=torch.float64)
        return torch.log_softmax(logits, dim=-1).expand(len(answer), VOCAB)

    return logprobs


def answer_of(token_ids: Sequence[int], exact: Exact, error: float) -> EngineAnswer:
    """Answer of an engine whose logprobs are all too small by `error`."""
    logprobs = exact((7,), token_ids)
    return EngineAnswer(
        (7,), tuple(token_ids), tuple(float(logprobs[i, t]) - error for i, t in enumerate(token_ids))
    )


@pytest.mark.parametrize(("gap", "num_tied"), [(1.9e-5, 1), (2.1e-5, 0), (0.5, 0)])
def test_a_shortfall_of_up_to_twice_the_error_is_a_tie(gap: float, num_tied: int) -> None:
    exact = exact_of(gap)
    ours, theirs = answer_of([0, 0, 1, 3], exact, 1e-5), answer_of([0, 0, 0, 0], exact, 1e-5)
    found = compare([ours], [theirs], exact)
    assert (found.num_equal, len(found.differences), found.num_tied) == (0, 1, num_tied)
    assert found.error_max == pytest.approx(1e-5)
    (difference,) = found.differences
    assert difference.index == 2, "tokens after it continue different texts"
    assert difference.ours.shortfalls == pytest.approx((0, 0, gap))


def test_an_earlier_wrong_token_of_both_is_no_tie() -> None:
    exact = exact_of(1e-5)
    ours, theirs = answer_of([3, 1], exact, 1e-5), answer_of([3, 0], exact, 1e-5)
    assert compare([ours], [theirs], exact).num_tied == 0


def test_the_error_at_a_wrong_token_does_not_excuse_it() -> None:
    exact = exact_of(0.5)
    right = answer_of([0, 0], exact, 1e-6)
    wrong = EngineAnswer(right.prompt, (0, 1), (right.logprobs[0], right.logprobs[1] + 1.0))
    assert compare([wrong], [right], exact).num_tied == 0


def test_equal_answers_show_how_large_errors_are() -> None:
    exact = exact_of(1e-5)
    equal = answer_of([0, 0], exact, 2e-5)
    tied = answer_of([1, 0], exact, 0.0)
    found = compare([equal, tied], [equal, answer_of([0, 0], exact, 0.0)], exact)
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
    scores = score(
        EngineAnswer(tuple(prompt), (best[0], 0), (float(together[0, best[0]]) + 1e-3, 0.0)), exact, 1
    )
    assert scores.shortfalls == (0.0,)
    assert scores.errors == pytest.approx((1e-3,))


def test_the_comparison_is_written(tmp_path: Path) -> None:
    exact = exact_of(0.5)
    right = answer_of([0, 0], exact, 1e-5)
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        write(journal, "a load", compare([answer_of([1, 0], exact, 0.0), right], [right, right], exact))
    findings = read_journal(path)
    counts = {
        kind: findings.values("ties", "a load", "baton", kind) for kind in ("equal", "tied", "different")
    }
    assert counts == {"equal": [1], "tied": [0], "different": [1]}
    assert max(findings.values("ties", "a load", "baton", "shortfall")) == pytest.approx(0.5)
