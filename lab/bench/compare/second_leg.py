"""Cost of a handoff for the decode engine: its leg of a request compared with the same prompt in its cache.

    leg 1    P computes the prompt and lends it                          not timed
    leg 2    D gets the prompt and P's params: first token after ...     timed
    cached   D gets the prompt again, and has all of its blocks          timed, and subtracted

vLLM recomputes at least the last token of a cached prompt, and every incomplete block. So the lengths are one
more than a multiple of its block size: the cached prompt costs one token, as the handoff does.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from lab.bench.compare.journal import Journal
from lab.bench.compare.load import MODEL_NAME
from lab.bench.compare.running import RunningSystem, resumed
from lab.bench.handoff.asking import Answer, AskingError, ask

LENGTHS = (129, 513, 1921, 3841)
ANSWER_TOKENS = 6
FIRST_ORDINARY_TOKEN = 300


@dataclass(frozen=True, slots=True)
class Prompts:
    random: random.Random
    vocab_size: int

    def of(self, num_tokens: int) -> list[int]:
        return [self.random.randrange(FIRST_ORDINARY_TOKEN, self.vocab_size - 8) for _ in range(num_tokens)]


def prefill(client: httpx.Client, url: str, prompt: Sequence[int]) -> dict[str, Any]:
    """Send leg 1 as vLLM's proxies do; return the params of P's answer. Raises AskingError."""
    wanted = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    body = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": wanted,
    }
    try:
        response = client.post(f"{url}/v1/completions", json=body)
    except httpx.HTTPError as error:
        raise AskingError(f"{url} did not answer: {type(error).__name__}: {error}") from error
    params = response.json().get("kv_transfer_params") if response.status_code == 200 else None
    if not isinstance(params, dict):
        raise AskingError(f"{url} has lent no blocks: {response.status_code} {response.text[:300]}")
    return params


def measure(
    system: RunningSystem,
    client: httpx.Client,
    journal: Journal,
    prompts: Prompts,
    number: int,
    lengths: Sequence[int],
    kv_bytes_per_token: int,
) -> None:
    """Measure one round. Differing answers are recorded. Raises AskingError."""
    decode = system.engine_url("decode")
    with resumed(system):
        for num_tokens in lengths:
            prompt = prompts.of(num_tokens)
            params = prefill(client, system.engine_url("prefill"), prompt)
            before_s = system.cpu_s()
            handed = ask(client, decode, prompt, max_tokens=ANSWER_TOKENS, kv_transfer_params=params)
            between_s = system.cpu_s()
            cached = ask(client, decode, prompt, max_tokens=ANSWER_TOKENS)
            after_s = system.cpu_s()
            more_cpu_s = (between_s - before_s) - (after_s - between_s)
            gigabytes = num_tokens * kv_bytes_per_token / 1e9
            _write(journal, system.system.name, num_tokens, number, handed, cached, more_cpu_s, gigabytes)


def _write(
    journal: Journal,
    system: str,
    num_tokens: int,
    number: int,
    handed: Answer,
    cached: Answer,
    more_cpu_s: float,
    gigabytes: float,
) -> None:
    def write(metric: str, *values: float) -> None:
        journal.samples("b", f"{num_tokens} tokens", system, metric, number, values)

    more_s = handed.first_token_s - cached.first_token_s
    write("leg_s", handed.first_token_s)
    write("cached_s", cached.first_token_s)
    write("more_cpu_s", more_cpu_s)
    write("cpu_s_per_gb", more_cpu_s / gigabytes)
    if more_s > 0:  # The cached prompt may be slower in a noisy round.
        write("gb_per_s", gigabytes / more_s)
    write("differing_answers", float(handed.token_ids != cached.token_ids))
