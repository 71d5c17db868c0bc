"""Answers that a grammar constrains: they belong to it, whatever the scheduler and the other requests do."""

import json
import string
from collections.abc import Callable
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.config import EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from baton.core.errors import UserError
from baton.engine.api import SamplingParams
from baton.engine.llm import LLM, Completion
from baton.engine.text.grammar import MAX_GRAMMAR_CHARS, Grammars, GrammarState, compile_job
from baton.engine.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 9999},
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["x", "y", "zz"]}, "maxItems": 3},
    },
    "required": ["id", "name", "tags"],
    "additionalProperties": False,
}
GRAMMAR = compile_job("compact_schema", json.dumps(SCHEMA))
# One more alternative with each token: no limit is reached before the answer has some hundred.
AMBIGUOUS = compile_job("ebnf", 'start: start start | "a" | "ab"')


def params(grammar: str, **fields: Any) -> SamplingParams:
    return SamplingParams(grammar=grammar, **{"max_tokens": 90, "temperature": 0, **fields})


@pytest.fixture(scope="module")
def read(model: ModelConfig) -> Callable[[list[int]], str]:
    return Tokenizer.from_folder(model.model).decode


@pytest.fixture(scope="module")
def grammars(model: ModelConfig) -> Grammars:
    return Grammars(model)


# --- Texts of grammars -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        ("regex", "[a-c]{3}", "abc"),
        ("choice", '["yes", "no \\"never\\""]', 'no "never"'),
        ("ebnf", 'start: "a" start "b" | "c"', "aacbb"),
        ("ebnf", 'root ::= "a" root "b" | "c"', "acb"),
        ("schema", '{"type": "integer"}', "12"),
        ("schema", "{}", '{"a": [null]}'),
    ],
)
def test_kinds(model: ModelConfig, grammars: Grammars, kind: str, text: str, answer: str) -> None:
    state = grammars.begin(compile_job(kind, text))
    token_ids = [*Tokenizer.from_folder(model.model).encode(answer, add_special_tokens=False)]
    for token_id in token_ids:
        assert state.allowed()[token_id]
        state.accept(token_id)
    assert state.allowed()[model.eos_token_ids[0]]
    assert state.error is None


