"""`baton doctor`: reports what works on this machine, how fast, and how to fix what does not."""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import msgspec
import typer

from baton.cli.exposure import doors_of, open_doors, readable_files
from baton.cli.http_options import CA_HELP, verifying
from baton.core.errors import ConfigError
from baton.core.secret_source import SECRET_ENV
from baton.http.gate import is_loopback

if TYPE_CHECKING:
    from rich.console import Console

    from baton.core.config import ClusterSecret
    from baton.transport.self_test import Outcome

app = typer.Typer(help="Report what works on this machine, and what to change.")

PEER_TIMEOUT_S = 5.0  # Time for each answer of another engine.
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `is_good` None: information only."""

    subject: str
    is_good: bool | None
    found: str
    mend: str = ""  # What to change. A key of the JSON output.


@app.command()
def doctor(
    peer_pid: Annotated[
        int | None,
        typer.Option(help="Also check that the memory of this process (an engine's) can be read."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="Also check the engine at this URL: that it answers, has our secret and a reachable control "
            "port, and has lost no links to others. Repeat for more.",
            show_default=False,
        ),
    ] = None,
    ca: Annotated[Path | None, typer.Option(help=CA_HELP, show_default=False)] = None,
    secret_file: Annotated[
        str | None, typer.Option(help="File with the cluster secret, as for baton serve.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check the machine and read 32 MiB over each transport, between two processes. Takes a few seconds.

    The exit status is 1 if any line has "no".
    """
    from rich.console import Console

    from baton.transport import host_names
    from baton.transport.self_test import self_test

    console = Console(stderr=as_json)
    names = host_names()
    with console.status("reading over each transport"):
        outcomes = self_test(names)
    findings = [
        *look_at_machine(os.environ.get(SECRET_ENV, "")),
        *(look_at_outcome(outcome) for outcome in outcomes),
        *look_at_optional(has_nixl="nixl" in names),
        *look_at_exposure(os.environ, secret_file),
        *([look_at_peer(peer_pid)] if peer_pid is not None else []),
        *(finding for url in peer or () for finding in look_at_engine(url, our_secret(secret_file), ca)),
    ]
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        print_findings(findings, console)
    if any(finding.is_good is False for finding in findings):
        raise typer.Exit(1)


def look_at_machine(secret: str) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    yield Finding(
        "cores",
        cores > 1,
        str(cores),
        "" if cores > 1 else "the engine and its transport share one core; give each engine two or more",
    )
    yield Finding(
        "cluster secret",
        True if secret.strip() else None,
        "set" if secret.strip() else "not set",
        "" if secret.strip() else f"set {SECRET_ENV} before engines listen beyond this host",
    )
    scope = _ptrace_scope()
    yield Finding(
        "ptrace_scope",
        None if scope is None else scope <= 1,
        "no Yama in this kernel" if scope is None else str(scope),
        "" if scope is None or scope <= 1 else "sysctl kernel.yama.ptrace_scope=1, or `local` cannot read",
    )


def look_at_exposure(environment: Mapping[str, str], secret_file: str | None) -> Iterator[Finding]:
    """Look at the server and the secret files that the environment describes to `baton serve`."""
    from baton.cli.serve_settings import resolve

    try:
        resolved = resolve({"secret_file": secret_file} if secret_file else {}, environment=environment)
    except ConfigError as error:
        # The variables may be those of `baton route`.
        yield Finding("settings in the environment", None, f"baton serve refuses them: {error}")
        return
    settings, host = resolved.settings, resolved.settings.host
    doors = doors_of(host, resolved.http, settings.tls)
    for door in doors:
        yield Finding(f"baton serve at {host}", False, *door.split(", because ", 1))
    if not doors:
        yield Finding(f"baton serve at {host}", True, "is not open to the network")
    files = [settings.secret_file, settings.tls_key, *msgspec.structs.astuple(resolved.http.key_files)]
    for file in readable_files(files):
        yield Finding("secret file", False, *file.split(": ", 1))


def look_at_outcome(outcome: Outcome) -> Finding:
    if outcome.gb_per_s is not None:
        way = f", {outcome.way}" if outcome.way else ""
        return Finding(outcome.name, True, f"{outcome.gb_per_s:.2f} GB/s in blocks of 16 KiB{way}")
    return Finding(outcome.name, False, "does not work", outcome.error or "")


def look_at_optional(*, has_nixl: bool) -> Iterator[Finding]:
    from baton.transport.nixl.transport import has_rdma

    if has_nixl:
        version = importlib.metadata.version("nixl")
        yield Finding("NIXL package", True, version)
    else:
        yield Finding(
            "NIXL package", None, "not installed", "pip install 'kv-baton[nixl]', for RDMA networks"
        )
    yield Finding(
        "RDMA devices",
        None,
        "some" if has_rdma() else "none",
        "" if has_rdma() else "between hosts, engines use tcp",
    )
    yield _look_at_copy_library()
    yield _look_at_attention_library()
    yield _look_at_cuda()


def _look_at_copy_library() -> Finding:
    from baton.core.errors import TransferError
    from baton.transport.base.gather import Gather

    try:
        return Finding("copy library", True, f"uses {Gather().instructions}")
    except TransferError as error:
        return Finding(
            "copy library", None, "`local` reads by cross-memory attach, and `tcp` is slower", str(error)
        )


