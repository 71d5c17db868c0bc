"""Requests of the benchmarks: answers of a fixed length, and prefills whose KV is not fetched."""

from collections.abc import Sequence
from typing import Any

import httpx

from baton.cli import asking
from baton.cli.asking import Answer, AskingError

__all__ = ["REQUEST_TIMEOUT_S", "Answer", "AskingError", "ask", "lend"]

REQUEST_TIMEOUT_S = 300.0  # A long prompt on a small machine.


def ask(client: httpx.Client, url: str, prompt: Sequence[int], *, max_tokens: int, **options: Any) -> Answer:
    """Send a request as `baton.cli.asking.ask`. Raises AskingError, also for an answer of another length."""
    answer = asking.ask(client, url, prompt, max_tokens=max_tokens, **options)
    if (count := len(answer.token_ids)) != max_tokens:
        raise AskingError(f"{url} gave {count} tokens instead of {max_tokens}")
    return answer


def lend(client: httpx.Client, url: str, prompt: Sequence[int], transfer_id: str) -> None:
    """Make a producer prefill and lend blocks that no consumer fetches. Raises AskingError."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    body = {"prompt": list(prompt), "max_tokens": 1, "temperature": 0, "kv_transfer_params": params}
    response = client.post(f"{url}/v1/completions", json=body)
    if response.status_code != 200 or not response.json().get("kv_transfer_params"):
        raise AskingError(f"{url} has lent no blocks: {response.status_code} {response.text[:500]}")
