"""First tokens from the prefill engine: a client gets the same answer as from one engine.

Real engines: one pair with two routers, one that pulls and one that pushes, and a single engine. At the end
the engines of the pair are killed.
"""

import io
import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from baton.cli.processes import Fleet, free_ports
from baton.cli.system import EngineArguments, HandoffArguments, plan_system, start_system
from tests.system.engines import make_prompt, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.usefixtures("forked_programs")]

START_S = 240.0
ANSWER_S = 60.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass
class Client:
    """Client of a router, or of a single engine."""

    url: str
    http: httpx.Client

    def ask(self, body: dict[str, Any], *, streams: bool) -> "Answer":
        path = CHAT if "messages" in body else COMPLETIONS
        if not streams:
            answer = self.http.post(self.url + path, json=body)
            assert answer.status_code == 200, answer.text
            return Answer([answer.json()], answer.json()["usage"], answer.headers)
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self.http.stream("POST", self.url + path, json=asked) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        chunks = [json.loads(line) for line in lines[:-1]]
        assert not any("error" in chunk for chunk in chunks), chunks
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        return Answer(chunks[:-1], chunks[-1]["usage"], answer.headers)

    def metric(self, name: str, **labels: str) -> float:
        text = self.http.get(f"{self.url}/metrics").text
        samples = (s for family in text_string_to_metric_families(text) for s in family.samples)
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


@dataclass
class Answer:
    """An answer, split into chunks for comparison with another."""

    chunks: list[dict[str, Any]]
    usage: dict[str, Any]
    headers: httpx.Headers

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk["choices"]]

    @property
    def text(self) -> str:
        return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in self.choices)


@dataclass
class System:
    push: Client
    pull: Client
    alone: Client
    prefill: Client  # The prefill engine of the pair.
    pids: dict[str, int]


