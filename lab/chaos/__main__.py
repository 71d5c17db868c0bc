"""Command line of the chaos matrix and the soak test (`python -m lab.chaos`)."""

import datetime
import os
import platform
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.processes import Stopped, raising_on_stop_signals
from baton.core.errors import BatonError
from lab.chaos.cell import NUM_CLIENTS, Record
from lab.chaos.faults import FAULTS
from lab.chaos.matrix import (
    Shard,
    append_record,
    make_environment,
    plan_cells,
    read_journal,
    run_cells,
    source_commit,
    without_done,
)
from lab.chaos.modes import MODES
from lab.chaos.report import summary, write_report
from lab.chaos.soak import FAULT_CYCLE, plot, run_soak, write_soak_report

ROOT = Path(__file__).parents[2]
WORK = ROOT / ".chaos"
REPORT = ROOT / "docs" / "chaos.md"
SOAK_REPORT = ROOT / "docs" / "soak.md"
HANG_S = 180.0  # Longer than every deadline of the system: a request without an end by then never ends.

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def say(line: str) -> None:
    print(line, flush=True)


def _parse_shard(text: str) -> Shard:
    try:
        index, count = (int(number) for number in text.split("/"))
    except ValueError:
        raise typer.BadParameter(f"must be INDEX/COUNT, like 1/4, is {text!r}") from None
    if not 1 <= index <= count:
        raise typer.BadParameter(f"must be from 1/{count} to {count}/{count}, is {text!r}")
    return Shard(index, count)


def _check_names(given: list[str], known: list[str], what: str) -> list[str]:
    for name in given:
        if name not in known:
            raise typer.BadParameter(f"there is no {what} {name!r}; choose from {', '.join(known)}")
    return given


@app.command()
def run(
    mode: Annotated[list[str] | None, typer.Option(help="Only this mode; repeat for more.")] = None,
    fault: Annotated[list[str] | None, typer.Option(help="Only this fault; repeat for more.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run eight cells and do not rewrite docs/chaos.md.")
    ] = False,
    shard: Annotated[
        str, typer.Option(help="Run one part of the cells, as INDEX/COUNT, such as 1/4.")
    ] = "1/1",
    again: Annotated[
        bool, typer.Option("--again", help="Also run cells that have a record of this commit.")
    ] = False,
    hang_s: Annotated[
        float, typer.Option(help="Seconds after which an unfinished request counts as hung.")
    ] = HANG_S,
    proxies: Annotated[
        bool, typer.Option("--proxies", help="Use byte-stream proxies instead of network namespaces.")
    ] = False,
    updates: Annotated[
        int, typer.Option(min=8, help="Updates of weights in a cell of the fault `weights`.")
    ] = 8,
    journal: Annotated[Path, typer.Option(help="File of JSON lines, one record per cell.")] = WORK
    / "journal.jsonl",
) -> None:
    """Run cells of the matrix. Exit status 1: a cell had wrong tokens, a hang, a leak or an unclear error."""
    modes = _check_names(mode or [], [m.name for m in MODES], "mode")
    faults = _check_names(fault or [], [f.name for f in FAULTS], "fault")
    commit = source_commit(ROOT)
    cells = plan_cells(modes=modes, faults=faults, quick=quick, shard=_parse_shard(shard))
    if not again and not quick:
        cells = without_done(cells, read_journal(journal), commit)
    records: list[Record] = []

    def on_record(record: Record) -> None:
        records.append(record)
        if not quick:
            append_record(journal, record)
        say(f"{record.mode:<11} {record.fault:<17} {_outcome(record)}")

    folder = WORK / f"run-{os.getpid()}"
    began_s = time.monotonic()
    if cells:
        with raising_on_stop_signals(), make_environment(folder, say, proxies=proxies) as environment:
            run_cells(
                environment, cells, commit=commit, hang_s=hang_s, num_updates=updates, on_record=on_record
            )
    say(f"{summary(records)} {time.monotonic() - began_s:.0f} s.")
    if not quick:
        _write(journal)
    if any(record.defects for record in records):
        say(f"logs of the engines: {folder}")
        sys.exit(1)
    shutil.rmtree(folder, ignore_errors=True)


