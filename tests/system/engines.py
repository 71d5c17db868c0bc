"""Real engines as child processes, with helpers for fault tests."""

import json
import random
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from baton.cli.processes import Child, Fleet, free_ports

SECRET = "5ecret-of-the-fault-tests-0123456789"
START_S = 240.0  # Four engines, two of them with Ray, on a busy machine.
WAIT_S = 60.0  # Only reached when something is wrong.
POLL_S = 0.02  # Pause between two polls, which leaves the processor to the engine.

# Short, so that bounds are reached soon, but long enough for a busy machine. The inequalities between them
# are checked when they are read.
TIMERS = {"ttl_s": 4.0, "round_trip_max_s": 1.0, "deadline_s": 8.0, "loan_max_s": 13.0}


def wait_until(
    is_so: Callable[[], object], what: Callable[[], object] = lambda: "", within_s: float = WAIT_S
) -> None:
    """Raises AssertionError with `what` after that time."""
    deadline_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline_s, what()
        time.sleep(POLL_S)


@dataclass
class Engine:
    name: str
    url: str
    child: Child
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=WAIT_S, trust_env=False))

    def complete(
        self,
        prompt: Sequence[int],
        params: dict[str, Any] | None = None,
        *,
        timeout_s: float = WAIT_S,
        **fields: Any,
    ) -> httpx.Response:
        body = {
            "prompt": list(prompt),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "max_tokens": 12,
            "kv_transfer_params": params,
            **fields,
        }
        return self.client.post(f"{self.url}/v1/completions", json=body, timeout=timeout_s)

    def prefill(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Run the prefill leg. Returns the params for the decode leg."""
        answer = self.complete(prompt, {"do_remote_decode": True}, max_tokens=1)
        assert answer.status_code == 200, answer.text
        params: dict[str, Any] = answer.json()["kv_transfer_params"]
        return params

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        text = self.client.get(f"{self.url}/metrics").raise_for_status().text
        samples = (s for family in text_string_to_metric_families(text) for s in family.samples)
        return sum(sample.value for sample in samples if sample.name == f"baton:{name}")

    def wait_metric(self, name: str, is_reached: Callable[[float], bool]) -> None:
        wait_until(
            lambda: is_reached(self.metric(name)), lambda: f"{self.name}: {name} is {self.metric(name)}"
        )

    def wait_at_rest(self) -> None:
        """Wait until I5 holds: nothing runs, nothing is lent, every block is free."""
        for name in (
            "num_requests_running",
            "num_requests_waiting",
            "num_requests_waiting_for_remote_kvs",
            "num_requests_delayed_free",
            "kv_cache_usage_perc",
        ):
            self.wait_metric(name, lambda value: value == 0)

    def wait_draining(self) -> None:
        wait_until(lambda: self.client.get(f"{self.url}/health").status_code != 200)
        health = self.client.get(f"{self.url}/health")
        assert health.status_code == 503
        assert health.json()["error"]["code"] == "draining"

    def processes(self) -> list[psutil.Process]:
        parent = psutil.Process(self.child.pid)
        return [parent, *parent.children(recursive=True)]

    def kill(self) -> None:
        """Kill the engine with SIGKILL, as the kernel does when memory is short."""
        for process in self.processes():
            process.kill()
        assert select.select([self.child], [], [], WAIT_S)[0], f"{self.name} outlives SIGKILL"

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the engine (SIGSTOP): alive and silent, as on a machine that swaps."""
        processes = self.processes()
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                if process.is_running():
                    process.resume()


class Waiting:
    """A request in the background."""

    def __init__(self, ask: Callable[[], httpx.Response]) -> None:
        self._answers: list[httpx.Response] = []
        self._ask = ask
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        with suppress(httpx.HTTPError):
            self._answers.append(self._ask())

    def answer(self, within_s: float = WAIT_S) -> httpx.Response:
        self.join(within_s)
        assert self._answers, f"no answer within {within_s:g} s"
        return self._answers[0]

    def join(self, within_s: float = WAIT_S) -> None:
        self._thread.join(within_s)


def tokens_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return token_ids


def make_prompt(seed: int, num_tokens: int = 150) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256, 500) for _ in range(num_tokens)]


class Engines:
    """Starts engines in one fleet, which forgets engines that a test has killed."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._engines: list[Engine] = []

    def close(self) -> None:
        for engine in self._engines:
            engine.client.close()

    def start(
        self,
        *plans: tuple[str, Path, dict[str, Any] | None],
        options: Mapping[str, Sequence[str]] | None = None,
    ) -> list[Engine]:
        """Each plan: name, model folder, fields of the KVTransferConfig. All start at once.

        `options`: further options of `baton serve`, by engine; they override those of all engines.
        """
        for child in [child for child in self._fleet.children if child.has_ended()]:
            self._fleet.forget(child)  # Killed by a test.
        engines = []
        ports = free_ports(len(plans))
        for (name, model, transfer), port in zip(plans, ports, strict=True):
            child = self._launch(name, model, transfer, port, (options or {}).get(name, ()))
            engines.append(Engine(name, f"http://127.0.0.1:{port}", child))
        self._engines += engines
        self._fleet.wait_ready({e.child: f"{e.url}/health" for e in engines}, timeout_s=START_S)
        return engines

    def _launch(
        self, name: str, model: Path, transfer: dict[str, Any] | None, port: int, options: Sequence[str]
    ) -> Child:
        command = [sys.executable, "-m", "baton.cli", "serve", str(model), "--port", str(port)]
        command += ["--block-size", "16", "--num-blocks", "256", "--max-model-len", "2048"]
        if transfer is not None:
            config = {"kv_connector": "BatonPullConnector", "engine_id": name, **transfer}
            command += ["--kv-transfer-config", json.dumps(config)]
        command += options
        return self._fleet.start(name, command, env={"BATON_SECRET": SECRET})
