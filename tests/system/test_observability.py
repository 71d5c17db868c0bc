"""One request of a real router and two real engines, as an operator sees it: spans, pages, log."""

import io
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from baton.cli.processes import Fleet
from baton.cli.system import EngineArguments, HandoffArguments, SystemPlan, plan_system, start_system
from tests.system.collector import Collector
from tests.system.engines import POLL_S, wait_until
from tests.system.prometheus import (
    MISSING,
    is_installed,
    queries_of_the_dashboard,
    running_prometheus,
    values_of_the_alerts,
    wait_series,
)

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.usefixtures("forked_programs")]

START_S = 240.0
WAIT_S = 60.0
SECRET_WORD = 301  # A token id of the prompt that may stand nowhere in a row with its neighbours.
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass
class Observed:
    plan: SystemPlan
    http: httpx.Client
    collector: Collector
    access_log: Path
    fleet: Fleet


@pytest.fixture(scope="module")
def observed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    folder = tmp_path_factory.mktemp("logs")
    plan = plan_system(
        EngineArguments(model, num_blocks=512, served_model_name="small"),
        num_prefill=1,
        num_decode=1,
        handoff=HandoffArguments("pull"),
    )
    with Collector() as collector:
        env = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "BATON_ROUTE_ACCESS_LOG": str(folder / "access.jsonl"),
        }
        with (
            Fleet(folder, env={**os.environ, **env}) as fleet,
            httpx.Client(timeout=WAIT_S, trust_env=False) as http,
        ):
            start_system(fleet, plan, timeout_s=START_S, console=Console(file=io.StringIO()))
            yield Observed(plan, http, collector, folder / "access.jsonl", fleet)


