"""A real Prometheus on the loopback, and the queries of the deployment files."""

import json
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from baton.cli.processes import Fleet, free_ports

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboard.json"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
MISSING = "Prometheus is not installed; scripts/setup-services installs it as root on Debian"
START_S = 60.0
RATE_S, SCRAPE_MS = 10, 500
_LIMIT = re.compile(r" (?:==|>) [\d.]+$")


def is_installed() -> bool:
    return shutil.which("prometheus") is not None and shutil.which("promtool") is not None


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries_of_the_dashboard() -> list[str]:
    return [
        target["expr"].replace("$__rate_interval", f"{RATE_S}s")
        for panel in panels()
        for target in panel.get("targets", ())
    ]


def values_of_the_alerts() -> list[str]:
    """Queries whose values the alerts compare with their limits."""
    found = [_LIMIT.sub("", rule["expr"]) for rule in alerts()]
    assert all(value != rule["expr"] for value, rule in zip(found, alerts(), strict=True))
    return [re.sub(r"\[\d+m\]", f"[{RATE_S}s]", value) for value in found]


@dataclass
class Prometheus:
    url: str
    http: httpx.Client

    def series(self, query: str) -> list[Any]:
        answer = self.http.get(f"{self.url}/api/v1/query", params={"query": query})
        assert answer.status_code == 200, f"{query}: {answer.text}"
        found: list[Any] = answer.json()["data"]["result"]
        return found

    def get(self, path: str) -> Any:
        return self.http.get(f"{self.url}/api/v1/{path}").raise_for_status().json()["data"]


@contextmanager
def running_prometheus(
    fleet: Fleet, http: httpx.Client, folder: Path, router: str, engines: Sequence[str]
) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes often, with the rules of the deployment."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": f"{SCRAPE_MS}ms", "evaluation_interval": "1s"}
    config["rule_files"] = [str(ALERTS)]
    for job, urls in zip(config["scrape_configs"], ([router], engines), strict=True):
        job["static_configs"] = [{"targets": [url.removeprefix("http://") for url in urls]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    [port] = free_ports(1)
    command = ["prometheus", f"--config.file={folder / 'prometheus.yaml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    prometheus = Prometheus(f"http://127.0.0.1:{port}", http)
    child = fleet.start("prometheus", command)
    fleet.wait_ready({child: f"{prometheus.url}/-/ready"}, timeout_s=START_S)
    yield prometheus


def wait_series(prometheus: Prometheus, queries: Sequence[str], timeout_s: float) -> Iterator[list[str]]:
    """Queries without series, again and again until there are none."""
    left, deadline_s = list(queries), time.monotonic() + timeout_s
    while left := [query for query in left if not prometheus.series(query)]:
        assert time.monotonic() < deadline_s, "no series:\n" + "\n".join(left)
        yield left
        time.sleep(SCRAPE_MS / 1000)