@pytest.fixture(scope="module")
def system(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    plan = plan_system(
        EngineArguments(model, num_blocks=512),
        num_prefill=1,
        num_decode=1,
        num_single=1,
        handoff=HandoffArguments("push", "chunk"),
    )
    # The push connector also pulls.
    pull = replace(plan, handoff=HandoffArguments("pull"), router_port=free_ports(1)[0])
    with (
        Fleet(tmp_path_factory.mktemp("logs")) as fleet,
        httpx.Client(timeout=ANSWER_S, trust_env=False) as http,
    ):
        start_system(fleet, plan, timeout_s=START_S, console=Console(file=io.StringIO()))
        child = fleet.start("router-pull", pull.router_command())
        fleet.wait_ready({child: f"{pull.router_url}/health"}, timeout_s=START_S)
        engines = [engine.url for engine in (plan.single[0], plan.prefill[0])]
        clients = [Client(url, http) for url in (plan.router_url, pull.router_url, *engines)]
        for client in clients[:2]:
            wait_introduced(client)
        yield System(*clients, {child.name: child.pid for child in fleet.children})


def wait_introduced(router: Client) -> None:
    def names() -> list[bool]:
        engines = router.http.get(f"{router.url}/fleet").json()["engines"]
        return [engine["introduced"] for role in ("prefill", "decode") for engine in engines[role]]

    wait_until(lambda: all(names()), lambda: f"{router.url}: the engines are not introduced")


ARGUMENTS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["left", "right"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
# `tests/connectors/test_first_token_in_engines` has other ways to sample.
VARIANTS: dict[str, dict[str, Any]] = {
    "logprobs": {"temperature": 0, "logprobs": 3},
    "seeded": {"seed": 7, "temperature": 1.0, "return_token_ids": True, "frequency_penalty": 2.0},
    "echo": {"temperature": 0, "echo": True},
    "one token": {"temperature": 0, "max_tokens": 1},
    "schema": {
        "temperature": 0,
        "max_tokens": 40,
        "ignore_eos": False,
        "structured_outputs": {"json": ARGUMENTS, "disable_any_whitespace": True},
    },
    "regex": {
        "seed": 9,
        "temperature": 1.0,
        "ignore_eos": False,
        "max_tokens": 20,
        "structured_outputs": {"regex": "[a-f]{4,9}-[0-9]{3}"},
        "return_token_ids": True,
    },
    "calls": {
        "messages": [{"role": "user", "content": "Call something."}],
        "temperature": 0,
        "max_tokens": 60,
        "ignore_eos": False,
        "tools": [
            {"type": "function", "function": {"name": name, "parameters": ARGUMENTS}} for name in ("f", "g")
        ],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
    "a named call": {
        "messages": [{"role": "user", "content": "Call it."}],
        "temperature": 0,
        "max_tokens": 60,
        "ignore_eos": False,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": ARGUMENTS}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    },
    "chat logprobs": {
        "messages": [{"role": "user", "content": "Say something longer."}],
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    },
}


def body_of(name: str, salt: str) -> dict[str, Any]:
    """A request body. The salt prevents prefix hits between requests."""
    body = {"max_tokens": 8, "ignore_eos": True, "cache_salt": salt, **VARIANTS[name]}
    return body if "messages" in body else {"prompt": make_prompt(len(name), 100), **body}


def check_equal(got: Answer, expected: Answer) -> None:
    assert plain(got.choices) == pytest.approx(plain(expected.choices), abs=1e-3)
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert got.usage[count] == expected.usage[count]


def plain(value: Any, path: str = "") -> dict[str, float]:
    """Numbers of one level for approximate comparison. Values other than floats are part of the key."""
    if isinstance(value, float):
        return {path: value}
    if not isinstance(value, dict | list):
        return {f"{path}={value!r}": 0.0}
    items: Any = value.items() if isinstance(value, dict) else enumerate(value)
    found = {f"{path}#": float(len(value))}
    for key, item in items:
        if key == "id" and str(item).startswith("call_"):
            continue  # The id of a call is random.
        found |= plain(item, f"{path}/{key}")
    return found


@pytest.mark.timeout(START_S + ANSWER_S)
@pytest.mark.parametrize(
    ("mode", "streams"), [("push", False), ("pull", True)], ids=["push-whole", "pull-stream"]
)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_answer_is_one_engines(system: System, mode: str, name: str, streams: bool) -> None:
    router = getattr(system, mode)
    body = body_of(name, f"{mode} {streams}")
    expected = system.alone.ask(body, streams=streams)
    before = router.metric("baton:router_first_tokens_total", agreed="yes")
    got = router.ask(body, streams=streams)
    check_equal(got, expected)
    assert got.headers["x-baton-prefill"] == "remote"
    if mode == "pull":  # D may send the first token before P in push.
        num_compared = router.metric("baton:router_first_tokens_total", agreed="yes") - before
        assert num_compared == (1 if streams and name != "one token" else 0)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_unseeded_sampling_and_several_samples_work_as_well(system: System, mode: str) -> None:
    router = getattr(system, mode)
    body = {"prompt": make_prompt(79, 100), "max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    answer = router.ask({**body, "return_token_ids": True}, streams=True)
    assert sum(len(choice["token_ids"]) for choice in answer.choices) == 8
    seeded = {**body, "seed": 3, "n": 2, "return_token_ids": True, "cache_salt": mode}
    check_equal(router.ask(seeded, streams=False), system.alone.ask(seeded, streams=False))


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_cached_tokens_are_those_of_the_prefill_engine_too(system: System, mode: str, streams: bool) -> None:
    router = getattr(system, mode)
    salt = f"cached {mode} {streams}"
    body = {"prompt": make_prompt(80, 100), "max_tokens": 1, "cache_salt": salt, "ignore_eos": True}
    system.prefill.ask(body, streams=False)
    # 64 tokens as before: four blocks. The answer is so long that the router has read P's answer before its
    # end.
    asked = {**body, "prompt": make_prompt(80, 100)[:64] + make_prompt(81, 100)[64:], "max_tokens": 50}
    details = router.ask(asked, streams=streams).usage["prompt_tokens_details"]
    assert details["transferred_tokens"] > 64
    assert details["cached_tokens"] == 64


@pytest.mark.parametrize("name", ["schema", "regex"])
def test_a_constrained_answer_goes_on_after_any_of_its_tokens(system: System, name: str) -> None:
    """What a router asks of an engine after another one has died."""
    body = {**body_of(name, "goes on"), "return_token_ids": True}
    [whole] = system.alone.ask(body, streams=False).choices
    for num_given in range(1, len(whole["token_ids"]) - 1):
        given = {"baton_output_token_ids": whole["token_ids"][:num_given]}
        rest = system.alone.ask({**body, "kv_transfer_params": given}, streams=True)
        ids = [token_id for choice in rest.choices for token_id in choice.get("token_ids", ())]
        assert ids == whole["token_ids"][num_given:]
        assert whole["text"].endswith(rest.text)


def test_killed_engines_cost_a_broken_stream_or_a_502_but_never_a_hang(system: System) -> None:
    """The last test of this system. `test_up` kills a prefill engine alone."""
    routers = (system.push, system.pull)
    body = {"prompt": make_prompt(90, 100), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    long = {**body, "max_tokens": 3000, "stream": True}
    with ExitStack() as stack:
        streams = []
        for router in routers:
            url = f"{router.url}{COMPLETIONS}"
            lines = stack.enter_context(router.http.stream("POST", url, json=long)).iter_lines()
            streams.append(line.removeprefix("data: ") for line in lines if line)
            next(streams[-1])
        for name in ("prefill-0", "decode-0"):  # P would continue the answers of D.
            os.kill(system.pids[name], signal.SIGKILL)
        for events in streams:
            *_, error, last = events
            assert last == "[DONE]"
            assert json.loads(error)["error"]["type"] == "upstream_error"
    for router in routers:
        refused = router.http.post(f"{router.url}{COMPLETIONS}", json=body)
        assert refused.status_code in (502, 503)
        assert refused.json()["error"]["code"] == refused.status_code
        health = router.http.get(f"{router.url}/health")
        assert health.status_code in (200, 503)  # The status depends on the last probe.
