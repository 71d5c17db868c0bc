"""Tie analysis of differing answers: compares the generated tokens with the same model in float64.

    shortfall   the best exact logprob less that of the generated token; 0 for the exact best
    error       of the generated token's logprob, as reported by its engine

An engine whose logits are wrong by at most e can generate a token that falls short by up to 2e. e is measured
at tokens that are the exact best, so it does not depend on the differences that it should explain. Answers
are compared up to their first difference; after it they continue different texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from lab.bench.compare.journal import Journal
from lab.bench.handoff.asking import AskingError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

EQUAL_SCORED = 4  # Equal answers to score: they only show how large errors are.


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """An engine's answer to one prompt, and the logprob that it gave each token."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Scores:
    """Figures of an answer against the exact model, per token up to a first difference or the end."""

    shortfalls: tuple[float, ...]
    errors: tuple[float, ...]

    @property
    def error_max(self) -> float:
        """The largest error of tokens that are the exact best."""
        exact = (e for e, short in zip(self.errors, self.shortfalls, strict=True) if short == 0)
        return max(exact, default=0.0)


Exact = Callable[[Sequence[int], Sequence[int]], "torch.Tensor"]
"""(prompt, answer) -> float64 logprobs [answer, vocabulary], each given the tokens before it."""


def exact_model(folder: Path) -> Exact:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")

    def logprobs(prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
        assert logits.dtype is torch.float64
        return torch.log_softmax(logits, dim=-1)

    return logprobs


def score(answer: EngineAnswer, exact: Exact, num_tokens: int) -> Scores:
    """Score the first `num_tokens` of an answer."""
    import torch

    token_ids = torch.tensor(answer.token_ids[:num_tokens])
    logprobs = exact(answer.prompt, answer.token_ids[:num_tokens])
    of_said = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    reported = torch.tensor(answer.logprobs[:num_tokens], dtype=torch.float64)
    return Scores(
        shortfalls=tuple((logprobs.max(dim=1).values - of_said).tolist()),
        errors=tuple((reported - of_said).abs().tolist()),
    )


def first_difference(ours: EngineAnswer, theirs: EngineAnswer) -> int | None:
    pairs = zip(ours.token_ids, theirs.token_ids, strict=True)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), None)


@dataclass(frozen=True, slots=True)
class Difference:
    """Scores of two answers to a prompt, up to and with the first token in which they differ."""

    index: int  # Index of that token.
    ours: Scores
    theirs: Scores

    def is_tie(self, error_max: float) -> bool:
        return max(*self.ours.shortfalls, *self.theirs.shortfalls) <= 2 * error_max


@dataclass(frozen=True, slots=True)
class Comparison:
    num_equal: int
    differences: tuple[Difference, ...]
    error_max: float  # The largest error of both engines, over tokens that are the exact best.

    @property
    def num_tied(self) -> int:
        return sum(difference.is_tie(self.error_max) for difference in self.differences)


def compare(ours: Sequence[EngineAnswer], theirs: Sequence[EngineAnswer], exact: Exact) -> Comparison:
    """Compare answers of two engines to the same prompts, in the same order."""
    scores: list[Scores] = []
    differences = []
    num_equal = 0
    for a, b in zip(ours, theirs, strict=True):
        assert a.prompt == b.prompt
        index = first_difference(a, b)
        if index is not None:
            difference = Difference(index, score(a, exact, index + 1), score(b, exact, index + 1))
            differences.append(difference)
            scores += [difference.ours, difference.theirs]
            continue
        if num_equal < EQUAL_SCORED:
            scores += [score(answer, exact, len(answer.token_ids)) for answer in (a, b)]
        num_equal += 1
    return Comparison(num_equal, tuple(differences), max((each.error_max for each in scores), default=0.0))


def ask_at_once(
    url: str, prompts: Sequence[Sequence[int]], *, max_tokens: int, concurrency: int, timeout_s: float
) -> list[EngineAnswer]:
    """Send greedy requests with several clients. Raises AskingError."""
    with (
        httpx.Client(timeout=timeout_s, trust_env=False) as client,
        ThreadPoolExecutor(concurrency) as asking,
    ):

        def ask(prompt: Sequence[int]) -> EngineAnswer:
            body = {
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                "logprobs": 1,
            }
            try:
                answer = client.post(f"{url}/v1/completions", json=body)
            except httpx.HTTPError as error:
                raise AskingError(f"{url} did not answer: {type(error).__name__}: {error}") from error
            if answer.status_code != 200:
                raise AskingError(f"{url} answered {answer.status_code}: {answer.text[:500]}")
            choice: dict[str, Any] = answer.json()["choices"][0]
            return EngineAnswer(
                tuple(prompt), tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"])
            )

        return list(asking.map(ask, prompts))


def write(journal: Journal, setting: str, compared: Comparison) -> None:
    """Write the comparison to the journal under the part "ties", as samples of the system "baton"."""
    number = journal.next_round()
    scores = [
        scores for difference in compared.differences for scores in (difference.ours, difference.theirs)
    ]
    for metric, values in (
        ("equal", [compared.num_equal]),
        ("tied", [compared.num_tied]),
        ("different", [len(compared.differences) - compared.num_tied]),
        ("shortfall", [max(each.shortfalls) for each in scores]),
        ("error", [compared.error_max]),
    ):
        journal.samples("ties", setting, "baton", metric, number, values)
