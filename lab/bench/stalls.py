"""Stalls: the longest gap in a stream of tokens while another client attacks (`make bench ARGS=stalls`).

A prefill engine, a decode engine and a router with a small model run on this machine. One stream of tokens
comes from the decode engine, another through the router. Each attack is sent to the same server as the
stream. The goal is the longest gap of the control run plus 50 ms.
"""

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console

from baton.checkpoints.random_model import write_checkpoint
from baton.cli.processes import Fleet
from baton.cli.system import EngineArguments, plan_system, start_system

START_TIMEOUT_S = 300.0
CONTROL_S = 5.0
BEFORE_S = 0.3  # Time of each stream before and after the attack.
GOAL_S = 0.05
MAX_POSITION = 4096
JSON = {"Content-Type": "application/json"}
MIB = 1 << 20
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


class Attack(NamedTuple):
    path: str
    body: Callable[[], bytes]
    allowed: tuple[int, ...]  # HTTP statuses.


def chat(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({**CHAT, **{name: value() for name, value in fields.items()}}).encode()


def completion(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"max_tokens": 1, **{name: value() for name, value in fields.items()}}).encode()


ATTACKS = {
    "4 MB in a template variable": Attack(
        "/v1/chat/completions", chat(chat_template_kwargs=lambda: {"bos_token": "x" * 4_000_000}), (200,)
    ),
    "12 MB in a template variable": Attack(
        "/v1/chat/completions", chat(chat_template_kwargs=lambda: {"bos_token": "x" * 12_000_000}), (200,)
    ),
    "8 MB in a role": Attack(
        "/v1/chat/completions", chat(messages=lambda: [{"role": "x" * 8_000_000, "content": "a"}]), (400,)
    ),
    "1,024 prompts of 12 kB": Attack(
        "/v1/completions", completion(prompt=lambda: ["x " * 6_000] * 1024), (400,)
    ),
    "8 MiB of token ids": Attack(
        "/v1/completions", completion(prompt=lambda: [1000] * (8 * MIB // 6)), (400,)
    ),
    "2^20 token ids": Attack("/v1/completions", completion(prompt=lambda: [1000] * (1 << 20)), (400,)),
    "400,000 keys": Attack(
        "/v1/completions",
        completion(prompt=lambda: "a", kv_transfer_params=lambda: {str(n): 1 for n in range(400_000)}),
        (400,),
    ),
    "400,000 keys at the top": Attack(
        "/v1/completions", lambda: json.dumps({str(n): 1 for n in range(400_000)}).encode(), (400,)
    ),
    "9 MB of {}": Attack("/v1/completions", lambda: b'{"x":[' + b"{}," * 3_000_000 + b"{}]}", (400,)),
    "4 MB of {}": Attack("/v1/completions", lambda: b'{"x":[' + b"{}," * 1_300_000 + b"{}]}", (400,)),
    "250 kB of {}": Attack(
        "/v1/completions", lambda: b'{"prompt":"a","x":[' + b"{}," * 80_000 + b"{}]}", (200, 400)
    ),
    "4 M ids to decode": Attack("/detokenize", lambda: b'{"tokens":[' + b"7," * 4_000_000 + b"7]}", (400,)),
    "2^20 ids to decode": Attack(
        "/detokenize", lambda: b'{"tokens":[' + b"77," * (MIB - 1) + b"77]}", (200,)
    ),
    "nested 990 deep": Attack("/v1/completions", lambda: b'{"a":' * 990 + b"1" + b"}" * 990, (400,)),
}


class _Stream:
    """Reads one stream of tokens after the other, and measures the longest gap between chunks."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_stopped = threading.Event()
        self._lock = threading.Lock()
        self._longest_s = 0.0
        self._thread = threading.Thread(target=self._run)

    def longest_s(self) -> float:
        """Return the longest gap since the last call."""
        with self._lock:
            longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s

    def _run(self) -> None:
        body = {"prompt": "Hello", "max_tokens": MAX_POSITION - 64, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=self._url, timeout=START_TIMEOUT_S, trust_env=False) as client:
            while not self._is_stopped.is_set():
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    last_s = None
                    for _ in answer.iter_raw():
                        now_s = time.monotonic()
                        with self._lock:
                            self._longest_s = max(self._longest_s, now_s - (last_s or now_s))
                        last_s = now_s
                        if self._is_stopped.is_set():
                            return

    @contextmanager
    def running(self) -> Iterator["_Stream"]:
        self._thread.start()
        try:
            yield self
        finally:
            self._is_stopped.set()
            self._thread.join()


def _attack(url: str, attack: Attack, stream: _Stream) -> tuple[int, float, float]:
    """Return the status, the attack's own seconds, and the longest gap of the stream meanwhile."""
    body = attack.body()
    time.sleep(BEFORE_S)
    stream.longest_s()
    began_s = time.monotonic()
    with httpx.Client(base_url=url, timeout=START_TIMEOUT_S, trust_env=False) as client:
        status = client.post(attack.path, content=body, headers=JSON).status_code
    took_s = time.monotonic() - began_s
    time.sleep(BEFORE_S)
    return status, took_s, stream.longest_s()


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="baton-bench-stalls-") as folder:
        model = write_checkpoint(Path(folder) / "model", max_position=MAX_POSITION)
        plan = plan_system(EngineArguments(model, num_blocks=2048), num_prefill=1, num_decode=1)
        with Fleet(Path(folder)) as fleet:
            start_system(fleet, plan, timeout_s=START_TIMEOUT_S, console=Console(stderr=True))
            targets = {"engine": plan.decode[0].url, "router": plan.router_url}
            print(
                f"{'attack':32} {'target':8} {'status':>6} {'took':>9} {'longest':>12} {'beyond control':>15}"
            )
            is_good = True
            for target, url in targets.items():
                with _Stream(url).running() as stream:
                    time.sleep(CONTROL_S)  # The first chunks wait for the model.
                    stream.longest_s()
                    time.sleep(CONTROL_S)
                    control_s = stream.longest_s()
                    print(f"{'(control)':32} {target:8} {'':6} {CONTROL_S:7.2f} s {control_s * 1e3:9.1f} ms")
                    for name, attack in ATTACKS.items():
                        status, took_s, gap_s = _attack(url, attack, stream)
                        beyond_s = gap_s - control_s
                        is_good &= beyond_s <= GOAL_S
                        print(
                            f"{name:32} {target:8} {status:6} {took_s:7.2f} s {gap_s * 1e3:9.1f} ms "
                            f"{beyond_s * 1e3:12.1f} ms",
                            flush=True,
                        )
    print(
        f"goal: no gap beyond the control run's plus {GOAL_S * 1e3:.0f} ms: {'met' if is_good else 'MISSED'}"
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
