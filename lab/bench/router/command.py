"""The router beside other routers (`make bench ARGS=router`): processor time, rates, added latency, memory.

A fast fake engine for each role (`engine`), one client process (`load`), and one router after the other in
front of them, in rounds, so that a change of the machine's speed meets all of them. Two legs a request.

    whole       answers that are not streamed
    16 chunks   each one written in a turn of the event loop of its own
    256 chunks  4 ms apart
    pauses      16 chunks; each client waits 0 to 40 ms before it asks again, so no router is always busy
    220 KB      long prompts, 20, 100 and 200 at once, from engines that answer at once (llm-d-router #1109)
    1,000 streams   16 chunks, 200 ms apart, of 1,000 clients at once

Processor time is that of all processes of the router, from the kernel's accounts. Added latency is the
router's percentile minus that of a client that sends both legs itself. With `MANY` whole answers the memory
of each router is compared with that after a tenth of them (the toy proxy is left out: it takes minutes).
"without resumes" is `baton route --resumes 0`: it does not ask engines for token ids, so it cannot
continue a broken stream. Peers live in .venv-peers (scripts/setup-peers); a peer that is missing there is
skipped. The results go to docs/benchmarks/router.json and router.png.

Then `baton route` with one more feature at a time, in VARIANT_ROUNDS rounds of whole answers and of 16
chunks; the figure is the median of the ratios to the plain router of the same round:

    the same again    the plain router a second time: what differs is noise
    no timelines      without timelines, and without the metrics that are made of them (`bare`)
    traces            of 1 % and of 100 % of the requests; the prefill engine is the collector
    access log        to /dev/null
    API keys          100 of them
    JWT               one token, RS256; a verified token is remembered
    rate limits       JWT, and a limit that is never reached
    TLS               between the client and the router, on connections that stay open
"""

import argparse
import contextlib
import json
import os
import secrets
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jwt
import msgspec
import psutil
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from rich.console import Console
from rich.table import Table

from baton.cli.processes import Fleet, free_ports
from lab.bench.compare.environment import stock_proxies_folder
from lab.bench.router.jobs import Job, Result
from tests.certificates import Authority

ROOT = Path(__file__).parents[3]
PEERS = ROOT / ".venv-peers"
START_TIMEOUT_S = 60.0
ROUNDS = 3
VARIANT_ROUNDS = 15
VARIANT_STARTS = 3  # Two processes of one program differ by some per cent for as long as they run.
NUM_AT_ONCE = 8
NUM_IDLE = 1_000
MANY = 100_000
RESULTS = ROOT / "docs" / "benchmarks" / "router.json"
PROMPT = "word " * 1_024  # About 5 kB, as a prompt of 1,024 tokens.
LONG_PROMPT = "word " * 44_000


class Workload(NamedTuple):
    num_requests: int
    num_chunks: int  # 0: the answer is not streamed.
    gap_ms: int = 0
    pause_s: float = 0.0
    num_at_once: int = NUM_AT_ONCE
    prompt: str = PROMPT

    def body(self) -> str:
        fields = {"model": "fake", "prompt": self.prompt, "max_tokens": self.num_chunks or 16}
        if self.num_chunks:
            fields |= {"stream": True, "user": f"gap {self.gap_ms}" if self.gap_ms else ""}
        return json.dumps(fields)


WORKLOADS = {
    "whole": Workload(1_000, 0),
    "16 chunks": Workload(600, 16),
    "256 chunks": Workload(64, 256, gap_ms=4),
    "pauses": Workload(1_000, 16, pause_s=0.04),
    "220 KB, 20": Workload(400, 16, num_at_once=20, prompt=LONG_PROMPT),
    "220 KB, 100": Workload(800, 16, num_at_once=100, prompt=LONG_PROMPT),
    "220 KB, 200": Workload(1_600, 16, num_at_once=200, prompt=LONG_PROMPT),
    "1,000 streams": Workload(4_000, 16, gap_ms=200, num_at_once=1_000),
}


VARIED = {"whole": Workload(3_000, 0), "16 chunks": Workload(1_500, 16)}
NOTHING: Mapping[str, str] = {}


class Router(NamedTuple):
    command: str  # `{port}`, `{prefill}` and `{decode}` are ports.
    health: str
    site: Path | None = None  # More packages for it.
    env: Mapping[str, str] = NOTHING
    headers: Mapping[str, str] = NOTHING  # Headers that its clients send.
    ca: str = ""  # If set, the router has TLS, with a certificate of this file.

    @property
    def is_installed(self) -> bool:
        return all(Path(part).exists() for part in self.command.split()[:2] if part.startswith("/"))


