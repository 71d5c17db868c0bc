"""A first token that arrives with the prompt's KV counts as sampled here; nothing is computed twice."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from baton.core.prefilled import PrefilledTokens
from baton.engine.api import EngineRequest, SamplingParams, TokenLogprob, TokenLogprobs
from baton.engine.prefilled import AcceptedTokens, accept, sampling_digest
from baton.engine.request import Request
from baton.testing.host.model import EOS_IDS, VOCAB
from tests.engine_sched.world import BLOCK, World, engine_request, expected_output, prefilled_tokens

PROMPT = [1 + (5 * i) % 48 for i in range(11)]


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    top = tuple(TokenLogprob(other, -1.0 - other, other + 1) for other in range(num_top))
    return TokenLogprobs(TokenLogprob(token_id, -0.25, 1), top)


def loading(prompt: Sequence[int] = PROMPT, *, world: World | None = None, **kwargs: Any) -> World:
    """A world with one request, "r", whose whole prompt is being loaded."""
    world = world if world is not None else World()
    world.half.verdict = lambda request, local: (
        (len(prompt) - local, True) if len(prompt) > local else (0, False)
    )
    world.add("r", prompt, **kwargs)
    world.step()
    assert world.status("r") == "WAITING_FOR_REMOTE_KVS"
    return world


def hand_over(world: World, num_tokens: int = 1, **changes: Any) -> None:
    asked = world.answers["r"].asked
    tokens = prefilled_tokens(asked, expected_output(asked)[:num_tokens])
    world.half.prefilled = lambda request_id: msgspec.structs.replace(tokens, **changes)


def computed_in(world: World) -> list[int]:
    """Tokens computed for "r", step by step."""
    return [step.num_scheduled_tokens["r"] for step in world.steps if "r" in step.num_scheduled_tokens]


@pytest.mark.parametrize("length", [BLOCK, BLOCK + 1, 11, 3 * BLOCK])
def test_the_first_token_leaves_when_the_load_arrives_and_nothing_of_the_prompt_is_computed(
    length: int,
) -> None:
    world = loading(PROMPT[:length] + [7] * (length - len(PROMPT[:length])))
    hand_over(world)
    world.end_load("r")
    world.step()
    (output,) = world.outputs[-1].outputs
    assert output.new_token_ids == expected_output(world.answers["r"].asked)[:1]
    assert output.num_cached_tokens == output.num_transferred_tokens == length
    world.run()
    assert computed_in(world) == [1, 1, 1]
    world.end("r")
    assert world.half.num_taken["r"] == 1


def test_several_tokens_may_be_handed_over() -> None:
    world = loading(max_tokens=6)
    hand_over(world, 3)
    world.end_load("r")
    world.run()
    assert computed_in(world) == [3, 1, 1]
    world.end("r")


@pytest.mark.parametrize("bad_indices", [{0}, {1}, {2}])
def test_a_token_is_kept_when_the_load_fails_and_the_prompt_is_computed_here(bad_indices: set[int]) -> None:
    world = loading()
    hand_over(world)
    world.end_load("r", bad_indices=bad_indices)
    world.step()
    assert world.answers["r"].token_ids == expected_output(world.answers["r"].asked)[:1]
    world.run()
    num_valid = min(bad_indices) * BLOCK
    assert computed_in(world)[0] == len(PROMPT) + 1 - num_valid
    world.end("r")


def test_a_handed_over_end_of_sequence_ends_the_request_without_a_step() -> None:
    # A prompt after which the model samples end of sequence.
    prompt = next(
        p for n in range(1, 2000) if expected_output(engine_request("x", p := [n, n + 1]))[0] in EOS_IDS
    )
    world = loading(prompt, ignore_eos=False)
    hand_over(world)
    world.end_load("r")
    world.run()
    assert computed_in(world) == []
    world.check_answer("r", "stop")
    assert world.answers["r"].last is not None
    assert world.answers["r"].last.stop_token_id in EOS_IDS
    world.check_at_rest()


@pytest.mark.parametrize(("fields", "reason"), [({"max_tokens": 1}, "length"), ({}, "stop")])
def test_a_limit_or_a_stop_token_reached_by_a_handed_over_token_ends_the_request(
    fields: dict[str, Any], reason: str
) -> None:
    first = expected_output(engine_request("x", PROMPT))[0]
    if reason == "stop":
        fields = {"stop_token_ids": (first,)}
    world = loading(**fields)
    hand_over(world)
    world.end_load("r")
    world.end("r", reason=reason)
    assert computed_in(world) == []


def test_tokens_after_a_handed_over_stop_are_dropped() -> None:
    second = expected_output(engine_request("x", PROMPT))[1]
    world = loading(stop_token_ids=(second,))
    asked = world.answers["r"].asked
    longer = prefilled_tokens(asked, [*expected_output(asked), 3, 4])
    world.half.prefilled = lambda request_id: longer
    world.end_load("r")
    world.run()
    world.check_answer("r", "stop")


def test_a_request_that_loses_its_blocks_keeps_its_token() -> None:
    world = loading(world=World(num_blocks=8), max_tokens=4)
    hand_over(world)
    world.end_load("r")
    world.step()
    request = world.scheduler.requests["r"]
    world.scheduler.queues.loaded.remove(request)
    world.scheduler.queues.send_back(request)
    world.half.verdict = lambda request, local: (0, False)
    world.run()
    assert sum(computed_in(world)) >= 3
    world.check_answer("r")
    assert world.half.num_taken["r"] == 1
    world.check_at_rest()


def test_a_preempted_prefill_that_is_loaded_later_gets_the_token_too() -> None:
    """The ranks already have the request, without the token."""
    world = World(budget=4)
    world.half.verdict = lambda request, local: (0, False)
    world.add("r", PROMPT)
    world.step()
    request = world.scheduler.requests["r"]
    world.scheduler.queues.running.remove(request)
    world.scheduler.queues.send_back(request)
    world.half.verdict = lambda request, local: (len(PROMPT) - local, True)
    world.step()
    hand_over(world)
    world.end_load("r")
    world.run()
    assert computed_in(world) == [4, 1, 1, 1]
    world.end("r")


def test_a_handed_over_token_has_as_many_logprobs_as_requested() -> None:
    world = loading(logprobs=2)
    first = expected_output(world.answers["r"].asked)[0]
    tokens = prefilled_tokens(world.answers["r"].asked, [first], [logprobs_of(first, 5)])
    world.half.prefilled = lambda request_id: tokens
    world.end_load("r")
    world.step()
    (output,) = world.outputs[-1].outputs
    assert output.new_logprobs == [logprobs_of(first, 2)]


# --- What is accepted ------------------------------------------------------------------------------


def request_of(asked: EngineRequest) -> Request:
    return Request(asked, block_size=BLOCK, eos_token_ids=EOS_IDS)


def accept_for(request: Request, tokens: PrefilledTokens) -> AcceptedTokens | None:
    return accept(tokens, request.sampling_params, request.stop_token_ids, VOCAB)


SAME = [
    ({}, {"max_tokens": 1}),  # The prefill leg differs in this.
    ({"min_tokens": 3}, {"min_tokens": 1, "max_tokens": 1}),
    ({"stop_token_ids": (5,)}, {}),
    ({"temperature": 0.0, "seed": 1}, {"temperature": 0.0, "top_p": 0.5}),
    ({"seed": 3}, {"seed": 3}),
    ({"logit_bias": {1: 1.0, 2: 2.0}}, {"logit_bias": {2: 2.0, 1: 1.0}}),
    (
        {"allowed_token_ids": (3, 4), "bad_words_token_ids": ((4,),)},
        {"allowed_token_ids": (3, 4), "bad_words_token_ids": ((4,),), "max_tokens": 1},
    ),
]
OTHER = [
    ({"min_tokens": 1}, {}),
    ({"min_tokens": 1, "ignore_eos": False}, {"min_tokens": 1}),
    ({"seed": 3}, {"seed": 4}),
    ({"temperature": 0.5}, {}),
    ({"temperature": 0.0}, {}),
    ({"top_k": 3}, {}),
    ({"repetition_penalty": 1.5}, {}),
    ({"presence_penalty": 1.5}, {}),
    ({"frequency_penalty": 1.5}, {}),
    ({"logit_bias": {1: 1.0}}, {}),
    ({"allowed_token_ids": (3, 4)}, {}),
    ({"allowed_token_ids": (3, 4)}, {"allowed_token_ids": (3,)}),
    ({"bad_words_token_ids": ((4,),)}, {}),
    ({"bad_words_token_ids": ((4,),)}, {"bad_words_token_ids": ((4, 5),)}),
    ({"grammar": "one"}, {}),
    ({}, {"grammar": "one"}),
    ({"grammar": "one"}, {"grammar": "two"}),
]


@pytest.mark.parametrize(("ours", "theirs"), SAME)
def test_a_token_of_the_same_parameters_is_accepted(ours: Any, theirs: Any) -> None:
    tokens = prefilled_tokens(engine_request("p", PROMPT, **theirs), [3])
    accepted = accept_for(request_of(engine_request("d", PROMPT, **ours)), tokens)
    assert accepted is not None
    assert accepted.token_ids == [3]
    assert accepted.logprobs is None


@pytest.mark.parametrize(("ours", "theirs"), OTHER)
def test_a_token_of_other_parameters_is_not_accepted(ours: Any, theirs: Any) -> None:
    tokens = prefilled_tokens(engine_request("p", PROMPT, **theirs), [3])
    assert accept_for(request_of(engine_request("d", PROMPT, **ours)), tokens) is None


def test_a_declined_token_is_sampled_here() -> None:
    world = loading(min_tokens=1)
    hand_over(world, sampling=b"of others", token_ids=(3,))
    world.end_load("r")
    world.run()
    assert computed_in(world) == [1, 1, 1, 1]
    world.check_answer("r")


@pytest.mark.parametrize("num_there", [None, 1])
def test_a_token_without_the_logprobs_that_the_client_wants_is_not_accepted(num_there: int | None) -> None:
    logprobs = [] if num_there is None else [logprobs_of(3, num_there)]
    tokens = prefilled_tokens(engine_request("p", PROMPT), [3], logprobs)
    assert accept_for(request_of(engine_request("d", PROMPT, logprobs=2)), tokens) is None
    assert accept_for(request_of(engine_request("d", PROMPT)), tokens) is not None


def test_a_token_outside_the_vocabulary_is_not_accepted() -> None:
    request = request_of(engine_request("d", PROMPT))
    tokens = PrefilledTokens(
        (VOCAB,), None, sampling_digest(request.sampling_params, request.stop_token_ids, 1)
    )
    assert accept_for(request, tokens) is None


def test_every_sampling_parameter_has_a_place_in_the_digest_or_a_reason_not_to() -> None:
    decides = {"temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "min_tokens"}
    decides |= {
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "allowed_token_ids",
        "bad_words_token_ids",
        "grammar",
    }
    ends_only = {"stop_token_ids", "ignore_eos"}  # Together with min_tokens: blocked until then.
    shows_or_counts_only = {"max_tokens", "logprobs", "prompt_logprobs"}
    assert set(SamplingParams.__struct_fields__) == decides | ends_only | shows_or_counts_only


def test_sampled_tokens_are_available_when_the_connector_is_asked() -> None:
    world = World()
    seen: list[PrefilledTokens | None] = []

    def lends(request: Any, block_ids: list[int]) -> tuple[bool, None]:
        seen.append(request.prefilled_tokens)
        return False, None

    world.half.lends = lends
    world.add("r", PROMPT, max_tokens=1, params={"do_remote_decode": True})
    world.run()
    (tokens,) = seen
    assert tokens is not None
    assert list(tokens.token_ids) == expected_output(world.answers["r"].asked)
