"""`baton doctor`: what works on this machine, how fast, and what to change where something does not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.core.secret_source import SECRET_ENV

if TYPE_CHECKING:
    from rich.console import Console

    from baton.transport.self_test import Outcome

app = typer.Typer(help="Say what works on this machine, and what to change.")

PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `is_good` None: neither good nor bad, but worth knowing."""

    subject: str
    is_good: bool | None
    found: str
    mend: str = ""


@app.command()
def doctor(
    peer_pid: Annotated[
        int | None,
        typer.Option(help="Also: may the memory of this process, an engine's, be read?"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look at the machine and read 32 MiB over each transport, between two processes. Takes a few seconds.

    The exit status is 1 if any line says no.
    """
    from rich.console import Console

    from baton.transport.self_test import self_test

    console = Console(stderr=as_json)
    names = ["local", "tcp"]
    if importlib.util.find_spec("nixl") is not None:
        names.append("nixl")
    with console.status("reading over each transport"):
        outcomes = self_test(names)
    findings = [
        *look_at_machine(os.environ.get(SECRET_ENV, "")),
        *(look_at_outcome(outcome) for outcome in outcomes),
        *look_at_optional(has_nixl="nixl" in names),
        *([look_at_peer(peer_pid)] if peer_pid is not None else []),
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
        "" if cores > 1 else "engine and transport share it; give each engine two cores or more",
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


def look_at_outcome(outcome: Outcome) -> Finding:
    if outcome.gb_per_s is not None:
        return Finding(outcome.name, True, f"{outcome.gb_per_s:.2f} GB/s in blocks of 16 KiB")
    return Finding(outcome.name, False, "does not work", outcome.error or "")


def look_at_optional(*, has_nixl: bool) -> Iterator[Finding]:
    from baton.transport.nixl import has_rdma

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
    yield _look_at_cuda()


def _look_at_cuda() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("CUDA", None, "none that torch can use", "KV caches lie in host memory")
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    return Finding("CUDA", True, f"{torch.cuda.device_count()} devices: {', '.join(sorted(names))}")


def look_at_peer(pid: int) -> Finding:
    """Reads one mapped byte, as `local` would."""
    import numpy as np

    from baton.transport.identity_page import explain
    from baton.transport.iovec import Scratch, iovec_array, read_process_memory

    subject = f"process {pid}"
    try:
        address = int(Path(f"/proc/{pid}/maps").read_text().partition("-")[0], 16)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it has no memory"
        return Finding(subject, False, "cannot be looked at", f"{reason}: is it yours, and alive?")
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


def print_findings(findings: list[Finding], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    for heading in ("", "what", "found", "what to change"):
        table.add_column(heading, overflow="fold")
    marks = {True: "[green]ok[/]", False: "[red]no[/]", None: ""}
    for finding in findings:
        # Findings are text, not markup: `kv-baton[nixl]` has brackets of its own.
        table.add_row(marks[finding.is_good], *map(Text, (finding.subject, finding.found, finding.mend)))
    console.print(table)


def _ptrace_scope() -> int | None:
    try:
        return int(PTRACE_SCOPE.read_text())
    except (OSError, ValueError):
        return None
