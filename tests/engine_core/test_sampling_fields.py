"""Prompt log-probabilities, allowed tokens and bad words, compared with the model's logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from baton.contract.factory import load_factory
from baton.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from baton.engine.api import PromptLogprobs, SamplingParams
from baton.engine.llm import LLM
from baton.engine.request import Request
from baton.engine.scheduling.queues import RequestQueues
from tests.engine_models.paged import SHUFFLED_BLOCKS, PagedModel

NUM_TOP = 3
ASKS = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=NUM_TOP, ignore_eos=True)
PLAIN = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPTS = [[(7 * n + 11 * k) % 500 + 3 for n in range(length)] for k, length in enumerate((1, 2, 30, 75, 70))]
TOLERANCE = 1e-4
SCARCE = 23  # Blocks: too few for all prompts, so some are preempted.

Logprobs = list[torch.Tensor]  # One tensor [P, V] for each prompt.


@pytest.fixture(scope="module")
def reference(model: ModelConfig) -> Callable[[list[int]], torch.Tensor]:
    """The model alone, which test_decoder.py compares with transformers: token ids to logits [P, V]."""
    alone = PagedModel(model)
    return lambda token_ids: alone.step([(token_ids, 0, SHUFFLED_BLOCKS)])


@pytest.fixture(scope="module")
def expected(reference: Callable[[list[int]], torch.Tensor]) -> Logprobs:
    return [reference(prompt).log_softmax(-1) for prompt in PROMPTS]


def check(prompt: list[int], raw: PromptLogprobs | None, expected: torch.Tensor) -> None:
    assert raw is not None
    found = raw.rows(0, len(raw))
    assert raw.rows(1, 3) == found[1:3]
    assert [entry.chosen.token_id for entry in found] == prompt[1:]
    for entry, logprobs in zip(found, expected, strict=False):
        chosen = entry.chosen
        assert chosen.logprob == pytest.approx(logprobs[chosen.token_id].item(), abs=TOLERANCE)
        best = logprobs.topk(NUM_TOP).values.tolist()
        assert [top.logprob for top in entry.top] == pytest.approx(best, abs=TOLERANCE)
        assert [top.rank for top in entry.top] == [1, 2, 3]
        # Equal within the tolerance: their order is not defined.
        surely = int((logprobs > logprobs[chosen.token_id] + TOLERANCE).sum()) + 1
        perhaps = int((logprobs > logprobs[chosen.token_id] - TOLERANCE).sum())
        assert surely <= chosen.rank <= max(surely, perhaps)


@pytest.mark.parametrize(
    ("scheduler_config", "num_blocks"),
    [
        (SchedulerConfig(), 200),
        (SchedulerConfig(max_num_batched_tokens=7), 200),
        (SchedulerConfig(max_num_batched_tokens=1), 200),
        (SchedulerConfig(max_num_batched_tokens=256, enable_chunked_prefill=False), 200),
        (SchedulerConfig(max_num_batched_tokens=16), SCARCE),
    ],
    ids=["whole", "chunks of 7", "one token a step", "no chunks", "preempted"],
)
def test_prompt_logprobs_are_those_of_the_model_for_any_chunks(
    make_config: Callable[..., EngineConfig],
    expected: Logprobs,
    scheduler_config: SchedulerConfig,
    num_blocks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preempted: list[Request] = []
    preempt = RequestQueues.preempt

    def count(queues: RequestQueues, request: Request) -> None:
        preempted.append(request)
        preempt(queues, request)

    monkeypatch.setattr(RequestQueues, "preempt", count)
    prompts = [*PROMPTS, PROMPTS[2]]
    with LLM(make_config(num_blocks, scheduler_config=scheduler_config)) as llm:
        plain = llm.generate(prompts, PLAIN)  # The prompts' blocks are in the cache now.
        found = llm.generate(prompts, [*[ASKS] * len(PROMPTS), PLAIN])
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    assert found[-1].prompt_logprobs is None
    for one, logprobs in zip(found, expected, strict=False):
        assert one.num_cached_tokens == 0, "the prompt was computed as a whole"
        check(one.prompt_token_ids, one.prompt_logprobs, logprobs)
    assert any(request.skip_reading_prefix_cache for request in preempted) == (num_blocks == SCARCE)


def test_output_logprobs_come_with_prompt_logprobs(
    make_config: Callable[..., EngineConfig], expected: Logprobs
) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=1, prompt_logprobs=NUM_TOP, ignore_eos=True)
    with LLM(make_config()) as llm:
        [found] = llm.generate([PROMPTS[3]], params)
    check(PROMPTS[3], found.prompt_logprobs, expected[3])
    assert [entry.chosen.token_id for entry in found.logprobs] == found.token_ids
    assert all(entry.top == (entry.chosen,) for entry in found.logprobs), "greedy chooses the best"


def test_a_connector_is_asked_and_told_that_nothing_is_loaded(
    make_config: Callable[..., EngineConfig], expected: Logprobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, Any]] = []
    half = type(load_factory(None).scheduler_half(make_config()))

    def match(self: Any, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        told.append(("asked", num_computed_tokens))
        return 8, True

    def allocated(self: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
        told.append(("allocated", num_external_tokens))

    monkeypatch.setattr(half, "get_num_new_matched_tokens", match)
    monkeypatch.setattr(half, "update_state_after_alloc", allocated)
    with LLM(make_config(cache_config=CacheConfig(num_gpu_blocks=64, block_size=4))) as llm:
        [found] = llm.generate([PROMPTS[2]], ASKS)
    assert told == [("asked", 0), ("allocated", 0)]
    assert found.num_transferred_tokens == 0
    check(PROMPTS[2], found.prompt_logprobs, expected[2])


def greedy_by_definition(
    logits_of: Callable[[list[int]], torch.Tensor], prompt: list[int], params: SamplingParams
) -> list[int]:
    output: list[int] = []
    for _ in range(params.max_tokens):
        logits = logits_of(prompt + output)[-1].clone()
        if params.allowed_token_ids is not None:
            barred = [token for token in range(len(logits)) if token not in params.allowed_token_ids]
            logits[barred] = -torch.inf
        for *before, last in params.bad_words_token_ids:
            if not before or output[-len(before) :] == before:
                logits[last] = -torch.inf
        output.append(int(logits.argmax()))
    return output


def test_bans_choose_the_tokens_that_the_logits_leave(
    make_config: Callable[..., EngineConfig], reference: Callable[[list[int]], torch.Tensor]
) -> None:
    with LLM(make_config()) as llm:
        free = [one.token_ids for one in llm.generate(PROMPTS[1:], PLAIN)]
        bans = [
            {"bad_words_token_ids": ((free[0][0],), (free[0][1],))},
            {"bad_words_token_ids": (tuple(free[1][:2]), tuple(free[1][:3]))},
            {"allowed_token_ids": tuple(range(100, 130))},
            {"allowed_token_ids": tuple(range(0, 500, 3)), "bad_words_token_ids": ((9,), (12, 15))},
        ]
        params = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, **ban) for ban in bans]  # type: ignore[arg-type]
        found = [one.token_ids for one in llm.generate(PROMPTS[1:], params)]
    assert found == [
        greedy_by_definition(reference, prompt, one) for prompt, one in zip(PROMPTS[1:], params, strict=True)
    ]
    assert all(one[:4] != other for one, other in zip(found, free, strict=True)), "the bans have to matter"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"allowed_token_ids": (7,), "bad_words_token_ids": ((7,),)}, "allowed_token_ids"),
        ({"allowed_token_ids": (7, 8), "bad_words_token_ids": ((7,), (3, 8))}, "allowed_token_ids"),
        ({"allowed_token_ids": (7, 8), "bad_words_token_ids": ((8, 7), (9, 8, 8))}, "allowed_token_ids"),
        (
            {"allowed_token_ids": (7,), "stop_token_ids": (7,), "min_tokens": 1, "max_tokens": 2},
            "allowed_token_ids",
        ),
        ({"bad_words_token_ids": tuple((token,) for token in range(512))}, "bad_words"),
        ({"allowed_token_ids": (512,)}, "allowed_token_ids"),
    ],
)
def test_bans_that_can_leave_no_token_are_refused(
    make_config: Callable[..., EngineConfig], fields: dict[str, Any], field: str
) -> None:
    with LLM(make_config()) as llm:
        [refused] = llm.generate([[3, 4]], SamplingParams(**fields))
        assert refused.error is not None
        assert (refused.error.is_users, refused.error.field) == (True, field)
        llm.core.scheduler.kv_cache.assert_empty()
