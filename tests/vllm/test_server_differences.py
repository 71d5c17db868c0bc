"""Baton's server against vLLM's, on fields and their values.

A table of `docs/api.md` has the differences: every one that is found must be in it, and every one in it must
still be there. Without an engine: vLLM's request classes and Baton's admission read the same bodies. With
engines: both answer the same requests about the same model.
"""

import asyncio
import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest as VllmCompletionRequest
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.exceptions import VLLMClientError

from baton.core.errors import UserError
from baton.http.errors import ApiError
from baton.server.chat import admit_chat
from baton.server.completions import admit_completion
from baton.server.protocol.chat import ChatRequest
from baton.server.protocol.completion import CompletionRequest
from baton.server.protocol.fields import FIELDS, PATHS, Endpoint
from baton.server.protocol.parse import parse_request
from baton.server.service import Service
from tests.server.fakes import MAX_MODEL_LEN, VOCAB_SIZE, ScriptedEngine, service_around
from tests.vllm.engines import BatonPlan, Server, Site, VllmPlan, transfer

pytestmark = pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning")  # vLLM's own.

DOCS = Path(__file__).parents[2] / "docs" / "api.md"
ROW = re.compile(r"^\| `(\{.*\})` \| (\w+) \| (\w+) \| .+ \|$", re.MULTILINE)
Fields = Mapping[str, Any]


class Difference(NamedTuple):
    """`ours` and `theirs`: accepted or refused, or both `other`, if both accept it with another meaning."""

    fields: Fields
    ours: str
    theirs: str


LONG_TEXT = re.compile(r"<(\d+) characters>")
DIFFERENCES = [
    Difference(json.loads(LONG_TEXT.sub(lambda found: "a" * int(found[1]), fields)), ours, theirs)
    for fields, ours, theirs in ROW.findall(DOCS.read_text())
]


def number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0


def longest(value: Any) -> int:
    """The length of the longest text."""
    texts = value if isinstance(value, list) else [value]
    return max((len(text) for text in texts if isinstance(text, str)), default=0)


# The values of a field that differ as its row in the table says, by the words of the row.
KNOWN: dict[tuple[str, str, str], Callable[[Any], bool]] = {
    ("bad_words", "refused", "accepted"): lambda value: longest(value) > 256,
    ("best_of", "refused", "accepted"): lambda value: True,
    ("cache_salt", "accepted", "refused"): lambda value: longest(value) > 128 or bool({*value} & {*"@/\\\0"}),
    ("logprobs", "accepted", "refused"): lambda value: isinstance(value, str),
    ("prompt_logprobs", "accepted", "refused"): lambda value: isinstance(value, str),
    ("top_logprobs", "accepted", "refused"): lambda value: isinstance(value, str),
    ("n", "refused", "accepted"): lambda value: number(value) > 128,
    ("priority", "refused", "accepted"): lambda value: abs(number(value)) >= 2**31,
    ("repetition_penalty", "refused", "accepted"): lambda value: number(value) > 100,
    ("seed", "other", "other"): lambda value: number(value) == -1,
    ("session_id", "refused", "accepted"): lambda value: not 0 < len(value) <= 256,
    ("stop", "accepted", "refused"): lambda value: 4 < len(value) <= 16,
    ("stop", "refused", "accepted"): lambda value: longest(value) > 1024,
    ("stream_options", "accepted", "refused"): lambda value: "include_usage" not in value,
    ("temperature", "accepted", "refused"): lambda value: 2 < number(value) <= 100,
    ("tools", "accepted", "refused"): lambda value: value == [],
    ("top_k", "refused", "accepted"): lambda value: number(value) >= 2**31,
}  # fmt: skip
STATUS = {(endpoint, field.name): field.status for field in FIELDS for endpoint in field.endpoints}


def are_of(endpoint: Endpoint, fields: Fields) -> bool:
    return all((endpoint, name) in STATUS for name in fields)


