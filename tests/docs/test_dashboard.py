"""The Grafana dashboard and the alert rules: metrics that exist, rules that fire."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.golden.golden import ROOT
from tests.system.prometheus import (
    ALERTS,
    DASHBOARD,
    DEPLOY,
    MISSING,
    alerts,
    is_installed,
    panels,
    queries_of_the_dashboard,
)

METRICS = ROOT / "tests" / "golden" / "texts" / "metrics.txt"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
needs_prometheus = pytest.mark.skipif(not is_installed(), reason=MISSING)


def known_series() -> set[str]:
    lines = [line.split()[:2] for line in METRICS.read_text().splitlines() if line.startswith("baton:")]
    return {name + suffix for name, kind in lines for suffix in SUFFIXES[kind]}


def test_dashboard_and_alerts_name_metrics_that_exist() -> None:
    queries = [*queries_of_the_dashboard(), *(rule["expr"] for rule in alerts())]
    named = {name for query in queries for name in re.findall(r"baton:\w+", query)}
    assert named - known_series() == set()


def test_panels_have_a_place_and_a_source_of_their_own() -> None:
    places = [tuple(panel["gridPos"].values()) for panel in panels()]
    assert len(set(places)) == len(places)
    for panel in panels():
        position = panel["gridPos"]
        assert position["x"] + position["w"] <= 24
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel.get("targets", ()))
    assert [panel["id"] for panel in panels()] == list(range(1, len(panels()) + 1))
    assert DASHBOARD.read_text().endswith("}\n")


@needs_prometheus
def test_promtool_accepts_the_rules_and_the_example_configuration() -> None:
    for check, path in (("rules", ALERTS), ("config", DEPLOY / "prometheus" / "prometheus.yaml")):
        done = subprocess.run(
            ["promtool", "check", check, "--lint=all", "--lint-fatal", str(path)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_alerts_fire_for_what_they_are_about_and_else_are_silent(tmp_path: Path) -> None:
    def series(name: str, values: str) -> dict[str, str]:
        return {"series": name, "values": values}

    bad = [
        series('baton:router_engine_up{role="decode",engine="http://d:1"}', "1x5 0x30"),
        series('baton:router_requests_total{status="500"}', "0+6x35"),
        series('baton:router_requests_total{status="200"}', "0+54x35"),
        series("baton:router_broken_streams_total", "0x5 1x30"),
        series('baton:kv_transfer_failures_total{reason="read failed"}', "0+6x35"),
        series("baton:kv_transfer_seconds_count", "0+54x35"),
        series('baton:kv_connector_retired{instance="d"}', "1x35"),
    ]
    good = [
        series('baton:router_engine_up{role="decode",engine="http://d:1"}', "1x35"),
        series('baton:router_requests_total{status="200"}', "0+60x35"),
        series("baton:router_broken_streams_total", "0x35"),
        series("baton:kv_transfer_seconds_count", "0+60x35"),
        series('baton:kv_connector_retired{instance="d"}', "0x35"),
    ]
    fired = {
        "BatonNoDecodeEngine",
        "BatonEngineDown",
        "BatonErrors",
        "BatonBrokenStreams",
        "BatonTransfersFail",
        "BatonConnectorRetired",
    }
    for given, expected in ((bad, fired), (good, set())):
        groups = [
            {
                "interval": "1m",
                "input_series": given,
                "promql_expr_test": [
                    {
                        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                        "eval_time": "14m",
                        "exp_samples": [
                            {"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(expected)
                        ],
                    }
                ],
            }
        ]
        path = tmp_path / "test.yaml"
        path.write_text(
            yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": groups})
        )
        done = subprocess.run(
            ["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