def ask(observed: Observed, request_id: str, *, sampled: bool = True, **fields: Any) -> None:
    body = {
        "model": "small",
        "prompt": [SECRET_WORD] * 100 + [ord(char) for char in request_id],
        "max_tokens": 8,
        "ignore_eos": True,
        "stream": True,
        **fields,
    }
    headers = {"X-Request-Id": request_id, "traceparent": f"00-{TRACE}-{CALLER}-{'01' if sampled else '00'}"}
    url = f"{observed.plan.router_url}/v1/completions"
    answer = observed.http.post(url, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-baton-prefill"] == "remote"


SPANS = """\
POST /v1/completions            baton-router
  prefill                       baton-router
    llm_request                 baton-engine
      admission                 baton-engine
      queue                     baton-engine
      prefill                   baton-engine
      kv_loan                   baton-engine
  decode                        baton-router
    llm_request                 baton-engine
      admission                 baton-engine
      kv_fetch                  baton-engine
        handshake               baton-engine
        post                    baton-engine
        wire                    baton-engine
        verify                  baton-engine
      queue                     baton-engine
      install                   baton-engine
      decode                    baton-engine
"""


def test_one_request_is_one_tree_of_spans_through_router_p_d_and_connector(observed: Observed) -> None:
    ask(observed, "traced")
    root = observed.collector.wait_tree(CALLER, num_spans=len(SPANS.splitlines()), timeout_s=WAIT_S)
    print("\n".join(root.lines()))
    assert sorted(root.names()) == sorted(SPANS.splitlines())
    assert {node.trace_id for node in root.all()} == {TRACE}
    by_path = {node.path: node for node in root.all()}
    top = by_path["POST /v1/completions"]
    assert top.attributes["gen_ai.request.model"] == "small"
    assert top.attributes["llm_d.pd_proxy.disaggregation_used"] is True
    assert top.attributes["gen_ai.usage.output_tokens"] == 8
    assert [event for event in top.events if event == "first_byte"]
    engine = by_path["POST /v1/completions/decode/llm_request"]
    assert engine.attributes["gen_ai.usage.completion_tokens"] >= 7  # P may have given the first token.
    assert engine.attributes["kv_transfer.loaded_tokens"] > 0
    fetch = by_path["POST /v1/completions/decode/llm_request/kv_fetch"]
    assert fetch.attributes["kv_transfer.bytes"] > 0
    for node in root.all():
        assert node.start_s <= node.end_s, node.name
    for parent, child in ((engine, fetch), (top, engine)):
        assert parent.start_s <= child.start_s <= child.end_s <= parent.end_s
    # The word must not occur as a number of its own; a time may have the same digits.
    attributes = json.dumps([node.attributes for node in root.all()])
    assert not re.search(rf"(?<![\d.]){SECRET_WORD}(?![\d.])", attributes)


def test_a_request_that_its_caller_does_not_sample_leaves_no_span(observed: Observed) -> None:
    observed.collector.clear()
    ask(observed, "unsampled", sampled=False)
    ask(observed, "sampled-afterwards", sampled=True)
    observed.collector.wait_tree(CALLER, num_spans=len(SPANS.splitlines()), timeout_s=WAIT_S)
    assert {
        node.attributes["gen_ai.request.id"]
        for node in observed.collector.spans()
        if "gen_ai.request.id" in node.attributes
    } == {"sampled-afterwards"}


def test_the_routers_page_joins_what_all_engines_report(observed: Observed) -> None:
    ask(observed, "shown")
    url = f"{observed.plan.router_url}/requests/shown"
    deadline_s = time.monotonic() + WAIT_S
    while True:  # The loan may end, and P hear of it, after the answer.
        page = observed.http.get(url).json()
        d, p = (engine["timelines"] for engine in page["engines"])
        if p[0]["loan"] is not None:
            break
        assert time.monotonic() < deadline_s, page
        time.sleep(POLL_S)
    assert [leg["role"] for leg in page["request"]["legs"]] == ["prefill", "decode"]
    assert p[0]["loan"]["outcome"] == "released"
    fetch = d[0]["fetch"]
    assert fetch["outcome"] == "delivered"
    in_order = [fetch[f"{name}_s"] for name in ("claimed", "ready", "started", "read", "ended")]
    assert in_order == sorted(in_order)
    assert fetch["ended_s"] <= d[0]["scheduled_s"] <= d[0]["ended_s"]
    assert fetch["ended_s"] <= d[0]["first_token_s"] <= d[0]["last_token_s"]
    assert page["request"]["legs"][1]["loaded_tokens"] == d[0]["loaded_tokens"] == fetch["tokens"]


def test_the_access_log_has_a_line_for_each_request_without_its_prompt(observed: Observed) -> None:
    ask(observed, "logged")
    line_of = re.compile(r'^\{"id":"logged",.*\}$', re.MULTILINE)
    wait_until(lambda: line_of.search(observed.access_log.read_text()))
    [line] = map(json.loads, line_of.findall(observed.access_log.read_text()))
    assert (line["status"], line["prefill"], line["output_tokens"]) == (200, "remote", 8)
    assert f"{SECRET_WORD},{SECRET_WORD}" not in observed.access_log.read_text()


@pytest.mark.skipif(not is_installed(), reason=MISSING)
def test_every_query_of_dashboard_and_alerts_returns_series_from_a_real_prometheus(
    observed: Observed, tmp_path: Path
) -> None:
    engines = [engine.url for engine in observed.plan.engines]
    router, fleet, http = observed.plan.router_url, observed.fleet, observed.http
    queries = queries_of_the_dashboard() + values_of_the_alerts()
    with running_prometheus(fleet, http, tmp_path, router, engines) as prometheus:
        for number, _ in enumerate(wait_series(prometheus, queries, WAIT_S)):
            ask(observed, f"load-{number}")
        targets = prometheus.get("targets")["activeTargets"]
        assert {(one["labels"]["job"], one["health"]) for one in targets} == {
            ("baton-router", "up"),
            ("baton-engines", "up"),
        }
        assert len(targets) == 3
        rules = prometheus.get("rules")["groups"][0]["rules"]
        assert {(rule["health"], rule["state"]) for rule in rules} <= {
            ("ok", "inactive"),
            ("unknown", "inactive"),
        }