def is_known(endpoint: Endpoint, fields: Fields, ours: str, theirs: str) -> bool:
    """Whether the table has this difference. Refused and ignored fields are in the tables of all fields."""
    for name, value in fields.items():
        status = STATUS[endpoint, name]
        if status == "ignored" or (status == "refused" and ours == "refused"):
            return True
        if (ours, theirs) == ("accepted", "refused") and (value is None or status == "refused"):
            return True
        if (known := KNOWN.get((name, ours, theirs))) is not None and known(value):
            return True
    return False


# --- Without engines ----------------------------------------------------------------------------------

BODIES: dict[Endpoint, dict[str, Any]] = {
    "completions": {"prompt": [5, 6, 7]},
    "chat": {"messages": [{"role": "user", "content": "Sa"}]},
}
NUM_TOKENS = {"completions": 3, "chat": 4}
READERS: dict[Endpoint, TypeAdapter[Any]] = {
    "completions": TypeAdapter(VllmCompletionRequest),
    "chat": TypeAdapter(ChatCompletionRequest),
}
MODEL = SimpleNamespace(max_model_len=MAX_MODEL_LEN, max_logprobs=20, get_vocab_size=lambda: VOCAB_SIZE)
SAME = (
    *("temperature", "max_tokens", "min_tokens", "seed", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "ignore_eos", "logprobs", "prompt_logprobs"),
)
Reading = dict[str, Any] | None  # The sampling parameters; None: the request is refused.


def reading(params: Any, **more: Any) -> dict[str, Any]:
    is_greedy = params.temperature == 0
    return {
        **{name: getattr(params, name) for name in SAME},
        "filters": None if is_greedy else (params.top_p, max(0, params.top_k), params.min_p),
        "logit_bias": params.logit_bias or {},
        "allowed_token_ids": params.allowed_token_ids and sorted(set(params.allowed_token_ids)),
        "stop_token_ids": set(params.stop_token_ids),
        **more,
    }


def read_by_vllm(endpoint: Endpoint, body: Fields) -> Reading:
    try:
        request = READERS[endpoint].validate_python(copy.deepcopy(body))
        request.build_tok_params(MODEL)
        asked = getattr(request, "max_completion_tokens", None)
        asked = request.max_tokens if asked is None else asked
        if request.model not in (None, "", "toy") or request.truncate_prompt_tokens == 0:
            return None  # Found by the server and by the engine.
        num_tokens, cut = NUM_TOKENS[endpoint], request.truncate_prompt_tokens
        if not getattr(request, "add_generation_prompt", True):
            num_tokens -= 1
        limit = get_max_tokens(MAX_MODEL_LEN, asked, num_tokens, {}, truncate_prompt_tokens=cut)
        params = request.to_sampling_params(limit, {})
        params._validate_logprobs(MODEL)
        params._validate_logit_bias(MODEL)
        params._validate_stop_token_ids(MODEL)
        params._validate_allowed_token_ids(MODEL)
    except (ValidationError, VLLMClientError, ValueError, TypeError, AttributeError):
        return None
    names = ("n", "stop", "include_stop_str_in_output", "skip_special_tokens")
    shown = {name: getattr(params, name) for name in names}
    return reading(params, stream=bool(request.stream), **shown)


def read_by_baton(service: Service, endpoint: Endpoint, body: Fields) -> Reading:
    raw = json.dumps(body).encode()
    try:
        request: CompletionRequest | ChatRequest
        if endpoint == "completions":
            request = parse_request(raw, CompletionRequest, endpoint).in_session(None)
            samples = asyncio.run(admit_completion(service, request, "a")).samples
        else:
            request = parse_request(raw, ChatRequest, endpoint).in_session(None)
            samples = asyncio.run(admit_chat(service, request, "a")).samples
    except (UserError, ApiError):
        return None
    return reading(
        samples[0].request.sampling_params,
        stream=bool(request.stream),
        n=len(samples),
        stop=list(request.stop_strings),
        include_stop_str_in_output=samples[0].include_stop,
        skip_special_tokens=request.skip_special_tokens is not False,
    )


