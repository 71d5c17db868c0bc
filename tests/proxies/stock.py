"""A stock proxy for a pair of engines, as a process, and checks of the three together.

The checks are the same for `baton serve` and for vLLM with Baton's connectors; the caller starts the engines.
"""

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from baton.cli.processes import Fleet, free_ports
from tests.proxies.upstream import StockProxies

START_S = 120.0
WAIT_S = 60.0

Answer = Callable[[list[int]], list[int]]  # A single engine's tokens for a prompt.


@dataclass(frozen=True)
class Pair:
    """Two engines, and P's control address as in D's `allowed_peers`."""

    model: str
    p_port: int
    d_port: int
    p_engine_id: str
    p_control_host: str = "127.0.0.1"
    p_control_port: int = 0


@dataclass
class Proxy:
    url: str
    client: httpx.Client

    def complete(self, prompt: Sequence[int], **fields: Any) -> list[int]:
        answer = self.client.post(f"{self.url}/v1/completions", json=completion_of(prompt, **fields))
        assert answer.status_code == 200, answer.text
        choice = answer.json().get("choices", [None])[0]
        assert choice is not None, answer.text  # These proxies answer 200 for every answer of the engine.
        tokens: list[int] = choice["token_ids"]
        return tokens

    def refusal(self, prompt: Sequence[int]) -> dict[str, Any]:
        """The engine's error, which comes through as the body of a 200, or of nothing at all."""
        answer = self.client.post(f"{self.url}/v1/completions", json=completion_of(prompt))
        error: dict[str, Any] = answer.json()["error"]
        return error


def completion_of(prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    asked = {"prompt": list(prompt), "temperature": 0, "ignore_eos": True, "max_tokens": 12}
    return {**asked, "return_token_ids": True, **fields}


class ProxyStarter:
    """Starts proxies in a fleet, which stops them."""

    def __init__(self, fleet: Fleet, stock: StockProxies, client: httpx.Client) -> None:
        self._fleet = fleet
        self._stock = stock
        self._client = client

    def toy(self, pair: Pair) -> Proxy:
        """Pull: the proxy forwards the prefill leg's answer to the decode leg unchanged."""
        command = [str(self._stock.toy_proxy)]
        command += ["--prefiller-hosts", "127.0.0.1", "--prefiller-ports", str(pair.p_port)]
        command += ["--decoder-hosts", "127.0.0.1", "--decoder-ports", str(pair.d_port)]
        return self._start(command, "healthcheck")

    def push_demo(self, pair: Pair, **changes: Any) -> Proxy:
        """Push: both legs at once. The decode leg names P and its control address."""
        named = {"engine_id": pair.p_engine_id, "kv_host": pair.p_control_host, **changes}
        command = [str(self._stock.push_demo), "--model", pair.model]
        command += ["--prefill", f"127.0.0.1:{pair.p_port}", "--decode", f"127.0.0.1:{pair.d_port}"]
        command += ["--prefill-engine-id", named["engine_id"], "--prefill-kv-host", named["kv_host"]]
        command += ["--prefill-side-channel-port", str(pair.p_control_port)]
        return self._start(command, "status")

    def _start(self, command: list[str], health: str) -> Proxy:
        (port,) = free_ports(1)
        paths = [str(self._stock.site), *filter(None, [os.environ.get("PYTHONPATH")])]
        name = f"proxy-{port}"
        child = self._fleet.start(
            name,
            [sys.executable, *command, "--port", str(port)],
            env={"PYTHONPATH": os.pathsep.join(paths)},
        )
        url = f"http://127.0.0.1:{port}"
        self._fleet.wait_ready({child: f"{url}/{health}"}, timeout_s=START_S)
        return Proxy(url, self._client)


def check_tokens(proxy: Proxy, prompts: Sequence[Sequence[int]], answer: Answer, **fields: Any) -> None:
    """Send the prompts one after the other: the tokens are a single engine's."""
    for prompt in prompts:
        assert proxy.complete(prompt, **fields) == answer(prompt), f"a prompt of {len(prompt)} tokens"


def check_tokens_of_many(
    proxy: Proxy, prompts: Sequence[Sequence[int]], answer: Answer, **fields: Any
) -> None:
    """Send all prompts at once: the tokens are a single engine's."""
    expected = [answer(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        assert list(threads.map(lambda prompt: proxy.complete(prompt, **fields), prompts)) == expected
