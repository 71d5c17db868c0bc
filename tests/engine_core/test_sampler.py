"""The sampler compared with brute-force references that follow the definitions token by token."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.api import SamplingParams
from baton.engine.runner import sampler as module
from baton.engine.runner.sampler import Sampler, SamplingRow, TokenCounts, truncate, uniforms

EOS = 2


def row(
    params: SamplingParams, *, prompt: Sequence[int] = (0, 1), output: Sequence[int] = (), id_: str = "r"
) -> SamplingRow:
    return SamplingRow.of(id_, params, prompt=prompt, output=output, eos_token_ids=[EOS], engine_seed=0)


def sample(logits: torch.Tensor, rows: list[SamplingRow], positions: list[int]) -> module.Sampled:
    return Sampler().sample(logits, rows, np.array(positions))


def one(logits: list[float], params: SamplingParams, **state: Any) -> int:
    state_row = row(params, **state)
    position = state_row.num_prompt_tokens + len(state.get("output", []))
    return sample(torch.tensor([logits]), [state_row], [position]).token_ids[0]


# --- Truncation --------------------------------------------------------------------------------------


def kept_by_definition(logits: list[float], min_p: float, top_k: int, top_p: float) -> set[int]:
    top = max(logits)
    kept = {i for i, x in enumerate(logits) if math.exp(x - top) >= min_p}
    kth = sorted(logits, reverse=True)[top_k - 1]
    kept = {i for i in kept if logits[i] >= kth}
    total = sum(math.exp(logits[i] - top) for i in kept)
    reached, last = 0.0, top
    for i in sorted(kept, key=lambda i: -logits[i]):
        if reached >= top_p:
            break
        reached += math.exp(logits[i] - top) / total
        last = logits[i]
    return {i for i in kept if logits[i] >= last} if top_p < 1 else kept


# Halves, so that ties are frequent; p values that no sum of such exponentials hits within rounding.
logit_lists = st.lists(st.integers(-12, 12).map(lambda n: n / 2), min_size=1, max_size=40)
ps = st.sampled_from([0.0137, 0.0971, 0.3313, 0.5009, 0.7177, 0.9091, 0.9901])


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(
        st.tuples(logit_lists, st.one_of(st.just(0.0), ps), st.integers(1, 41), st.one_of(st.just(1.0), ps)),
        min_size=1,
        max_size=5,
    ),
    width=st.integers(1, 8),
)
def test_truncation_keeps_what_the_definitions_keep(
    rows: list[tuple[list[float], float, int, float]], width: int
) -> None:
    V = min(len(logits) for logits, *_ in rows)
    logits = torch.tensor([values[:V] for values, *_ in rows])
    top_k = [min(k, V) for _, _, k, _ in rows]
    original, module.TOP_P_WIDTH = module.TOP_P_WIDTH, width  # Small, to test the search in all of V.
    try:
        kept = truncate(
            logits, min_p=[min_p for _, min_p, _, _ in rows], top_k=top_k, top_p=[p for *_, p in rows]
        )
    finally:
        module.TOP_P_WIDTH = original
    for i, (values, min_p, _, top_p) in enumerate(rows):
        expected = kept_by_definition(values[:V], min_p, top_k[i], top_p)
        assert set(kept[i].isfinite().nonzero()[:, 0].tolist()) == expected


def test_a_draw_never_leaves_the_truncated_set() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 50) * 2
    allowed = set(logits[0].topk(3).indices.tolist())
    sampler, state = Sampler(), row(SamplingParams(top_k=3, max_tokens=999))
    drawn = {sampler.sample(logits, [state], np.array([i])).token_ids[0] for i in range(2, 300)}
    assert drawn == allowed


# --- Penalties, bias, min_tokens ---------------------------------------------------------------------


def penalised_by_definition(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]
) -> list[float]:
    counts = Counter(output)
    result = list(logits)
    for token in range(len(logits)):
        if token in counts or token in prompt:
            penalty = params.repetition_penalty
            result[token] = result[token] / penalty if result[token] > 0 else result[token] * penalty
        result[token] -= params.frequency_penalty * counts[token]
        result[token] -= params.presence_penalty * (token in counts)
    return result


tokens = st.lists(st.integers(0, 11), max_size=12)


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.floats(-4, 4, width=16), min_size=12, max_size=12),
    prompt=tokens,
    output=tokens,
    repetition=st.sampled_from([1.0, 0.5, 1.7]),
    presence=st.sampled_from([0.0, -1.5, 0.75]),
    frequency=st.sampled_from([0.0, -0.5, 1.25]),
    split=st.integers(0, 12),
)
def test_penalties_are_those_of_the_definitions(
    logits: list[float],
    prompt: list[int],
    output: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    split: int,
) -> None:
    params = SamplingParams(
        temperature=0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        max_tokens=99,
    )
    state = row(params, prompt=prompt, output=output[:split])
    if state.counts is None:
        return
    for token in output[split:]:
        state.counts.add(token)
    plan = module._Plan([row(SamplingParams()), state], 12, torch.device("cpu"))
    given_logits = torch.tensor([logits, logits])
    adjusted = module._adjust(given_logits, plan, np.array([2, len(prompt) + len(output)]))
    assert adjusted[0].tolist() == given_logits[0].tolist(), "a row without penalties does not change"
    assert adjusted[1].tolist() == pytest.approx(
        penalised_by_definition(logits, params, prompt, output), abs=1e-5
    )
    assert given_logits.tolist() == [logits, logits], "raw logits are kept for logprobs"


def test_sampled_tokens_count_towards_the_next_penalty() -> None:
    params = SamplingParams(temperature=0, presence_penalty=2.0, max_tokens=9)
    sampler, state = Sampler(), row(params)
    logits = torch.tensor([[0.0, 0.5, 3.0, 2.0, 1.5]])
    chosen = [sampler.sample(logits, [state], np.array([position])).token_ids[0] for position in (2, 3, 4)]
    assert chosen == [2, 3, 4]


def test_token_counts_grow_beyond_their_first_capacity() -> None:
    counts = TokenCounts(range(50), output=[7] * 3)
    for token in range(1000):
        counts.add(token)
    assert dict(zip(counts.tokens.tolist(), counts.counts.tolist(), strict=True)) == {
        token: 4 if token == 7 else 1 for token in range(1000)
    }


def test_bias_moves_the_choice_and_unknown_tokens_are_ignored() -> None:
    params = SamplingParams(temperature=0, logit_bias={1: 5.0, 0: -100.0, 9999: 3.0})
    assert one([4.0, 0.0, 3.0], params) == 1


@pytest.mark.parametrize(
    ("stop_token_ids", "ignore_eos", "blocked"),
    [((), False, {EOS}), ((3,), False, {EOS, 3}), ((3,), True, {3})],
)
def test_no_token_that_ends_the_output_comes_before_min_tokens(
    stop_token_ids: tuple[int, ...], ignore_eos: bool, blocked: set[int]
) -> None:
    params = SamplingParams(
        temperature=0, min_tokens=2, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos, max_tokens=9
    )
    logits = [1.0, 0.0, 9.0, 8.0]
    best_allowed = next(token for token in (2, 3, 0, 1) if token not in blocked)
    assert one(logits, params) == best_allowed
    assert one(logits, params, output=[0]) == best_allowed
    assert one(logits, params, output=[0, 0]) == 2


# --- Allowed tokens and bad words --------------------------------------------------------------------


def choosable_by_definition(params: SamplingParams, output: list[int], vocab: int) -> set[int]:
    allowed = set(range(vocab)) if params.allowed_token_ids is None else set(params.allowed_token_ids)
    for *before, last in params.bad_words_token_ids:
        if not before or output[-len(before) :] == before:
            allowed.discard(last)
    return allowed


SMALL_V = 6
small_words = st.lists(
    st.lists(st.integers(0, SMALL_V - 2), min_size=1, max_size=3).map(tuple), max_size=5, unique=True
)


@settings(max_examples=200, deadline=None)
@given(
    allowed=st.none() | st.sets(st.integers(0, SMALL_V - 2)).map(lambda ids: (*sorted(ids), SMALL_V - 1)),
    words=small_words,
    # The last token is never barred, so that one is left.
    logits=st.lists(
        st.lists(st.floats(-4, 4, width=16), min_size=SMALL_V, max_size=SMALL_V), min_size=1, max_size=12
    ),
    temperature=st.sampled_from([0.0, 1.0]),
    taken_back=st.integers(0, 3),
)
def test_only_allowed_tokens_are_chosen_and_no_bad_word_is_completed(
    allowed: tuple[int, ...] | None,
    words: list[tuple[int, ...]],
    logits: list[list[float]],
    temperature: float,
    taken_back: int,
) -> None:
    params = SamplingParams(
        temperature=temperature,
        seed=5,
        allowed_token_ids=allowed,
        bad_words_token_ids=tuple(words),
        max_tokens=99,
    )
    prompt = [word[0] for word in words] or [0]  # A prompt does not count: words are matched in the output.
    sampler, mate = Sampler(), row(SamplingParams(temperature=0), prompt=prompt)
    states = [mate, row(params, prompt=prompt)]
    output: list[int] = []
    for step, values in enumerate(logits):
        if step == len(logits) // 2 and taken_back:
            output = output[: max(0, len(output) - taken_back)]
            states[1].recount([*prompt, *output])
        position = len(prompt) + len(output)
        batch = torch.tensor([values, values])
        free, token = sampler.sample(batch, states, np.array([position, position])).token_ids
        choosable = choosable_by_definition(params, output, SMALL_V)
        assert token in choosable
        assert free == values.index(max(values)), "another row does not change"
        if temperature == 0:
            assert values[token] == max(values[other] for other in choosable)
        output.append(token)


def test_a_request_that_comes_with_output_matches_bad_words_in_it() -> None:
    params = SamplingParams(temperature=0, bad_words_token_ids=((3, 1),), max_tokens=9)
    assert one([0.0, 5.0, 1.0, 2.0], params) == 1
    assert one([0.0, 5.0, 1.0, 2.0], params, output=[3]) == 3
    assert one([0.0, 5.0, 1.0, 2.0], params, prompt=[3]) == 1


# --- Drawing -------------------------------------------------------------------------------------------


def test_a_seeded_draw_does_not_depend_on_batch_mates() -> None:
    torch.manual_seed(1)
    logits = torch.randn(8, 200)
    seeded = SamplingParams(seed=42, temperature=0.9)
    alone = [sample(logits[:1], [row(seeded)], [position]).token_ids[0] for position in range(2, 60)]
    mates = [
        row(SamplingParams(seed=7, top_p=0.5), id_="a"),
        row(SamplingParams(temperature=0), id_="b"),
        row(SamplingParams(top_k=5, repetition_penalty=1.3), id_="c"),
        row(SamplingParams(min_p=0.1), id_="d"),
    ]
    for order in ([0, 1, 2, 3, 4], [3, 1, 0, 4, 2]):
        rows = [([row(seeded), *mates])[i] for i in order]
        at = order.index(0)
        batch = logits[1:6].clone()
        batch[at] = logits[0]
        together = [
            sample(batch, rows, [position if i == at else 3 for i in range(5)]).token_ids[at]
            for position in range(2, 60)
        ]
        assert together == alone
    assert len(set(alone)) > 10


def test_equal_seeds_agree_and_others_differ() -> None:
    logits = torch.zeros(1, 1000)

    def draws(seed: int | None, id_: str) -> list[int]:
        state = row(SamplingParams(seed=seed), id_=id_)
        return [sample(logits, [state], [position]).token_ids[0] for position in range(20)]

    assert draws(1, "a") == draws(1, "b")
    assert draws(1, "a") != draws(2, "a")
    assert draws(None, "a") != draws(None, "b")
    assert draws(-1, "a") == draws(-1, "b")


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.25, 0.125, 0.0, 0.125])
    rows = [row(SamplingParams(seed=3)) for _ in range(4000)]
    chosen = sample(probs.log().repeat(4000, 1), rows, list(range(4000))).token_ids
    shares = [count / 4000 for count in np.bincount(chosen, minlength=5)]
    assert shares == pytest.approx(probs.tolist(), abs=0.03)
    assert shares[3] == 0


def test_uniforms_fill_the_unit_interval() -> None:
    u = uniforms(np.zeros(10_000, np.uint64), np.arange(10_000))
    assert u.min() >= 0
    assert u.max() < 1
    assert np.histogram(u, bins=10, range=(0, 1))[0].tolist() == pytest.approx([1000] * 10, abs=120)


def test_a_draw_that_rounds_up_to_the_total_selects_a_token() -> None:
    logits = torch.full((1, 3), -math.inf)
    logits[0, 1] = 0.0
    for position in range(200):
        assert sample(logits, [row(SamplingParams(seed=position))], [position]).token_ids == [1]


# --- Logprobs ------------------------------------------------------------------------------------------


def test_logprobs_are_the_models_own_whatever_was_done_to_the_logits() -> None:
    torch.manual_seed(2)
    logits = torch.randn(3, 30)
    params = SamplingParams(temperature=0, logit_bias={11: 100.0}, logprobs=3)
    rows = [row(SamplingParams(temperature=0)), row(params), row(SamplingParams(temperature=0, logprobs=0))]
    sampled = sample(logits, rows, [2, 2, 2])
    expected = logits.log_softmax(dim=-1)
    assert sorted(sampled.logprobs) == [1, 2]
    chosen, top = sampled.logprobs[1].chosen, sampled.logprobs[1].top
    ranked = expected[1].argsort(descending=True).tolist()
    assert (chosen.token_id, chosen.rank) == (11, ranked.index(11) + 1)
    assert chosen.logprob == pytest.approx(expected[1, 11].item(), abs=1e-5)
    assert [t.token_id for t in top] == ranked[:3]
    assert [t.rank for t in top] == [1, 2, 3]
    assert sampled.logprobs[2].top == ()
    assert sampled.logprobs[2].chosen.rank == 1


def test_plain_greedy_rows_are_one_argmax() -> None:
    logits = torch.randn(64, 100)
    rows = [row(SamplingParams(temperature=0)) for _ in range(64)]
    assert sample(logits, rows, [2] * 64) == (logits.argmax(-1).tolist(), {}, {})