def outcome(is_refused: bool, is_other: bool) -> str:
    return "refused" if is_refused else "other" if is_other else "accepted"


def difference_of(service: Service, endpoint: Endpoint, fields: Fields) -> tuple[str, str] | None:
    body = {**BODIES[endpoint], **fields}
    ours, theirs = read_by_baton(service, endpoint, body), read_by_vllm(endpoint, body)
    if ours == theirs:
        return None
    is_other = ours is not None and theirs is not None
    return outcome(ours is None, is_other), outcome(theirs is None, is_other)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with service_around(ScriptedEngine()) as service:
        yield service


NAMES = sorted(
    {name for (endpoint, name), status in STATUS.items() if status == "implemented" and endpoint in BODIES}
    - {"prompt", "messages", "kv_transfer_params"}
)
NEUTRAL = [(field.name, value) for field in FIELDS if field.status == "refused" for value in field.neutral]
SCALARS: list[Any] = [
    *(None, True, False, *range(-2, 6), 16, 20, 21, 128, 129, 197, 198, 200, 201, 2**31 - 1, 2**31, 2**63),
    *(-(2**63), 0.5, 1.0, 2.0, 2.5, 100.0, 101.5, -1e-9, 1e-6, 1e10, "", "0", "1", "-1", "3.0", " 2", "0.5"),
    *("1_0", "true", "False", "no", "null", "x", "left", "right", "high", "none", "auto", "toy", "@"),
    *("a" * 129, "a" * 257, "a" * 1025),
]
scalars = (
    st.sampled_from(SCALARS)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False, width=32)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
)
keys = st.sampled_from(["5", "-1", "a", " 5", "12287", "12288", "include_usage", "continuous_usage_stats"])
values = (
    scalars | st.lists(scalars, max_size=5) | st.dictionaries(keys, scalars, max_size=2) | st.just(["a"] * 17)
)
names = st.sampled_from(NAMES)
drawn = st.dictionaries(names, values, min_size=1, max_size=1) | st.sampled_from(NEUTRAL).map(
    lambda item: dict([item])
)


@pytest.mark.parametrize("endpoint", BODIES)
def test_fixed_values_are_read_as_by_vllm(service: Service, endpoint: Endpoint) -> None:
    for name in NAMES:
        for value in SCALARS if (endpoint, name) in STATUS else ():
            found = difference_of(service, endpoint, {name: value})
            assert found is None or is_known(endpoint, {name: value}, *found), (name, value, found)


@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(endpoint=st.sampled_from(list(BODIES)), fields=drawn)
def test_any_value_is_read_as_by_vllm(service: Service, endpoint: Endpoint, fields: dict[str, Any]) -> None:
    if are_of(endpoint, fields):
        found = difference_of(service, endpoint, fields)
        assert found is None or is_known(endpoint, fields, *found), (fields, found)


# --- With engines -------------------------------------------------------------------------------------

