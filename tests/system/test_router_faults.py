"""Killed engines of a router: requests continue, or end with a clear error."""

import io
import json
import os
import signal
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from baton.cli.processes import Fleet
from baton.cli.system import EngineArguments, HandoffArguments, plan_system, start_system

pytestmark = [pytest.mark.processes, pytest.mark.slow]

START_S = 240.0
ANSWER_S = 60.0
PROMPT = list(range(300, 500))


@pytest.mark.timeout(START_S + 4 * ANSWER_S)
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_killed_engines_cost_a_local_prefill_a_broken_stream_or_a_502_but_never_a_hang(
    small_model: Path, tmp_path: Path, mode: str
) -> None:
    plan = plan_system(
        EngineArguments(small_model, num_blocks=512),
        num_prefill=1,
        num_decode=1,
        handoff=HandoffArguments(mode),
    )
    with (
        Fleet(tmp_path) as fleet,
        httpx.Client(base_url=plan.router_url, timeout=ANSWER_S, trust_env=False) as client,
    ):
        start_system(fleet, plan, timeout_s=START_S, console=Console(file=io.StringIO()))
        pids = {child.name: child.pid for child in fleet.children}
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}

        handed_over = client.post("/v1/completions", json=body)
        assert handed_over.headers["x-baton-prefill"] == "remote"
        details = handed_over.json()["usage"]["prompt_tokens_details"]
        assert details["transferred_tokens"] > 0
        assert details["cached_tokens"] == 0, "no engine had any of it"
        (pair,) = client.get("/fleet").json()["pairs"]
        assert (pair["usable"], pair["handed_over"], pair["computed"]) == (True, 1, 0)

        os.kill(pids["prefill-0"], signal.SIGKILL)
        # Another salt: nothing of the prompt is in the decode engine's cache.
        alone = client.post("/v1/completions", json={**body, "cache_salt": "alone"})
        assert alone.status_code == 200
        assert alone.headers["x-baton-prefill"] == "local"
        assert alone.json()["choices"][0]["text"] == handed_over.json()["choices"][0]["text"]

        long = {**body, "max_tokens": 3000, "stream": True}
        events = []
        with client.stream("POST", "/v1/completions", json=long) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: "))
                if len(events) == 2:
                    os.kill(pids["decode-0"], signal.SIGKILL)
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["type"] == "upstream_error"

        refused = client.post("/v1/completions", json=body)
        assert refused.status_code in (502, 503)
        assert refused.json()["error"]["code"] == refused.status_code
        assert client.get("/health").status_code in (200, 503)  # The status depends on the last probe.
