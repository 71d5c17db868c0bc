"""Requests that two engines may answer one after the other, beside the engine's table of fields."""

from typing import Any

import pytest

from baton.router.request.tokens import continuation as exact
from baton.router.request.tokens.continuation import can_split
from baton.router.values.dialects import COMPLETIONS
from baton.server.protocol.fields import FIELDS

BASE: dict[str, Any] = {"prompt": "a", "stream": True, "max_tokens": 9, "temperature": 0}

# Fields that look back at the output, or that one of the two engines alone can answer.
LOOKS_BACK: dict[str, Any] = {
    "bad_words": ["a"],
    "prompt_logprobs": 0,
    "echo": True,
    "logprobs": 0,
    "truncate_prompt_tokens": 5,
    "truncation_side": "left",
    "return_tokens_as_token_ids": True,
    "documents": [{"text": "a"}],
    "reasoning_effort": "low",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto",
    "frequency_penalty": 1,
    "presence_penalty": 1,
    "stop": "a",
    "n": 2,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "guided_regex": "a",
    "use_beam_search": True,
    "misspelt": 1,
}


@pytest.mark.parametrize("name", LOOKS_BACK)
def test_a_field_that_looks_back_leaves_all_tokens_to_one_engine(name: str) -> None:
    assert can_split(BASE, COMPLETIONS)
    assert not can_split({**BASE, name: LOOKS_BACK[name]}, COMPLETIONS)


def test_continuous_usage_leaves_all_tokens_to_one_engine() -> None:
    options = {"include_usage": True}
    assert can_split({**BASE, "stream_options": options}, COMPLETIONS)
    options["continuous_usage_stats"] = True
    assert not can_split({**BASE, "stream_options": options}, COMPLETIONS)


@pytest.mark.parametrize(
    ("body", "may_split"),
    [
        ({"allowed_token_ids": [5]}, True),
        ({"seed": 4}, True),
        ({"stop": []}, True),
        ({"stop": None, "logprobs": None, "n": 1, "presence_penalty": 0.0}, True),
        ({"ignore_eos": True, "min_tokens": 3, "top_p": 0.5, "repetition_penalty": 1.2, "user": "u"}, True),
        ({"stop_token_ids": [7], "logit_bias": {"5": -100}}, True),
        ({"seed": 4, "temperature": 0.5}, False),
        ({"seed": 4, "temperature": None}, False),
        ({"stop": ["x"]}, False),
        ({"max_tokens": None}, False),
        ({"min_tokens": "2"}, False),
        ({"frequency_penalty": -1}, False),
        ({"logprobs": 2}, False),
    ],
    ids=str,
)
def test_values_decide_as_well(body: dict[str, Any], may_split: bool) -> None:
    assert can_split({**BASE, **body}, COMPLETIONS) is may_split


def test_the_engine_ignores_no_field_unseen_that_is_harmless_here() -> None:
    known = {field.name for field in FIELDS}
    assert known >= exact._HARMLESS | exact._IDLE.keys()