ASKS: dict[Endpoint, dict[str, Any]] = {
    "completions": {"prompt": "The cache of a language model", "max_tokens": 8, "temperature": 0},
    "chat": {
        "messages": [{"role": "user", "content": "Name a colour"}],
        "max_tokens": 8,
        "temperature": 0,
    },
}
# Values of fields that both endpoints have.
BOTH: dict[str, list[Any]] = {
    "model": ["tiny", "", None, "other", 1],
    "max_tokens": [1, 0, -1, 3.0, "3", 3.5, True, 4097, "x", [1]],
    "min_tokens": [0, 4, "4", 9, -1],
    "n": [1, "1", 0, -1, True],
    "temperature": ["0", 0.0, False, "x", -1, 0.5, 1e-6],
    "top_p": [1, "0.5", 0, 1.5, True],
    "top_k": [-1, 0, 5, "5", -2, 5.5],
    "min_p": [0.5, "0.1", 2],
    "seed": [1, "1", 2**63, 1.5],
    "repetition_penalty": [1.1, "1.5", 0, -1],
    "presence_penalty": [2, "-2", 2.5],
    "frequency_penalty": [1, -2.5],
    "logit_bias": [
        *({}, None, {"40": 100}, {"40": 1000}, {"40": "5"}, {"40": None}, {"a": 1}, {"-1": 1}, {"999999": 1}),
    ],
    "allowed_token_ids": [None, [], [40, 41], ["40"], [40.0], [-1], [999999]],
    "bad_words": [["the"], [], [""]],
    "stop": [None, [], "", "a", ["a", "e"], [""], 1, "aaaa" * 65],
    "stop_token_ids": [None, [], [40], ["40"], [40.5], [999999]],
    "include_stop_str_in_output": [True, "true", 1],
    "ignore_eos": [True, "yes", 0, 2],
    "skip_special_tokens": [False, "off"],
    "truncate_prompt_tokens": [4, "4", -1, 0, -2, 4097],
    "truncation_side": ["left", "right", "up"],
    "prompt_logprobs": [0, 1, 20, 21, -1, True],
    "cache_salt": ["a", ""],
    "priority": [0, "0"],
    "return_token_ids": [True, "true", None],
    "return_tokens_as_token_ids": [True, "x"],
    "stream": [False, "false", "true", 1, 2, None],
    "stream_options": [{}, None, {"include_usage": True}, {"include_usage": "x"}, []],
    "response_format": [
        None, {"type": "text"}, {"type": "x"}, {"type": "json_schema"}, 5,
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["left", "right"]}}},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "x"}}},
        {"type": "json_schema", "json_schema": {"schema": {"enum": ["left", "right"]}}},
    ],
    "structured_outputs": [
        # A number ends vLLM's request in an exception, with its connection.
        None, {}, {"choice": ["x", "y"]}, {"choice": []},
        {"regex": "[a-c]{3}-[0-9]"}, {"regex": "("}, {"regex": "a", "choice": ["b"]},
        {"grammar": 'root ::= "y" | "n"'}, {"grammar": "root ::= nothing"},
        {"json": {"enum": ["left", 5]}}, {"json": '{"enum": ["left", 5]}'}, {"json": "{"},
        {"json_object": False},
        {"choice": ["a", "b"], "disable_any_whitespace": True},
    ],
    "use_beam_search": [False, "false", 0],
    "length_penalty": [1, "1", True],
    "spaces_between_special_tokens": [True, "true"],
    "kv_transfer_params": [{}, None, 5],
    "unknown": [1],
    "user": ["a", None],
}  # fmt: skip


