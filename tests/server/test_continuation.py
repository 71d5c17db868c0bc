"""Rest of an answer after an engine's death: with the part before, byte for byte the answer of one engine.

A real engine in this process, with a random model of byte-level tokens, in the server of every day.
"""

import asyncio
import json
import random
import re
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.checkpoints.checkpoint import load_model_config
from baton.checkpoints.random_model import write_checkpoint
from baton.core.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from baton.engine.api import EngineOutput, EngineRequest
from baton.engine.core.engine_core import EngineCore
from baton.engine.text.tokenizer import Tokenizer
from baton.http.workers import WorkerPool
from baton.server.app import build_app
from baton.server.service import Service
from baton.server.tokens import PromptEncoder
from tests.server.fakes import ScriptedEngine, service_around

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
IDS = re.compile(rb',"token_ids":\[[0-9,]*\]')
OWN = re.compile(rb'"id":"[^"]*"|"created":\d+|"cached_tokens":\d+')
TWO_RANKS = ParallelConfig(tensor_parallel_size=2, executor="multiprocess", max_concurrent_batches=2)
USAGE = {"stream_options": {"include_usage": True}}


class CoreEngine(ScriptedEngine):
    """An engine core, stepped by each request that waits for its outputs."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self.core = EngineCore(config, None)
        self.num_preempted = 0
        self.num_steps = 0
        self._outputs_of: dict[str, list[EngineOutput]] = {}

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        self.requests.append(request)
        waiting = self._outputs_of[request.request_id] = []
        refusal = self.core.add_request(request)
        if refusal is not None:
            yield refusal
            return
        try:
            while True:
                await asyncio.sleep(0)
                if not waiting:
                    stepped = self.core.step()
                    self.num_preempted += stepped.stats.num_preempted if stepped.stats else 0
                    for output in stepped.outputs:
                        self._outputs_of.get(output.request_id, []).append(output)
                while waiting:
                    output = waiting.pop(0)
                    yield output
                    if output.finish_reason is not None:
                        return
        finally:
            self.core.abort(request.request_id)
            del self._outputs_of[request.request_id]
            while not self._outputs_of and self.core.scheduler.has_unfinished_requests():
                self.core.step()


class Door:
    """HTTP without sockets."""

    def __init__(self, service: Service, engine: CoreEngine) -> None:
        self.service, self.engine = service, engine
        self._app = build_app(service)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        async def send() -> httpx.Response:
            async with self.client() as client:
                return await client.post(path, json={"stream": True, **body})

        return asyncio.run(send())

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self._app), base_url="http://engine", timeout=60
        )

    def events(self, path: str, body: dict[str, Any], **params: Any) -> list[bytes]:
        """The chunks of a streamed answer."""
        asked = {**body, "kv_transfer_params": params} if params else body
        answer = self.post(path, asked)
        assert answer.status_code == 200, answer.text
        *events, last = answer.content.split(b"\n\n")[:-1]
        assert last == b"data: [DONE]"
        return events


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, hidden=64, layers=2, heads=4, kv_heads=2, vocab=512)
    return folder


def door_of(
    folder: Path, num_blocks: int = 200, is_parallel: bool = False, **scheduling: Any
) -> Iterator[Door]:
    model = load_model_config(folder, max_model_len=256)
    config = EngineConfig(
        model_config=model,
        cache_config=CacheConfig(num_gpu_blocks=num_blocks, block_size=4),
        scheduler_config=SchedulerConfig(**scheduling),
        parallel_config=TWO_RANKS if is_parallel else ParallelConfig(),
    )
    engine, tokenizer, workers = CoreEngine(config), Tokenizer.from_folder(folder), WorkerPool()
    encoder = PromptEncoder(tokenizer, model, workers)
    try:
        with service_around(engine, model_config=model, tokenizer=tokenizer, encoder=encoder) as service:
            yield Door(service, engine)
    finally:
        encoder.close()
        workers.close()
        engine.core.shutdown()


@pytest.fixture(scope="module")
def door(folder: Path) -> Iterator[Door]:
    yield from door_of(folder)


def cut(events: list[bytes]) -> list[bytes]:
    """The chunks as the client gets them, without what differs by request: id, time, hits."""
    return [OWN.sub(b"", IDS.sub(b"", event)) for event in events]


def ids_of(events: list[bytes]) -> list[int]:
    parsed = [json.loads(event.removeprefix(b"data: ")) for event in events]
    return [i for chunk in parsed for choice in chunk["choices"] for i in choice.get("token_ids", [])]


def rounded(value: Any) -> Any:
    """Log-probabilities depend on the shape of a batch in the last bits, with one engine too."""
    match value:
        case float():
            return pytest.approx(value, abs=1e-4)
        case dict():
            return {key: rounded(part) for key, part in value.items()}
        case list():
            return [rounded(part) for part in value]
    return value


def merged(events: list[bytes]) -> dict[str, Any]:
    """What a client has at the end."""
    seen: dict[str, Any] = {"text": "", "logprobs": [], "ends": [], "usage": None, "ids": []}
    for event in events:
        chunk = json.loads(event.removeprefix(b"data: "))
        if chunk.get("usage"):
            seen["usage"] = {**chunk["usage"], "prompt_tokens_details": None}  # Cache hits may differ.
        for choice in chunk["choices"]:
            seen["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            seen["logprobs"].append(rounded(choice.get("logprobs")))
            seen["ids"] += choice.get("token_ids", [])
            if choice["finish_reason"] is not None:
                seen["ends"].append((choice["finish_reason"], choice.get("stop_reason")))
    return seen


BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 5, "temperature": 1.3, "top_p": 0.9},
    "penalties": {"seed": 6, "presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.4},
    "logprobs": {"seed": 7, "logprobs": 3},
    "as ids": {"seed": 7, "logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True},
    "min_tokens": {"seed": 8, "min_tokens": 20, "logit_bias": {"0": 9, "1": 9, "2": 9}},
    "bad words": {"seed": 9, "bad_words": ["the", "ab", "e"], "temperature": 0.3},
    "continuous usage": {
        "seed": 10,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    "special tokens": {"seed": 11, "skip_special_tokens": False, "ignore_eos": True},
}
SEEDS = {name: index for index, name in enumerate(BODIES)}


def request_of(path: str, name: str) -> dict[str, Any]:
    body = {"max_tokens": 40, **USAGE, **BODIES[name]}
    if path == COMPLETIONS:
        return {"prompt": "A model at random says", **body}
    if "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    return {"messages": [{"role": "user", "content": "Say at random"}], **body}


def check_cut_anywhere(door: Door, path: str, body: dict[str, Any], num_cuts: int, seed: int = 0) -> None:
    plain = door.events(path, body)
    whole = door.events(path, body, baton_token_ids=True)
    assert cut(whole) == cut(plain), "the flag adds only what can be cut out again"
    named = [i for i, event in enumerate(whole) if ids_of([event])]
    draw = random.Random(seed)
    for last in draw.sample(named[:-1], min(num_cuts, len(named) - 1)):
        given = ids_of(whole[: last + 1])
        rest = door.events(path, body, baton_token_ids=True, baton_output_token_ids=given)
        assert given + ids_of(rest) == ids_of(whole), (last, given)
        got, expected = merged(whole[: last + 1] + rest), merged(whole)
        assert got == expected, (last, given)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_cut_answer_is_that_of_one_engine(door: Door, path: str, name: str) -> None:
    check_cut_anywhere(door, path, request_of(path, name), 3, SEEDS[name])


def test_stop_strings_end_the_rest_where_they_end_the_whole(door: Door) -> None:
    """A stop string may begin in the part before the cut."""
    for path in (COMPLETIONS, CHAT):
        body = request_of(path, "seeded")
        text = merged(door.events(path, body))["text"]
        stops = [text[start : start + 6] for start in (10, 40)]
        for index, stop in enumerate(stops):
            for more in ({}, {"include_stop_str_in_output": True}, {"min_tokens": 12}):
                check_cut_anywhere(door, path, body | {"stop": stop} | more, 2, index)


def test_tokens_that_another_engine_cuts_at_any_place_make_the_same_text(door: Door) -> None:
    """Tokens without a chunk of their own, as parts of characters, are held back by the next engine too."""
    body = {"prompt": "x", "max_tokens": 30, "seed": 3, "temperature": 8.0, "ignore_eos": True}
    whole = door.events(COMPLETIONS, body, baton_token_ids=True)
    ids, held = ids_of(whole), 0
    for num_given in range(1, len(ids)):
        rest = door.events(COMPLETIONS, body, baton_output_token_ids=ids[:num_given])
        before = [event for i, event in enumerate(whole) if len(ids_of(whole[: i + 1])) <= num_given]
        held += len(ids_of(before)) < num_given
        assert merged(before)["text"] + merged(rest)["text"] == merged(whole)["text"]
        assert not ids_of(rest)
    assert held, "no token was without text"


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize(
    "scheduling",
    [
        {"max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 256, "enable_chunked_prefill": False},
        pytest.param(
            {"max_num_batched_tokens": 5, "is_parallel": True},
            marks=[pytest.mark.processes, pytest.mark.slow],
        ),
    ],
    ids=["chunks", "no chunks", "two ranks, two steps in flight"],
)
def test_however_the_given_tokens_are_computed(folder: Path, scheduling: dict[str, Any]) -> None:
    for door in door_of(folder, **scheduling):
        check_cut_anywhere(door, COMPLETIONS, request_of(COMPLETIONS, "penalties"), 3)


def test_a_preempted_continuation_goes_on_as_well(door: Door, folder: Path) -> None:
    bodies = [request_of(COMPLETIONS, "penalties") | {"seed": seed} for seed in range(6)]
    wholes = [door.events(COMPLETIONS, body, baton_token_ids=True) for body in bodies]

    async def ask(client: httpx.AsyncClient, body: dict[str, Any], ids: list[int]) -> list[bytes]:
        params = {"baton_token_ids": True, "baton_output_token_ids": ids}
        asked = {"stream": True, **body, "kv_transfer_params": params}
        return (await client.post(COMPLETIONS, json=asked)).content.split(b"\n\n")[:-2]

    for small in door_of(folder, 30):

        async def all_of_them(small: Door) -> list[list[bytes]]:
            async with small.client() as client:
                asked = [ask(client, b, ids_of(w[:9])) for b, w in zip(bodies, wholes, strict=True)]
                return await asyncio.gather(*asked)

        rests = asyncio.run(all_of_them(small))
        assert small.engine.num_preempted, "the pool is too large"
        for whole, rest in zip(wholes, rests, strict=True):
            assert merged(whole[:9] + rest) == merged(whole)


def test_the_engine_takes_hits_of_the_given_tokens_but_reports_those_of_the_prompt(door: Door) -> None:
    body = request_of(COMPLETIONS, "greedy") | {"prompt": list(range(100, 110))}
    ids = ids_of(door.events(COMPLETIONS, body, baton_token_ids=True))
    rest = door.events(COMPLETIONS, body, baton_output_token_ids=ids[:30])
    usage = json.loads(rest[-1].removeprefix(b"data: "))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 10, "all of it"
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (10, 40)


GIVEN = "kv_transfer_params.baton_output_token_ids"


@pytest.mark.parametrize(
    ("given", "body", "message"),
    [
        ([], {}, "at least one"),
        ("12", {}, "list of token ids"),
        ([1.0], {}, "list of token ids"),
        ([True], {}, "list of token ids"),
        ([5, 512], {}, "must be in [0, 512)"),
        ([5, -1], {}, "must be in [0, 512)"),
        ([5] * 9, {"max_tokens": 9}, "at most 9"),
        ([5] * 246, {"max_tokens": None}, "at most 16"),
        ([5], {"n": 2}, "one answer"),
        ([5], {"prompt": ["a", "b"]}, "one answer"),
        ([5], {"stream": False}, "stream"),
        ([5], {"echo": True}, "echo"),
        ([5, 7, 8], {"stop_token_ids": [7]}, "stop token 7"),
        ([300, 301, 302], {"stop": ["?"]}, "stop string"),
    ],
)
def test_tokens_that_cannot_be_continued_are_refused(
    door: Door, given: Any, body: dict[str, Any], message: str
) -> None:
    if body.get("stop") == ["?"]:
        tokenizer = door.service.tokenizer
        given = tokenizer.encode("what?no", add_special_tokens=False)
    asked = {"prompt": "a", "max_tokens": 20, **body, "kv_transfer_params": {"baton_output_token_ids": given}}
    answer = door.post(COMPLETIONS, asked)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(GIVEN)
    assert message in error["message"]


def test_the_end_token_is_refused_unless_it_did_not_end_the_answer(door: Door) -> None:
    (end, *_) = door.service.model_config.eos_token_ids

    def status(**body: Any) -> int:
        params = {"baton_output_token_ids": [5, end, 5]}
        return door.post(COMPLETIONS, {"prompt": "a", **body, "kv_transfer_params": params}).status_code

    assert status() == 400
    assert status(ignore_eos=True) == 200
    assert status(min_tokens=3) == 200, "it ends nothing before the third token"


def test_the_flags_are_bools_and_exclude_each_other(door: Door) -> None:
    def param(**params: Any) -> str:
        answer = door.post(COMPLETIONS, {"prompt": "a", "kv_transfer_params": params})
        assert answer.status_code == 400, answer.text
        return str(answer.json()["error"]["param"])

    assert param(baton_token_ids=1) == "kv_transfer_params.baton_token_ids"
    assert param(baton_output_token_ids=[5], baton_first_token=True) == GIVEN


def test_the_first_token_and_all_tokens_can_be_asked_for_together(door: Door) -> None:
    body = {"prompt": "x", "max_tokens": 30, "seed": 3, "temperature": 8.0, "ignore_eos": True}
    ids = ids_of(door.events(COMPLETIONS, body, baton_token_ids=True))
    both = door.events(COMPLETIONS, body, baton_token_ids=True, baton_first_token=True)
    assert ids_of(both[:1]) == ids[:1]
    assert ids_of(both) == ids


def test_what_the_client_asks_for_itself_stays_as_it_is(door: Door) -> None:
    body = request_of(COMPLETIONS, "as ids")
    first, second = door.events(COMPLETIONS, body), door.events(COMPLETIONS, body, baton_token_ids=True)
    assert [OWN.sub(b"", event) for event in first] == [OWN.sub(b"", event) for event in second]