def _look_at_attention_library() -> Finding:
    from baton.engine.attention.compiled import HINT, load_library

    if load_library() is None:
        what = "is not built, or of another version: the embedded engine decodes slower on a CPU"
        return Finding("attention library", None, what, HINT)
    return Finding("attention library", True, "used by the embedded engine on a CPU")


def _look_at_cuda() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("CUDA", None, "none that torch can use", "KV caches are in host memory")
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    return Finding("CUDA", True, f"{torch.cuda.device_count()} devices: {', '.join(sorted(names))}")


def look_at_peer(pid: int) -> Finding:
    """Check by reading one mapped byte, as `local` does."""
    import numpy as np

    from baton.transport.base.identity_page import explain
    from baton.transport.base.iovec import Scratch, iovec_array, read_process_memory

    subject = f"process {pid}"
    try:
        address = int(Path(f"/proc/{pid}/maps").read_bytes().partition(b"-")[0], 16)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it has no mapped memory"
        return Finding(subject, False, "cannot be inspected", f"{reason}; check that it runs and is yours")
    byte = Scratch.of(1)
    one = np.array([1], dtype=np.int64)
    try:
        read_process_memory(
            pid,
            iovec_array(np.array([byte.address], dtype=np.int64), one),
            iovec_array(np.array([address], dtype=np.int64), one),
        )
    except OSError as error:
        return Finding(subject, False, "its memory cannot be read", explain(error, pid))
    return Finding(subject, True, "its memory can be read")


def our_secret(file: str | None) -> ClusterSecret | None:
    """Return the secret as `baton serve` finds it on this machine. Raises BadParameter."""
    from baton.core.secret_source import find_secret

    try:
        return find_secret(
            os.environ, file=file, field="secret_file", is_file_first=True, moves_kv=True, is_insecure=False
        ).secret
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


def look_at_engine(url: str, secret: ClusterSecret | None, ca: Path | None = None) -> Iterator[Finding]:
    """Check the engine at `url` as another engine of its cluster would see it."""
    import httpx
    import msgspec

    from baton.core.engine_card import EngineCard
    from baton.server.introduction import secret_ids

    with httpx.Client(timeout=PEER_TIMEOUT_S, trust_env=False, verify=verifying(ca)) as client:
        try:
            health = client.get(f"{url}/health")
            page = client.get(f"{url}/baton/introduction")
            models = client.get(f"{url}/v1/models")  # This request has no key.
        except httpx.HTTPError as error:
            yield Finding(url, False, "does not answer", f"{type(error).__name__}: {error}")
            return
    if not is_loopback(urlsplit(url).hostname or ""):
        for door in open_doors(is_open=models.status_code == 200, has_tls=url.startswith("https")):
            yield Finding(url, False, *door.split(", because ", 1))
    if health.status_code != 200:
        yield Finding(url, False, f"/health returns {health.status_code}", health.text[:200])
    try:
        engine = msgspec.json.decode(page.content, type=EngineCard)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        yield Finding(
            url,
            None if page.status_code == 404 else False,
            f"no introduction (status {page.status_code})",
            "it is a vLLM, has no KV connector, or has another admin port",
        )
        return
    yield Finding(url, True, f"{engine.engine_id}, {engine.kv_role}, serves {engine.served_model_name}")
    for name, count in sorted(engine.lost_links.items()):
        found = f"{count} lost since its start; the next read replaces a lost link"
        yield Finding(f"{url} links to {name}", None, found, "check the network between the two")
    shared = not set(engine.secret_ids or ()).isdisjoint(secret_ids(secret))
    yield Finding(
        f"{url} secret",
        shared,
        "equal to this machine's" if shared else "another one" if engine.secret_ids else "none",
        "" if shared else f"give both the same {SECRET_ENV}",
    )
    if shared and secret is not None and engine.introduction is not None:
        yield _look_at_control_port(url, engine.introduction, secret)


def _look_at_control_port(url: str, text: str, secret: ClusterSecret) -> Finding:
    """Check that the address that the engine signed can be reached from here."""
    from baton.connectors.pull.identity import TICKET_KEY_PURPOSE
    from baton.core.errors import BadTransferParams
    from baton.protocol.introduction import open_introduction

    subject = f"{url} control port"
    keys = secret.derive_all(TICKET_KEY_PURPOSE)
    try:
        control = open_introduction(text, keys[0], keys[1] if len(keys) > 1 else None).control_url
    except BadTransferParams as error:
        return Finding(subject, False, "its introduction is not valid", str(error))
    host, _, port = control.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PEER_TIMEOUT_S).close()
    except OSError as error:
        mend = "open the port, or set host, port or advertise_host of that engine"
        return Finding(subject, False, f"{control} cannot be reached: {error.strerror or error}", mend)
    return Finding(subject, True, f"{control} can be reached")


def print_findings(findings: list[Finding], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    for heading in ("", "what", "found", "what to change"):
        table.add_column(heading, overflow="fold")
    marks = {True: "[green]ok[/]", False: "[red]no[/]", None: ""}
    for finding in findings:
        # Findings are text, not markup: `kv-baton[nixl]` contains brackets.
        table.add_row(marks[finding.is_good], *map(Text, (finding.subject, finding.found, finding.mend)))
    console.print(table)


def _ptrace_scope() -> int | None:
    try:
        return int(PTRACE_SCOPE.read_text())
    except (OSError, ValueError):
        return None