def message(content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


PROMPTS: list[Any] = [
    *(
        "",
        [],
        None,
        "a",
        ["a", "b"],
        [40, 41],
        [[40], [41, 42]],
        [40.0],
        ["40"],
        [""],
        [True],
        [999999],
        [-1],
    ),
    *([1, "a"], {}, 5, "a" * 40_000, [40] * 4095, [40] * 4097, [[40], []]),
]
CONTENTS: list[Any] = [
    *("", [], [{"type": "text", "text": "a"}], [{"type": "text"}], 5, [{"type": "image_url"}], "a " * 9000),
]
ROLES = ["system", "developer", "assistant", "tool", "function", "other"]
MESSAGES: list[Any] = [
    *([], None, {}, [5], [{"role": "user"}], [{"content": "a"}], [{"role": 1, "content": "a"}]),
    [message("Hi"), message("Be brief", "developer")],
    [message("Be", "system"), message("brief", "developer"), message("Hi")],
    [message("Hi"), message(None, "assistant")],
    [message("Hi", name="Eve")],
    [message("x-anthropic-billing-header: a\nBe brief", "system"), message("Hi")],
]
CASES: dict[Endpoint, list[dict[str, Any]]] = {
    "completions": [
        *({"prompt": value} for value in PROMPTS),
        {"prompt": [40] * 4095, "stream": True},
        *({"logprobs": value} for value in (0, 1, 20, 21, -1, True, False, 1.0, "x", None)),
        *({"echo": value} for value in (True, "true", None, 2)),
        {"echo": True, "max_tokens": 0},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
        {"echo": True, "logprobs": 0},
        {"add_special_tokens": False},
        {"prompt": [40] * 4090, "max_tokens": 16, "ignore_eos": True},
        {"prompt": [40] * 4090, "max_tokens": 4096, "ignore_eos": True, "stream": True},
        {"max_tokens": None},
        {"prompt": [40] * 5000, "truncate_prompt_tokens": -1, "max_tokens": 16},
        {"prompt": [40] * 5000, "stream": True},
        {"prompt": [40] * 4090, "max_tokens": 16, "min_tokens": 10},
        {"stream": True, "prompt_logprobs": 0},
        {"stream": True, "prompt_logprobs": 1},
        {"stream": True, "stream_options": {"include_usage": True}, "n": 1},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"n": 2, "temperature": 1.0, "ignore_eos": True},
    ],
    "chat": [
        *({"messages": [message(content)]} for content in CONTENTS),
        *({"messages": messages} for messages in MESSAGES),
        *({"messages": [message("Be brief", role), message("Hi")]} for role in ROLES),
        *({"logprobs": value} for value in (True, 1, "true", 2, None)),
        *({"logprobs": True, "top_logprobs": value} for value in (0, 2, 20, 21, -1, None, 2.0, True)),
        *({"top_logprobs": value} for value in (0, 2, None)),
        *({"max_completion_tokens": value} for value in (3, "3", 0, 4097)),
        {"max_tokens": 9, "max_completion_tokens": 3},
        {"max_tokens": 4096, "stop": "e"},
        {"max_tokens": None, "stop": "e"},
        *({"tool_choice": value} for value in ("none", "auto", None, "x")),
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": "true"}}], "tool_choice": "auto"},
        {"tools": [{"type": "function"}]},
        *({"add_generation_prompt": value} for value in (False, "false", 2)),
        *({"reasoning_effort": value} for value in ("low", "none", "x", None)),
        *({"chat_template_kwargs": value} for value in ({}, {"a": 1}, 5)),
        {"documents": [{"title": "a", "text": "b"}]},
        {"stream": True, "prompt_logprobs": 0},
        {"stream": True, "logprobs": True, "top_logprobs": 1},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"n": 2, "temperature": 1.0, "ignore_eos": True},
    ],
}  # fmt: skip
CORPUS: list[tuple[Endpoint, dict[str, Any]]] = [
    (endpoint, fields)
    for endpoint in CASES
    for fields in [*({name: value} for name, found in BOTH.items() for value in found), *CASES[endpoint]]
]


def answer_of(server: Server, endpoint: Endpoint, fields: Fields) -> dict[str, Any]:
    """What a client reads of an answer; of a refusal only whether it is about the context."""
    body = {**ASKS[endpoint], "return_token_ids": True, **fields}
    answer = server.client.post(f"{server.url}{PATHS[endpoint]}", json=body)
    if answer.status_code != 200:
        about = "maximum context length is 4096 tokens. However, " in answer.text
        return {"status": answer.status_code, "is_too_long": about}
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        events = [json.loads(line) for line in lines if line != "[DONE]"]
        is_done = lines[-1] == "[DONE]"
    else:
        events, is_done = [answer.json()], None
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        assert "choices" in event, (fields, events)
        for one in event["choices"]:
            choice = choices.setdefault(one["index"], {"text": "", "token_ids": [], "num_logprobs": 0})
            message = one.get("message") or one.get("delta") or {"content": one.get("text")}
            choice["text"] += message.get("content") or ""
            choice["token_ids"] += one.get("token_ids") or []
            choice["finish"] = one.get("finish_reason") or choice.get("finish")
            choice["stop_reason"] = one.get("stop_reason") or choice.get("stop_reason")
            logprobs = one.get("logprobs") or {}
            choice["num_logprobs"] += len(logprobs.get("tokens") or logprobs.get("content") or [])
            choice["prompt"] = (
                one.get("prompt_token_ids") or event.get("prompt_token_ids") or choice.get("prompt")
            )
    usage = next((event["usage"] for event in reversed(events) if event.get("usage")), None)
    counts = usage and (usage["prompt_tokens"], usage["completion_tokens"])
    if number(body["temperature"]) > 0:
        choices = {index: {"num": len(choice["token_ids"])} for index, choice in choices.items()}
    return {"status": 200, "is_done": is_done, "choices": choices, "usage": counts}