ENDLESS: dict[str, Any] = {
    "$ref": "#/$defs/a",
    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(a"),
        ("choice", "["),
        ("ebnf", "start: nothing"),
        ("ebnf", "no grammar"),
        ("schema", "{"),
        ("schema", "[]"),
        ("schema", '{"type": "no type"}'),
        ("schema", '{"$ref": "https://example.com/schema"}'),
        ("schema", json.dumps(ENDLESS)),
        ("schema", json.dumps({"anyOf": [{**SCHEMA, "required": [f"p{i}"]} for i in range(500)]})),
        ("schema", '{"items":' * 500 + "{}" + "}" * 500),
        ("schema", json.dumps({"enum": [f"value {i}" for i in range(MAX_GRAMMAR_CHARS // 8)]})),
    ],
)
def test_what_is_wrong_or_too_costly_is_refused(kind: str, text: str) -> None:
    with pytest.raises(UserError):
        compile_job(kind, text)


# --- States ----------------------------------------------------------------------------------------


@given(draws=st.lists(st.integers(0, 2**30), max_size=60), cut=st.integers(0, 60))
def test_a_state_is_a_function_of_the_tokens(grammars: Grammars, draws: list[int], cut: int) -> None:
    state, again = grammars.begin(GRAMMAR), grammars.begin(GRAMMAR)
    output: list[int] = []
    for draw in draws:
        allowed = state.allowed().nonzero()[0]
        output.append(int(allowed[draw % len(allowed)]))
        state.accept(output[-1])
    again.restart(output[:cut])
    for token_id in output[cut:]:
        assert again.allowed()[token_id]
        again.accept(token_id)
    np.testing.assert_array_equal(again.allowed(), state.allowed())
    again.restart(())
    np.testing.assert_array_equal(again.allowed(), grammars.begin(GRAMMAR).allowed())
    assert state.error is again.error is None


def test_given_tokens_that_the_grammar_forbids_are_not_the_clients_fault(grammars: Grammars) -> None:
    state = grammars.begin(GRAMMAR)
    assert isinstance(state, GrammarState)
    state.restart([int((~state.allowed()).nonzero()[0][5])])
    assert state.error is not None
    assert not state.error.is_users
    assert state.allowed().all(), "its token means nothing"


def test_a_model_without_an_end_cannot_be_constrained(model: ModelConfig) -> None:
    endless = Grammars(msgspec.structs.replace(model, eos_token_ids=()))
    error = endless.begin(GRAMMAR).error
    assert error is not None
    assert error.is_users


# --- In an engine ----------------------------------------------------------------------------------

Values = st.recursive(
    st.one_of(
        st.just({"type": "boolean"}),
        st.builds(
            lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
            st.integers(-99, 99),
            st.integers(0, 99),
        ),
        st.builds(lambda size: {"type": "string", "maxLength": size}, st.integers(0, 5)),
        st.lists(st.text(string.printable, max_size=4), min_size=1, max_size=3).map(
            lambda texts: {"enum": texts}
        ),
    ),
    lambda inner: st.one_of(
        st.builds(
            lambda of, most: {"type": "array", "items": of, "maxItems": most}, inner, st.integers(0, 2)
        ),
        st.dictionaries(st.text(string.ascii_letters, min_size=1, max_size=3), inner, max_size=3).map(
            lambda fields: {
                "type": "object",
                "properties": fields,
                "required": sorted(fields),
                "additionalProperties": False,
            }
        ),
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def llm(make_config: Callable[..., EngineConfig]):
    with LLM(make_config(num_blocks=400)) as llm:
        yield llm


@settings(max_examples=25)
@given(schemas=st.lists(Values, min_size=1, max_size=4), seed=st.integers(0, 99))
def test_answers_obey_any_schema(
    llm: LLM, read: Callable[[list[int]], str], schemas: list[dict[str, Any]], seed: int
) -> None:
    wanted = [
        params(compile_job("compact_schema", json.dumps(schema)), temperature=1.0, seed=seed, max_tokens=200)
        for schema in schemas
    ]
    for schema, answer in zip(schemas, llm.generate([[7, 8, 9]] * len(wanted), wanted), strict=True):
        assert answer.error is None
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(read(answer.token_ids[:-1])), schema)


PROMPTS = [[5 + index, *range(10, 20 + 3 * index)] for index in range(6)]
MIXED = [
    params(GRAMMAR),
    params(GRAMMAR, temperature=1.0, seed=3),
    SamplingParams(temperature=0, max_tokens=30),
]
WANTED = [MIXED[index % 3] for index in range(6)]


def tokens_of(answers: list[Completion]) -> list[list[int]]:
    assert all(answer.error is None for answer in answers)
    return [answer.token_ids for answer in answers]


@pytest.fixture(scope="module")
def alone(llm: LLM, read: Callable[[list[int]], str]) -> list[list[int]]:
    answers = [llm.generate([prompt], [wanted])[0] for prompt, wanted in zip(PROMPTS, WANTED, strict=True)]
    for answer, wanted in zip(answers, WANTED, strict=True):
        if wanted.grammar is not None:
            jsonschema.validate(json.loads(read(answer.token_ids[:-1])), SCHEMA)
    return tokens_of(answers)


@pytest.mark.parametrize(
    ("num_blocks", "scheduler_config"),
    [(400, SchedulerConfig()), (32, SchedulerConfig()), (400, SchedulerConfig(max_num_batched_tokens=7))],
    ids=["a batch", "preemption", "chunks"],
)
def test_tokens_depend_neither_on_the_batch_nor_on_preemption(
    make_config: Callable[..., EngineConfig],
    alone: list[list[int]],
    num_blocks: int,
    scheduler_config: SchedulerConfig,
) -> None:
    with LLM(make_config(num_blocks=num_blocks, scheduler_config=scheduler_config)) as llm:
        assert tokens_of(llm.generate(PROMPTS, WANTED)) == alone


TWO_RANKS = ParallelConfig(tensor_parallel_size=2, executor="multiprocess")


@pytest.mark.processes
def test_two_ranks_agree(make_config: Callable[..., EngineConfig], alone: list[list[int]]) -> None:
    with LLM(make_config(num_blocks=400, parallel_config=TWO_RANKS)) as llm:
        answers = llm.generate(PROMPTS, WANTED)
    greedy = [index for index, wanted in enumerate(WANTED) if wanted.is_greedy]
    assert [tokens_of(answers)[index] for index in greedy] == [alone[index] for index in greedy]


def test_a_costly_grammar_ends_its_own_request_only(
    llm: LLM, model: ModelConfig, alone: list[list[int]]
) -> None:
    never_ends = dict.fromkeys(model.eos_token_ids, -100.0)
    costly = params(AMBIGUOUS, max_tokens=250, logit_bias=never_ends)
    answers = llm.generate([[3], *PROMPTS], [costly, *WANTED])
    assert tokens_of(answers[1:]) == alone
    assert answers[0].error is not None
    assert answers[0].error.is_users
    assert len(answers[0].token_ids) > 50


def test_a_grammar_that_no_server_has_checked_ends_its_request(llm: LLM, alone: list[list[int]]) -> None:
    answers = llm.generate([[3], *PROMPTS], [params("no grammar"), *WANTED])
    assert answers[0].error is not None
    assert answers[0].error.is_users
    assert tokens_of(answers[1:]) == alone


@pytest.mark.parametrize("field", ["min_tokens", "allowed_token_ids", "bad_words_token_ids"])
def test_bans_are_not_combined_with_a_grammar(field: str) -> None:
    value = {"min_tokens": 1, "allowed_token_ids": (1,), "bad_words_token_ids": ((1,),)}[field]
    with pytest.raises(UserError):
        params(GRAMMAR, **{field: value})
