"""`baton top`: frames of a real router's fleet, and its stream of events."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from baton.cli.top import frame, num_bytes, quantile, read_states, seconds
from baton.http.settings import HttpSettings
from tests.certificates import Authority
from tests.router.fakes import FakeEngine, answers, lends, system

KEY = "a-key-of-the-administrator"
STATE = {
    "version": "1",
    "mode": "pull",
    "policy": "cost",
    "models": ["m"],
    "updates": [{"model": "m", "weights": {"v1": 2, "v2": 1}}],
    "requests_per_s": 2.0,
    "refused_per_s": 0.0,
    "failed_per_s": 0.0,
    "in_flight": 3,
    "waiting": 0,
    "latencies": {
        "bounds_s": {"ttft": [0.1, 0.2], "itl": []},
        "columns": [{"unix_s": 10.0, "ttft": [2, 2, 0]}],
    },
    "engines": [
        {
            "type": "decode",
            "url": "http://d:1",
            "state": "up",
            "weights": "v1",
            "in_flight": 1,
            "queued_tokens": 0,
            "prefill_tokens_per_s": None,
            "step_s": 0.02,
            "metrics": {"gpu_usage": 0.5, "hit_rate": None},
        }
    ],
    "pairs": [
        {
            "prefill": "http://[red]p:1",
            "decode": "http://d:1",
            "bytes_per_s": 2.5e6,
            "wire_ms": 4.0,
            "handoffs_per_s": 1.0,
            "handed_over": 9,
            "usable": True,
            "reason": None,
        }
    ],
    "events": [
        {
            "number": 1,
            "last_unix_s": 1.0,
            "kind": "down",
            "engine": "http://d:1",
            "why": "[bold]x[/]",
            "count": 3,
        }
    ],
}


def text_of(shown: object) -> str:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(shown)
    return console.export_text()


def test_a_frame_has_engines_flows_latencies_and_events_as_text() -> None:
    shown = text_of(frame(STATE))
    for wanted in (
        "d:1",
        "50 %",
        "20.0 ms/tok",
        "[red]p:1 → d:1",
        "2.5 MB/s",
        "4.0 ms",
        "TTFT p50 100.0 ms",
        "v1 on 2, v2 on 1",
    ):
        assert wanted in shown
    assert "[bold]x[/] (3 times)" in shown


def test_quantiles_lie_in_their_buckets() -> None:
    latencies = STATE["latencies"]
    assert isinstance(latencies, dict)
    assert quantile(latencies, "ttft", 0.5) == pytest.approx(0.1)
    assert quantile(latencies, "ttft", 0.75) == pytest.approx(0.15)
    assert quantile(latencies, "itl", 0.5) is None
    assert (seconds(None), seconds(2.0), num_bytes(12.0)) == ("–", "2.00 s", "12 B")


def test_a_later_state_keeps_the_columns_and_events_before_it() -> None:
    later = {**STATE, "events": [], "latencies": {"bounds_s": {}, "columns": [{"unix_s": 20.0}]}}
    lines = ["event: snapshot", f"data: {json.dumps(STATE)}", "", ": no answer"]
    lines += ["event: latest", f"data: {json.dumps(later)}", "event: end", "data: {}"]
    first, second = read_states(iter(lines))
    assert len(first["events"]) == len(second["events"]) == 1
    assert [column["unix_s"] for column in second["latencies"]["columns"]] == [10.0, 20.0]


async def top(*arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baton.cli", "top", "--once", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_once_prints_a_frame_of_a_router_that_needs_a_key_and_has_tls(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    doors = HttpSettings(api_keys=(KEY,), idle_s=1e4, header_s=1e4)
    authority, engine = Authority(tmp_path, "ours"), FakeEngine(answers)
    tls = authority.issue("127.0.0.1")
    async with system([FakeEngine(lends)], [engine], doors=doors, tls=tls) as s:
        url = str(s.client.base_url).replace("http://", "https://")
        status, out, _ = await top(url, "--api-key-file", str(tmp_path / "key"), "--ca", authority.ca)
        assert status == 0
        assert engine.url.removeprefix("http://") in out
        status, _, err = await top(url, "--ca", authority.ca)
        assert status == 1
        assert "401" in err