WITH_TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


@pytest.fixture(scope="module")
def servers(site: Site) -> dict[str, Server]:
    """vLLM alone, and two engines of Baton."""
    plans = [
        BatonPlan(name, transfer("BatonPushConnector", role, name))
        for name, role in (("baton-p", "kv_producer"), ("baton-d", "kv_consumer"))
    ]
    return site.cast("differences", VllmPlan("vllm", None, extra=WITH_TOOLS), *plans)


def ask(server: Server, asked: Sequence[tuple[Endpoint, Fields]]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(lambda case: answer_of(server, *case), asked))


@pytest.fixture(scope="module")
def expected(servers: dict[str, Server]) -> list[dict[str, Any]]:
    return ask(servers["vllm"], CORPUS)


def check(server: Server, expected: list[dict[str, Any]], *, routers: Sequence[Fields] = ()) -> None:
    """`routers`: requests that a router answers by rules of its own."""
    assert len(CORPUS) > 400
    found = zip(CORPUS, ask(server, CORPUS), expected, strict=True)
    assert [one for one in found if one[1] != one[2] and one[0][1] not in routers] == []


def test_answers_are_vllms(servers: dict[str, Server], expected: list[dict[str, Any]]) -> None:
    check(servers["baton-d"], expected)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_answers_through_a_pair_are_vllms(
    site: Site, servers: dict[str, Server], expected: list[dict[str, Any]], mode: str
) -> None:
    with site.router(servers["baton-p"], servers["baton-d"], mode) as router:
        check(router, expected, routers=[{"model": 1}, {"kv_transfer_params": {}}])
        assert router.metric("baton:router_prefills_total", where="remote") > 100


@pytest.mark.parametrize("row", DIFFERENCES, ids=lambda row: json.dumps(row.fields)[:60])
def test_each_difference_of_the_docs_is_still_there(
    service: Service, servers: dict[str, Server], row: Difference
) -> None:
    for endpoint in ASKS:
        if not are_of(endpoint, row.fields):
            continue
        ours, theirs = (
            answer_of(servers[name], endpoint, row.fields)["status"] for name in ("baton-d", "vllm")
        )
        is_other = ours == theirs and difference_of(service, endpoint, row.fields) == ("other", "other")
        assert (outcome(ours != 200, is_other), outcome(theirs != 200, is_other)) == row[1:], endpoint


def test_each_difference_that_is_known_here_is_in_the_docs() -> None:
    section = DOCS.read_text().partition("## Differences from vLLM")[2].partition("\n## ")[0]
    assert [name for name, *_ in KNOWN if f"`{name}`" not in section and f'"{name}"' not in section] == []


@pytest.mark.parametrize("endpoint", ASKS)
def test_half_a_character_at_the_end_is_shown(servers: dict[str, Server], endpoint: Endpoint) -> None:
    body = {"prompt": "\N{EURO SIGN}", "add_special_tokens": False}
    vllm = servers["vllm"]
    first = vllm.client.post(f"{vllm.url}/tokenize", json=body).json()["tokens"][0]
    fields = {"allowed_token_ids": [first], "max_tokens": 1}
    texts = [answer_of(servers[name], endpoint, fields)["choices"][0]["text"] for name in ("baton-d", "vllm")]
    assert texts == ["\ufffd", ""]