DIRECT = "direct"  # The client sends both legs itself.
PROXIES = stock_proxies_folder() or ROOT / "no-proxies"
OPTIONS = (
    " route --port {port} --workers 1 --policy round_robin"
    " --prefill http://127.0.0.1:{prefill} --decode http://127.0.0.1:{decode}"
)
OWN = f"{sys.executable} -m baton.cli{OPTIONS}"
PLAIN = "baton route"

ROUTERS = {
    PLAIN: Router(OWN, "health"),
    "without resumes": Router(f"{OWN} --resumes 0", "health"),
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


def variants(folder: Path) -> dict[str, Router]:
    """`folder`: holds their keys, tokens and certificates."""

    def own(options: str, *, env: Mapping[str, str] = NOTHING, bearer: str = "", ca: str = "") -> Router:
        headers = {"authorization": f"Bearer {bearer}"} if bearer else NOTHING
        return Router(f"{OWN} {options}", "health", env=env, headers=headers, ca=ca)

    def traced(share: str) -> Router:
        sampler = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": share}
        return own("--otlp-traces-endpoint http://127.0.0.1:{prefill}/v1/traces", env=sampler)

    keys = [secrets.token_hex(32) for _ in range(100)]
    (folder / "keys").write_text("\n".join(keys))
    tls = Authority(folder, "bench").issue("127.0.0.1")
    signed = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
    (folder / "issuer.pem").write_bytes(
        signed.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    claims = {"iss": "bench", "aud": "baton", "sub": "search", "exp": int(time.time()) + 86_400}
    token = jwt.encode(claims, signed, algorithm="RS256")
    issuer = f'[jwt]\nissuer = "bench"\naudience = "baton"\nkey_file = "{folder}/issuer.pem"\n'
    (folder / "jwt.toml").write_text(issuer)
    (folder / "limits.toml").write_text(f"{issuer}[default]\nrequests_per_minute = 1000000000\n")
    return {
        "the same again": own(""),
        "no timelines": Router(f"{sys.executable} -m lab.bench.router.bare{OPTIONS}", "health"),
        "traces of 1 %": traced("0.01"),
        "traces of 100 %": traced("1"),
        "access log": own(f"--access-log {os.devnull}"),
        "API keys": own(f"--api-key-file {folder}/keys", bearer=keys[50]),
        "JWT": own(f"--auth-file {folder}/jwt.toml", bearer=token),
        "rate limits": own(f"--auth-file {folder}/limits.toml", bearer=token),
        "TLS": own(f"--tls-cert {tls.cert} --tls-key {tls.key}", ca=f"{folder}/bench-ca.pem"),
    }


class Measured(NamedTuple):
    cpu_us: float  # CPU time of the router per request.
    rate: float  # Requests per second.
    median_ms: float  # Time to the first byte of the answer's body.
    p99_ms: float
    num_bad: int


class Client:
    def __init__(self) -> None:
        command = [sys.executable, "-m", "lab.bench.router.load"]
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
        if not line.endswith("\n"):
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
    """CPU seconds of a process, its living threads, and its children. The scheduler counts nanoseconds."""
    spent_ns = 0
    for process in processes_of(pid):
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # The thread has just ended.
                spent_ns += int((thread / "schedstat").read_text().split()[0])
    return spent_ns / 1e9


def rss_mib(pid: int) -> float:
    return float(sum(process.memory_info().rss for process in processes_of(pid))) / 2**20


def measure(
    client: Client,
    workload: Workload,
    port: int,
    *,
    decode: int = 0,
    pid: int = 0,
    headers: Mapping[str, str] = NOTHING,
    ca: str = "",
) -> Measured:
    num_events = workload.num_chunks + 1 if workload.num_chunks else 0
    job = Job(
        port,
        workload.body(),
        workload.num_requests,
        workload.num_at_once,
        num_events,
        decode_port=decode,
        pause_s=workload.pause_s,
        headers=dict(headers),
        ca=ca,
    )
    client.run(
        msgspec.structs.replace(job, num_requests=workload.num_at_once * 4)
    )  # Warm: connections, caches.
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
def running(logs: Path, asked: Mapping[str, Router]) -> Iterator[tuple[dict[str, tuple[int, int]], int, int]]:
    """Start engines and routers. Yields each router's port and process id, and the engines' ports."""
    routers = {name: router for name, router in asked.items() if router.is_installed}
    prefill, decode, *ports = free_ports(2 + len(routers))
    with Fleet(logs) as fleet:
        for role, port in (("prefill", prefill), ("decode", decode)):
            engine = fleet.start(role, [sys.executable, "-m", "lab.bench.router.engine", str(port)])
            fleet.wait_ready({engine: f"http://127.0.0.1:{port}/health"}, timeout_s=START_TIMEOUT_S)
        started = {}
        for (name, router), port in zip(routers.items(), ports, strict=True):
            command = router.command.format(port=port, prefill=prefill, decode=decode).split()
            site = {"PYTHONPATH": str(router.site)} if router.site else {}
            child = fleet.start(name.replace(" ", "-"), command, env={**site, **router.env})
            verify = ssl.create_default_context(cafile=router.ca) if router.ca else True
            url = f"http{'s' if router.ca else ''}://127.0.0.1:{port}/{router.health}"
            fleet.wait_ready({child: url}, timeout_s=START_TIMEOUT_S, verify=verify)
            started[name] = (port, child.pid)
        yield started, prefill, decode


def median(measured: Sequence[Measured]) -> Measured:
    return Measured(
        statistics.median(one.cpu_us for one in measured),
        statistics.median(one.rate for one in measured),
        statistics.median(one.median_ms for one in measured),
        statistics.median(one.p99_ms for one in measured),
        sum(one.num_bad for one in measured),
    )


def table_of(workload: str, measured: Mapping[str, Measured], cpu_of_whole: Mapping[str, float]) -> Table:
    num_chunks, num_at_once = WORKLOADS[workload].num_chunks, WORKLOADS[workload].num_at_once
    table = Table(title=f"{workload}, {num_at_once} at once, median of {ROUNDS} rounds")
    for column in ("", "us/request", "us/chunk", "requests/s", "p50 ms", "p99 ms", "+p50 ms", "+p99 ms"):
        table.add_column(column, justify="left" if not column else "right")
    direct = measured[DIRECT]
    for name, one in measured.items():
        chunk_us = (one.cpu_us - cpu_of_whole.get(name, 0.0)) / num_chunks if num_chunks else 0.0
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


Rounds = dict[str, dict[str, list[Measured]]]  # Figures by workload and router.


def measure_variants(client: Client, folder: Path, rounds: Rounds) -> None:
    """Start all variants, and add the rounds of one start."""
    routers = {PLAIN: ROUTERS[PLAIN], **variants(folder)}
    names = list(routers)
    with running(folder / "variants", routers) as (started, _, _):
        for title, workload in VARIED.items():
            for number in range(VARIANT_ROUNDS // VARIANT_STARTS):
                shift = number % len(names)
                for name in (*names[shift:], *names[:shift]):  # None is always after the same one.
                    (port, pid), router = started[name], routers[name]
                    one = measure(client, workload, port, pid=pid, headers=router.headers, ca=router.ca)
                    if one.num_bad:
                        raise RuntimeError(f"{name}: {one.num_bad} bad answers")
                    rounds[title].setdefault(name, []).append(one)


def summarise_variants(console: Console, rounds: Rounds) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by workload and router, the processor time and its ratios to PLAIN's of the same round."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for title, by_router in rounds.items():
        table = Table(title=f"{title}, {NUM_AT_ONCE} at once, {VARIANT_ROUNDS} rounds, ratio to {PLAIN}")
        for column in ("", "us/request", "lower quartile", "median", "upper quartile"):
            table.add_column(column, justify="left" if not column else "right")
        of_title = results[title] = {}
        for name, measured in by_router.items():
            pairs = zip(measured, by_router[PLAIN], strict=True)
            low, middle, high = statistics.quantiles((one.cpu_us / plain.cpu_us for one, plain in pairs), n=4)
            cpu_us = statistics.median(one.cpu_us for one in measured)
            of_title[name] = {"cpu_us": cpu_us, "ratio": middle, "ratio_q1": low, "ratio_q3": high}
            table.add_row(name, f"{cpu_us:,.0f}", f"{low:.3f}", f"{middle:.3f}", f"{high:.3f}")
        console.print(table)
    return results


def plot(
    results: Mapping[str, Mapping[str, Mapping[str, float]]],
    of_variants: Mapping[str, Mapping[str, Mapping[str, float]]],
    path: Path,
) -> None:
    """Draw processor times of a request, and the latency that a router adds when it is not always busy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4))
    names = [name for name in results["pauses"] if name != DIRECT]
    features = [name for name in of_variants["whole"] if name != PLAIN]
    for shift, title in enumerate(VARIED):
        at = [number + shift * 0.4 for number in range(len(names))]
        left.bar(at, [results[title][name]["cpu_us"] for name in names], width=0.4, label=title)
        at = [number + shift * 0.4 for number in range(len(features))]
        over = [100 * (of_variants[title][name]["ratio"] - 1) for name in features]
        right.barh(at, over, height=0.4, label=title)
    for shift, percentile in enumerate(("median_ms", "p99_ms")):
        at = [number + shift * 0.4 for number in range(len(names))]
        added = [
            results["pauses"][name][percentile] - results["pauses"][DIRECT][percentile] for name in names
        ]
        middle.bar(at, added, width=0.4, label={"median_ms": "p50", "p99_ms": "p99"}[percentile])
    left.set(ylabel="us", title="Processor time of a request", yscale="log")
    middle.set(ylabel="ms", title="Added time to the first byte, clients that pause", yscale="log")
    right.set(xlabel="%", title="More processor time of baton route with")
    for axes in (left, middle):
        axes.set_xticks([number + 0.2 for number in range(len(names))], names, rotation=12)
    right.set_yticks([number + 0.2 for number in range(len(features))], features)
    right.invert_yaxis()
    for axes in (left, middle, right):
        axes.grid(visible=True, axis="x" if axes is right else "y", alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def measure_workloads(
    console: Console,
    client: Client,
    routers: Mapping[str, tuple[int, int]],
    prefill: int,
    decode: int,
    workloads: Mapping[str, Workload],
) -> dict[str, dict[str, dict[str, float]]]:
    cpu_of_whole: dict[str, float] = {}
    results: dict[str, dict[str, dict[str, float]]] = {}
    for title, workload in workloads.items():
        rounds: dict[str, list[Measured]] = {name: [] for name in (DIRECT, *routers)}
        for _ in range(ROUNDS):
            rounds[DIRECT].append(measure(client, workload, prefill, decode=decode))
            for name, (port, pid) in routers.items():
                rounds[name].append(measure(client, workload, port, pid=pid))
        measured = {name: median(all_rounds) for name, all_rounds in rounds.items()}
        if not workload.num_chunks:
            cpu_of_whole = {name: one.cpu_us for name, one in measured.items()}
        console.print(table_of(title, measured, cpu_of_whole))
        results[title] = {name: one._asdict() for name, one in measured.items()}
        for name, one in measured.items():
            if one.num_bad:
                console.print(f"{name}: {one.num_bad} bad answers")
    return results


def measure_memory(
    console: Console, client: Client, routers: Mapping[str, tuple[int, int]]
) -> dict[str, dict[str, float]]:
    memory: dict[str, dict[str, float]] = {}
    for name, (port, pid) in routers.items():
        memory[name] = {"idle_mib": idle_mib(client, port, pid)}
        console.print(f"{name}: {memory[name]['idle_mib']:.0f} MiB more for {NUM_IDLE:,} idle streams")
        if name != "toy proxy":
            memory[name]["growth_mib"] = growth_mib(client, port, pid)
            console.print(
                f"{name}: {memory[name]['growth_mib']:+.1f} MiB from {MANY // 10:,} to {MANY:,} answers"
            )
    return memory


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.bench.router.command")
    parser.add_argument(
        "--features", action="store_true", help="only what features cost; keeps other figures"
    )
    parser.add_argument(
        "--workloads", nargs="+", choices=list(WORKLOADS), help="only these; keeps other figures"
    )
    asked = parser.parse_args(list(arguments))
    workloads = {name: WORKLOADS[name] for name in asked.workloads or WORKLOADS}
    is_whole = not asked.features and not asked.workloads
    console = Console()
    load = f"{os.getloadavg()[0]:.1f}"
    with tempfile.TemporaryDirectory() as made, contextlib.closing(Client()) as client:
        folder = Path(made)
        found = {} if is_whole else json.loads(RESULTS.read_text())
        if not asked.features:
            with running(folder / "routers", ROUTERS) as (started, prefill, decode):
                for name in ROUTERS.keys() - started.keys():
                    console.print(f"{name} is not installed (scripts/setup-peers); skipped")
                found |= measure_workloads(console, client, started, prefill, decode, workloads)
                if is_whole:
                    found["memory"] = measure_memory(console, client, started)
        if not asked.workloads:
            rounds: Rounds = {title: {} for title in VARIED}
            for number in range(VARIANT_STARTS):
                (folder / f"{number}").mkdir()
                measure_variants(client, folder / f"{number}", rounds)
            found["variants"] = summarise_variants(console, rounds)
    console.print(f"load average before: {load}")
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    plot(found, found["variants"], RESULTS.with_suffix(".png"))


if __name__ == "__main__":
    main(sys.argv[1:])