@app.command()
def report(
    journal: Annotated[Path, typer.Option(help="File of JSON lines, one record per cell.")] = WORK
    / "journal.jsonl",
) -> None:
    """Write docs/chaos.md from the journal."""
    _write(journal)


@app.command()
def soak(
    hours: Annotated[float, typer.Option(help="Hours that the load runs.")] = 2.0,
    fault: Annotated[
        list[str] | None,
        typer.Option(help="Only this fault; repeat for more. With `disconnects` alone no loan may expire."),
    ] = None,
    mode: Annotated[str, typer.Option(help="Mode of the system, as in the matrix.")] = "pull",
    clients: Annotated[int, typer.Option(min=1, help="Number of concurrent clients.")] = NUM_CLIENTS,
    pause_s: Annotated[
        float, typer.Option(min=0, help="Mean pause of a client between two requests, in seconds.")
    ] = 0.5,
    hang_s: Annotated[
        float, typer.Option(help="Seconds after which an unfinished request counts as hung.")
    ] = HANG_S,
) -> None:
    """Run a steady load with faults and write docs/soak.md.

    Exit status 1: a leak or a wrong answer.
    """
    _check_names([mode], [m.name for m in MODES], "mode")
    faults = _check_names(fault or [], [f.name for f in FAULTS], "fault")
    folder = WORK / f"soak-{os.getpid()}"
    with raising_on_stop_signals(), make_environment(folder, say) as environment:
        outcome, samples = run_soak(
            environment,
            mode=mode,
            hours=hours,
            num_clients=clients,
            pause_s=pause_s,
            commit=source_commit(ROOT),
            hang_s=hang_s,
            folder=folder / "system",
            faults=faults or FAULT_CYCLE,
        )
    plot(samples, SOAK_REPORT.with_suffix(".png"))
    SOAK_REPORT.write_text(write_soak_report(outcome, samples, machine=_machine(), date=_today()))
    say(f"answers: {outcome.verdicts}; verdict: {'; '.join(outcome.defects) or 'good'}")
    if outcome.defects:
        say(f"logs of the engines: {folder}")
        sys.exit(1)
    shutil.rmtree(folder, ignore_errors=True)


def _write(journal: Path) -> None:
    REPORT.write_text(write_report(read_journal(journal), machine=_machine(), date=_today()))


def _machine() -> str:
    return f"{os.cpu_count()} cores, Linux {platform.release().split('-')[0]}"


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _outcome(record: Record) -> str:
    if record.skipped is not None:
        return f"not run: {record.skipped}"
    counts = record.counts
    if counts is None:
        return "; ".join(record.defects)
    words = [f"{counts.requests} requests", f"{counts.right} right", f"{counts.clear_errors} errors"]
    words.append(f"longest {counts.longest_wait_s:.1f} s")
    if record.serves_again_s is not None:
        words.append(f"serves again after {record.serves_again_s:.1f} s")
    if record.hands_over_again_s is not None:
        words.append(f"hands over again after {record.hands_over_again_s:.1f} s")
    if record.strikes is not None:
        words.append(f"{record.strikes} packets affected")
    bad = [f"BAD: {'; '.join(record.defects)}", *counts.details] if record.defects else ["ok"]
    return "\n    ".join([", ".join([*words, f"{record.took_s:.0f} s"]), *bad])


def main() -> None:
    """Run the command line.

    Exit status 2: the run itself failed; 130: it was stopped. Records already in the journal are kept.
    """
    try:
        app()
    except (Stopped, KeyboardInterrupt):
        say("chaos: stopped")
        sys.exit(130)
    except BatonError as error:
        say(f"chaos: {error}")
        sys.exit(2)


if __name__ == "__main__":
    main()
