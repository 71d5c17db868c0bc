"""`baton check`: checks whether a KV connector keeps the contract.
baton check my.module:MyConnector --config '{"path": "/tmp/kv"}'
baton check my.module:MyConnector --pair pull        two engines; P's params go to D
baton check BatonOffloadConnector --executor multiprocess --examples 3
baton check my.module:MyVllmConnector                of vLLM's own base class, if vllm is installed
baton check BatonOffloadConnector --executor vllm    Baton's classes for vLLM
baton check --all                                    Baton's own connectors on all executors
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from baton.testing.contract import ConnectorCase, Verdict

app = typer.Typer(help="Check whether a KV connector keeps the contract.")

EXECUTORS = ("toy", "vllm", "inprocess", "multiprocess", "ray")
OPTIONAL = ("vllm", "ray")  # Executors that need packages of these names.
TELL_EVERY_S = 30.0
TRIES = 200  # Further examples, in search of a shorter story.
ENGINE_EXAMPLES = 2  # Examples with --all, besides the tour: each of them starts real engines.


def _find_modules_here() -> None:
    """Find modules in the working directory, as pytest and uvicorn do, also in the ranks' processes."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])


@app.command()
def check(
    connector: Annotated[
        str | None,
        typer.Argument(
            help="'package.module:Class', or the name of a built-in connector.", show_default=False
        ),
    ] = None,
    config: Annotated[str, typer.Option(help="The connector's kv_connector_extra_config, as JSON.")] = "{}",
    pair: Annotated[
        str,
        typer.Option(help="How two engines hand over: none (one engine), pull (P's params go to D), push."),
    ] = "none",
    examples: Annotated[int, typer.Option(help="Number of examples.", min=0)] = 50,
    seed: Annotated[int, typer.Option(help="Seed of the examples.")] = 0,
    executor: Annotated[
        str,
        typer.Option(
            help=f"Executor of the ranks: {', '.join(EXECUTORS)}. toy: the kit, in this process. "
            "vllm: the kit, with vLLM's connector classes and objects."
        ),
    ] = "toy",
    patience_s: Annotated[
        float, typer.Option(help="How long to wait for background work when steps make no progress.", min=0.0)
    ] = 5.0,
    break_files: Annotated[
        Path | None,
        typer.Option(
            help="Folder in which only the connector keeps KV. Its files are cut and removed, and no token "
            "may be wrong because of that.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    all_of_ours: Annotated[
        bool, typer.Option("--all", help="Check all of Baton's connectors on all executors.")
    ] = False,
) -> None:
    """Run examples of requests, steps, aborts, preemptions and faults until one breaks a rule.

    Prints a table of the rules. If a rule is broken, prints the shortest story found and exits with status 1.
    Needs hypothesis.
    """
    from rich.console import Console

    from baton.core.errors import UserError

    console = Console()
    _find_modules_here()
    if importlib.util.find_spec("hypothesis") is None:
        raise typer.BadParameter("hypothesis is not installed; run: pip install hypothesis")
    if executor not in EXECUTORS:
        raise typer.BadParameter(f"must be one of {', '.join(EXECUTORS)}", param_hint="--executor")
    try:
        if all_of_ours:
            is_sound = check_all(console, examples=examples, seed=seed)
        elif connector is None:
            raise typer.BadParameter("give a connector or --all")
        else:
            case = case_of(connector, config, pair, patience_s, break_files)
            with _progress(console, case.name) as show:
                verdict = run_case(case, executor, examples=examples, seed=seed, on_example=show)
            print_verdict(verdict, console)
            is_sound = verdict.broken is None
    except UserError as error:
        raise typer.BadParameter(str(error)) from error
    if not is_sound:
        raise typer.Exit(1)


def case_of(
    connector: str, config: str, pair: str, patience_s: float, break_files: Path | None = None
) -> ConnectorCase:
    """Make the case. Raises UserError, or BadParameter with the option's name."""
    from baton.connectors.registry import connector_class
    from baton.testing import cut_files
    from baton.testing.contract import ConnectorCase
    from baton.testing.contract.case import transfer_config

    if pair not in ("none", "pull", "push"):
        raise typer.BadParameter("must be none, pull or push", param_hint="--pair")
    try:
        extra = json.loads(config)
    except ValueError as error:
        raise typer.BadParameter(f"is not JSON: {error}", param_hint="--config") from error
    if not isinstance(extra, dict):
        raise typer.BadParameter("must be a JSON object", param_hint="--config")
    case = ConnectorCase(
        path=connector,
        extra_config=extra,
        pairing=pair,  # type: ignore[arg-type]
        patience_s=patience_s,
        break_store=partial(cut_files, break_files) if break_files is not None else None,
    )
    if not is_vllms(connector):
        connector_class(transfer_config(case, "e", "kv_both", "recompute"))
    return case


def is_vllms(path: str) -> bool:
    """Return whether the connector has vLLM's own base class."""
    from baton.testing.contract.case import find_class

    return any(base.__module__.startswith("vllm.") for base in find_class(path).__mro__)


def vllms_case(case: ConnectorCase, executor: str) -> ConnectorCase:
    """Return the case with the class for vLLM. Raises BadParameter if there is none, or without vLLM."""
    if executor not in ("toy", "vllm"):
        raise typer.BadParameter("must be vllm for connectors of vLLM's base class", param_hint="--executor")
    if importlib.util.find_spec("vllm") is None:
        raise typer.BadParameter("needs the package vllm, which is not installed", param_hint="--executor")
    from baton.hosts.vllm import kit as kit_site

    case = kit_site.vllms_case(case)
    if not is_vllms(case.path):
        raise typer.BadParameter(
            f"{case.path} does not derive from vLLM's base class", param_hint="--executor"
        )
    return case


def run_case(
    case: ConnectorCase,
    executor: str,
    *,
    examples: int,
    seed: int,
    on_example: Callable[[int], None] | None = None,
) -> Verdict:
    from dataclasses import replace

    from baton.testing.contract import check_connector
    from baton.testing.contract.site import ToySite

    make_site: Callable[[ConnectorCase], ToySite] = ToySite
    if executor == "vllm" or is_vllms(case.path):
        case, executor = vllms_case(case, executor), "vllm"
        from baton.hosts.vllm.kit import VllmSite as make_site
    tries = TRIES
    if executor not in ("toy", "vllm"):
        from baton.testing.contract.engine_site import EngineSite

        tp = 1 if executor == "inprocess" else 2
        case = replace(case, tensor_parallel_sizes=(tp,))
        tries = 20 if executor == "inprocess" else 0  # Each try starts processes.

        def make_site(case: ConnectorCase) -> ToySite:
            return EngineSite(case, executor)  # type: ignore[arg-type]  # Checked by the caller.

    return check_connector(
        case, examples=examples, seed=seed, make_site=make_site, tries=tries, on_example=on_example
    )


def print_verdict(verdict: Verdict, console: Console) -> None:
    from rich.table import Table

    table = Table(title=f"{verdict.case.name}: {verdict.num_examples} examples", title_justify="left")
    table.add_column("rule")
    table.add_column("result")
    table.add_column("checks", justify="right")
    for rule, result, count in verdict.rows():
        style = "bold red" if result == "BROKEN" else "green" if result == "kept" else "dim"
        table.add_row(rule, f"[{style}]{result}[/]", str(count))
    console.print(table)
    seen = ", ".join(f"{count} {what}" for what, count in sorted(verdict.seen.items()) if count)
    console.print(f"seen: {seen}", highlight=False)
    if verdict.broken is not None:
        console.print(f"\n{verdict.broken}", markup=False, highlight=False, soft_wrap=True)


def check_all(console: Console, *, examples: int, seed: int) -> bool:
    """Check Baton's connectors on the executors of this installation. True if all keep the contract."""
    from rich.table import Table

    executors = [
        name for name in EXECUTORS if name not in OPTIONAL or importlib.util.find_spec(name) is not None
    ]
    table = Table(title="rules kept or broken, (examples), time", title_justify="left")
    table.add_column("connector", no_wrap=True)
    for name in executors:
        table.add_column(name)
    stories: list[str] = []
    with tempfile.TemporaryDirectory(prefix="baton-check-") as folder:
        rows: dict[str, dict[str, str]] = {}
        for executor in executors:
            for name, case in _our_cases(Path(folder) / executor, executor):
                count = examples if executor in ("toy", "vllm") else min(examples, ENGINE_EXAMPLES)
                where = f"{name} on {executor}"
                cell, story = _try_case(case, executor, console, where, examples=count, seed=seed)
                console.print(f"{where}: {cell}", highlight=False)
                rows.setdefault(name, {})[executor] = cell
                if story is not None:
                    stories.append(f"{where}\n{story}")
    for name, cells in rows.items():
        table.add_row(name, *(cells.get(executor, "-") for executor in executors))
    console.print(table)
    for story in stories:
        console.print(f"\n{story}", markup=False, highlight=False, soft_wrap=True)
    return not stories


def _try_case(
    case: ConnectorCase, executor: str, console: Console, where: str, *, examples: int, seed: int
) -> tuple[str, str | None]:
    """Return (cell of the table, report if the case failed). An error of one case does not end the others."""
    started_s = time.monotonic()
    with _progress(console, where) as show:
        try:
            verdict = run_case(case, executor, examples=examples, seed=seed, on_example=show)
        except Exception as error:  # An error of the kit or of an executor.
            return f"ERROR {type(error).__name__}", "".join(traceback.format_exception(error))
    took = f"{_cell(verdict)} {time.monotonic() - started_s:.0f} s"
    return took, str(verdict.broken) if verdict.broken is not None else None


@contextmanager
def _progress(console: Console, where: str) -> Iterator[Callable[[int], None]]:
    """Yield a function to call after each example. Without a terminal, prints a line now and then."""
    started_s = told_s = time.monotonic()
    with console.status(f"{where}: starts") as status:

        def show(num_examples: int) -> None:
            nonlocal told_s
            now_s = time.monotonic()
            line = f"{where}: {num_examples} examples, {now_s - started_s:.0f} s"
            status.update(line)
            if not console.is_terminal and now_s - told_s >= TELL_EVERY_S:
                told_s = now_s
                console.print(line, highlight=False)

        yield show


def _our_cases(folder: Path, executor: str) -> Iterator[tuple[str, ConnectorCase]]:
    from baton.testing.contract.ours import our_cases

    folder.mkdir()
    transports: Any = ("local", "tcp") if executor in ("multiprocess", "ray") else ("memory",)
    yield from our_cases(folder, transports=transports).items()


def _cell(verdict: Verdict) -> str:
    kept = sum(result == "kept" for _, result, _ in verdict.rows())
    if verdict.broken is not None:
        return f"BROKEN {verdict.broken_rule} ({verdict.num_examples})"
    return f"{kept} kept ({verdict.num_examples})"
