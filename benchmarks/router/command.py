"""The router beside other routers (`make bench ARGS=router`): processor time, rates, added latency, memory.

A fast fake engine for each role (`engine`), one client process (`load`), and one router after the other in
front of them, in rounds, so that a change of the machine's speed meets all of them. Two legs a request.

    whole       answers that are not streamed
    16 chunks   each one written in a turn of the event loop of its own
    256 chunks  4 ms apart
    pauses      16 chunks; each client waits 0 to 40 ms before it asks again, so no router is always busy

Processor time is that of all processes of the router, from the kernel's accounts. Added latency is the
router's percentile minus that of a client that sends both legs itself. With `MANY` whole answers the memory
of each router is compared with that after a tenth of them (the toy proxy is left out: it takes minutes).
"without resumes" is `baton route --resumes 0`: it does not ask engines for token ids, so it cannot
continue a broken stream. "traces of 1 %" samples that share of the requests; the prefill engine is the
collector. "access log" writes to /dev/null. Both are measured with whole answers and 16 chunks only. Peers
live in .venv-peers (scripts/setup-peers); a peer that is missing there is skipped. The results go to
docs/benchmarks/router.json and router.png.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from baton.cli.processes import Fleet, free_ports
from benchmarks.compare.environment import stock_proxies_folder
from benchmarks.router.jobs import Job, Result

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".venv-peers"
START_TIMEOUT_S = 60.0
ROUNDS = 3
NUM_AT_ONCE = 8
NUM_IDLE = 1_000
MANY = 100_000
RESULTS = ROOT / "docs" / "benchmarks" / "router.json"
PROMPT = "word " * 1_024  # About 5 kB, as a prompt of 1,024 tokens.


class Workload(NamedTuple):
    num_requests: int
    num_chunks: int  # 0: the answer is not streamed.
    gap_ms: int = 0
    pause_s: float = 0.0

    def body(self) -> str:
        fields = {"model": "fake", "prompt": PROMPT, "max_tokens": self.num_chunks or 16}
        if self.num_chunks:
            fields |= {"stream": True, "user": f"gap {self.gap_ms}" if self.gap_ms else ""}
        return json.dumps(fields)


WORKLOADS = {
    "whole": Workload(1_000, 0),
    "16 chunks": Workload(600, 16),
    "256 chunks": Workload(64, 256, gap_ms=4),
    "pauses": Workload(1_000, 16, pause_s=0.04),
}


NO_ENV: Mapping[str, str] = {}
VARIED = ("whole", "16 chunks")


class Router(NamedTuple):
    command: str  # `{port}`, `{prefill}` and `{decode}` are ports.
    health: str
    site: Path | None = None  # More packages for it.
    env: Mapping[str, str] = NO_ENV
    is_variant: bool = False  # Measured with the workloads of VARIED only.

    @property
    def is_installed(self) -> bool:
        return all(Path(part).exists() for part in self.command.split()[:2] if part.startswith("/"))


DIRECT = "direct"  # The client sends both legs itself.
PROXIES = stock_proxies_folder() or ROOT / "no-proxies"
OWN = (
    f"{sys.executable} -m baton.cli route --port {{port}} --policy round_robin"
    " --prefill http://127.0.0.1:{prefill} --decode http://127.0.0.1:{decode}"
)
TRACED = OWN + " --otlp-traces-endpoint http://127.0.0.1:{prefill}/v1/traces"


def traced(share: str) -> Router:
    sampler = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": share}
    return Router(TRACED, "health", env=sampler, is_variant=True)


ROUTERS = {
    "baton route": Router(OWN, "health"),
    "without resumes": Router(f"{OWN} --resumes 0", "health"),
    "traces of 1 %": traced("0.01"),
    "traces of 100 %": traced("1"),
    "access log": Router(f"{OWN} --access-log {os.devnull}", "health", is_variant=True),
    "vllm-router": Router(
        f"{PEERS}/bin/vllm-router --vllm-pd-disaggregation --port {{port}} --policy round_robin"
        " --prefill http://127.0.0.1:{prefill} --decode http://127.0.0.1:{decode} --log-level error",
        "health",
    ),
    "toy proxy": Router(
        f"{sys.executable} {PROXIES}/toy_proxy.py --port {{port}} --prefiller-hosts 127.0.0.1"
        " --prefiller-ports {prefill} --decoder-hosts 127.0.0.1 --decoder-ports {decode}",
        "healthcheck",
        PROXIES / "site",
    ),
}


class Measured(NamedTuple):
    cpu_us: float  # Of the router, per request.
    rate: float  # Requests per second.
    median_ms: float  # To the first byte of the answer's body.
    p99_ms: float
    num_bad: int


class Client:
    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.router.load"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
        )

    def start(self, job: Job) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(job).decode() + "\n")
        self._process.stdin.flush()

    def line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the client ended with exit status {self._process.wait()}")
        return line

    def run(self, job: Job) -> Result:
        self.start(job)
        return msgspec.json.decode(self.line(), type=Result)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def processes_of(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def cpu_s(pid: int) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes_of(pid))


def rss_mib(pid: int) -> float:
    return float(sum(process.memory_info().rss for process in processes_of(pid))) / 2**20


def measure(client: Client, workload: Workload, port: int, *, decode: int = 0, pid: int = 0) -> Measured:
    num_events = workload.num_chunks + 1 if workload.num_chunks else 0
    job = Job(
        port,
        workload.body(),
        workload.num_requests,
        NUM_AT_ONCE,
        num_events,
        decode_port=decode,
        pause_s=workload.pause_s,
    )
    client.run(msgspec.structs.replace(job, num_requests=NUM_AT_ONCE * 4))  # Warm: connections, caches.
    before_s = cpu_s(pid) if pid else 0.0
    result = client.run(job)
    spent_s = cpu_s(pid) - before_s if pid else 0.0
    cuts_s = statistics.quantiles(result.first_s, n=100)
    return Measured(
        spent_s / workload.num_requests * 1e6,
        workload.num_requests / result.wall_s,
        cuts_s[49] * 1e3,
        cuts_s[98] * 1e3,
        result.num_bad,
    )


def idle_mib(client: Client, port: int, pid: int) -> float:
    """Return the MiB that `NUM_IDLE` open streams take, all processes of the router together."""
    fields = {"model": "fake", "prompt": "a", "max_tokens": 16, "stream": True, "user": "hold"}
    before = rss_mib(pid)
    client.start(Job(port, json.dumps(fields), 0, NUM_IDLE, 0, hold_s=1.0))
    assert client.line() == "holding\n"
    taken = rss_mib(pid) - before
    if num_bad := msgspec.json.decode(client.line(), type=Result).num_bad:
        raise RuntimeError(f"{num_bad} of {NUM_IDLE} streams did not begin")
    return taken


def growth_mib(client: Client, port: int, pid: int) -> float:
    """Return by how much the memory grows between a tenth of MANY whole answers and all of them."""
    workload = WORKLOADS["whole"]
    job = Job(port, workload.body(), MANY // 10, NUM_AT_ONCE, 0)
    client.run(job)
    before = rss_mib(pid)
    if num_bad := sum(client.run(job).num_bad for _ in range(9)):
        raise RuntimeError(f"{num_bad} bad answers")
    return rss_mib(pid) - before


@contextlib.contextmanager
def running(logs: Path) -> Iterator[tuple[dict[str, tuple[int, int]], int, int]]:
    """Start engines and routers. Yields each router's port and process id, and the engines' ports."""
    names = [name for name, router in ROUTERS.items() if router.is_installed]
    prefill, decode, *ports = free_ports(2 + len(names))
    with Fleet(logs) as fleet:
        for role, port in (("prefill", prefill), ("decode", decode)):
            engine = fleet.start(role, [sys.executable, "-m", "benchmarks.router.engine", str(port)])
            fleet.wait_ready({engine: f"http://127.0.0.1:{port}/health"}, timeout_s=START_TIMEOUT_S)
        routers = {}
        for name, port in zip(names, ports, strict=True):
            router = ROUTERS[name]
            command = router.command.format(port=port, prefill=prefill, decode=decode).split()
            site = {"PYTHONPATH": str(router.site)} if router.site else {}
            child = fleet.start(name.replace(" ", "-"), command, env={**site, **router.env})
            fleet.wait_ready({child: f"http://127.0.0.1:{port}/{router.health}"}, timeout_s=START_TIMEOUT_S)
            routers[name] = (port, child.pid)
        yield routers, prefill, decode


def median(measured: Sequence[Measured]) -> Measured:
    return Measured(
        statistics.median(one.cpu_us for one in measured),
        statistics.median(one.rate for one in measured),
        statistics.median(one.median_ms for one in measured),
        statistics.median(one.p99_ms for one in measured),
        sum(one.num_bad for one in measured),
    )


def table_of(workload: str, measured: Mapping[str, Measured], cpu_of_whole: Mapping[str, float]) -> Table:
    num_chunks = WORKLOADS[workload].num_chunks
    table = Table(title=f"{workload}, {NUM_AT_ONCE} at once, median of {ROUNDS} rounds")
    for column in ("", "us/request", "us/chunk", "requests/s", "p50 ms", "p99 ms", "+p50 ms", "+p99 ms"):
        table.add_column(column, justify="left" if not column else "right")
    direct = measured[DIRECT]
    for name, one in measured.items():
        chunk_us = (one.cpu_us - cpu_of_whole[name]) / num_chunks if num_chunks else 0.0
        table.add_row(
            name,
            f"{one.cpu_us:,.0f}" if name != DIRECT else "",
            f"{chunk_us:.0f}" if num_chunks and name != DIRECT else "",
            f"{one.rate:,.0f}",
            f"{one.median_ms:.2f}",
            f"{one.p99_ms:.2f}",
            f"{one.median_ms - direct.median_ms:.2f}" if name != DIRECT else "",
            f"{one.p99_ms - direct.p99_ms:.2f}" if name != DIRECT else "",
        )
    return table


def plot(results: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path) -> None:
    """Draw the processor time of a request, and the latency that a router adds when it is not always busy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    names = [name for name in results["pauses"] if name != DIRECT]  # Variants are in the table only.
    for shift, title in enumerate(("whole", "16 chunks")):
        at = [number + shift * 0.4 for number in range(len(names))]
        left.bar(at, [results[title][name]["cpu_us"] for name in names], width=0.4, label=title)
    for shift, percentile in enumerate(("median_ms", "p99_ms")):
        at = [number + shift * 0.4 for number in range(len(names))]
        added = [
            results["pauses"][name][percentile] - results["pauses"][DIRECT][percentile] for name in names
        ]
        right.bar(at, added, width=0.4, label={"median_ms": "p50", "p99_ms": "p99"}[percentile])
    left.set(ylabel="us", title="Processor time of a request", yscale="log")
    right.set(ylabel="ms", title="Added time to the first byte, clients that pause", yscale="log")
    for axes in (left, right):
        axes.set_xticks([number + 0.2 for number in range(len(names))], names)
        axes.grid(visible=True, axis="y", alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    console = Console()
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder)) as (routers, prefill, decode),
        contextlib.closing(Client()) as client,
    ):
        for name in ROUTERS.keys() - routers.keys():
            console.print(f"{name} is not installed (scripts/setup-peers); skipped")
        cpu_of_whole: dict[str, float] = {}
        results: dict[str, dict[str, dict[str, float]]] = {}
        for title, workload in WORKLOADS.items():
            taking_part = {
                name: where
                for name, where in routers.items()
                if title in VARIED or not ROUTERS[name].is_variant
            }
            rounds: dict[str, list[Measured]] = {name: [] for name in (DIRECT, *taking_part)}
            for _ in range(ROUNDS):
                rounds[DIRECT].append(measure(client, workload, prefill, decode=decode))
                for name, (port, pid) in taking_part.items():
                    rounds[name].append(measure(client, workload, port, pid=pid))
            measured = {name: median(all_rounds) for name, all_rounds in rounds.items()}
            if not workload.num_chunks:
                cpu_of_whole = {name: one.cpu_us for name, one in measured.items()}
            console.print(table_of(title, measured, cpu_of_whole))
            results[title] = {name: one._asdict() for name, one in measured.items()}
            for name, one in measured.items():
                if one.num_bad:
                    console.print(f"{name}: {one.num_bad} bad answers")
        memory = results["memory"] = {}
        for name, (port, pid) in routers.items():
            if ROUTERS[name].is_variant:
                continue
            memory[name] = {"idle_mib": idle_mib(client, port, pid)}
            console.print(f"{name}: {memory[name]['idle_mib']:.0f} MiB more for {NUM_IDLE:,} idle streams")
            if name != "toy proxy":
                memory[name]["growth_mib"] = growth_mib(client, port, pid)
                console.print(
                    f"{name}: {memory[name]['growth_mib']:+.1f} MiB from {MANY // 10:,} to {MANY:,} answers"
                )
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    plot(results, RESULTS.with_suffix(".png"))


if __name__ == "__main__":
    main()
