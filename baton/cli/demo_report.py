"""Output of the demo: a row per prompt, then the sum and the verdict."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table

from baton.cli.demo_check import Outcome
from baton.cli.demo_rounds import RoundsOutcome


def make_table(outcomes: Sequence[Outcome], *, mode: str = "pull") -> Table:
    """Make the table. In push a handoff begins with the prefill, so its time includes the prefill."""
    headings = ("tokens", "cached\non D", "moved", "handoff\nms", "wire\nGB/s", "TTFT\nms")
    table = _table(f"Prefill on one engine (P), decode on another (D), {mode}", headings)
    for number, outcome in enumerate(outcomes, start=1):
        speed = outcome.bytes_per_s
        table.add_row(
            str(number),
            outcome.prompt.kind,
            f"{len(outcome.prompt.token_ids):,}",
            f"{outcome.cached_tokens:,}",
            _size(outcome.moved_bytes) if outcome.moved_bytes else "-",
            f"{1e3 * outcome.transfer_s:.1f}" if outcome.moved_bytes else "-",
            f"{speed / 1e9:.2f}" if speed is not None else "-",
            f"{1e3 * outcome.first_token_s:.0f}",
            _verdict(outcome.is_equal, "not moved" if outcome.was_not_moved else ""),
        )
    return table


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("#", justify="right")
    table.add_column("prompt", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("equal", no_wrap=True)
    return table


def make_rounds_table(outcomes: Sequence[RoundsOutcome], *, title: str) -> Table:
    table = _table(title, ("tokens", "1st: moved", "TTFT\nms", "2nd: loaded", "TTFT\nms"))
    for number, outcome in enumerate(outcomes, start=1):
        moved = sum(outcome.first.moved_bytes.values())
        loaded = outcome.loaded_bytes
        table.add_row(
            str(number),
            outcome.prompt.kind,
            f"{len(outcome.prompt.token_ids):,}",
            _size(moved) if moved else "-",
            f"{1e3 * outcome.first.first_token_s:.0f}",
            _size(loaded) if loaded else "-",
            f"{1e3 * outcome.second.first_token_s:.0f}",
            _verdict(outcome.is_equal, "not loaded" if outcome.was_not_loaded else ""),
        )
    return table


def print_rounds_summary(
    console: Console, outcomes: Sequence[RoundsOutcome], *, took_s: float, log_folder: Path
) -> None:
    num_equal = sum(outcome.is_equal for outcome in outcomes)
    loaded = [n for outcome in outcomes if (n := outcome.loaded_bytes)]
    moved = sum(sum(outcome.first.moved_bytes.values()) for outcome in outcomes)
    first_ms, second_ms = (
        1e3 * median(getattr(outcome, round_).first_token_s for outcome in outcomes)
        for round_ in ("first", "second")
    )
    in_the_first = f"{_size(moved)} were moved in the first; " if moved else ""
    console.print(
        f"{num_equal} of {len(outcomes)} answers equal a single engine's, token by token, in both rounds. "
        f"{in_the_first}{len(loaded)} prompts were loaded from the store with {_size(sum(loaded))}; "
        f"median TTFT {first_ms:.0f} ms, then {second_ms:.0f} ms; {took_s:.0f} s in all.",
        soft_wrap=True,
    )
    for number, outcome in enumerate(outcomes, start=1):
        for name, answer in (("first", outcome.first), ("second", outcome.second)):
            if answer.tokens != outcome.expected or not outcome.expected:
                console.print(
                    f"[red]#{number} differs[/] in the {name} round, "
                    f"at {_where(outcome.expected, answer.tokens)}",
                    soft_wrap=True,
                )
        if outcome.is_equal and outcome.was_not_loaded:
            console.print(f"[red]#{number} was not loaded[/]: its prompt was computed again")
    if not all(outcome.is_good for outcome in outcomes):
        console.print(f"Something is wrong; the engines' logs are in {log_folder}.", soft_wrap=True)


def print_summary(
    console: Console,
    outcomes: Sequence[Outcome],
    *,
    took_s: float,
    model: Path,
    log_folder: Path,
    command: str = "baton",
) -> None:
    num_equal = sum(outcome.is_equal for outcome in outcomes)
    moved = [outcome for outcome in outcomes if outcome.moved_bytes]
    moved_bytes = sum(outcome.moved_bytes for outcome in moved)
    wire_s = sum(outcome.wire_s for outcome in moved)
    speed = f" at {moved_bytes / wire_s / 1e9:.2f} GB/s on the wire" if wire_s else ""
    first_token_ms = 1e3 * median(outcome.first_token_s for outcome in outcomes)
    console.print(
        f"{num_equal} of {len(outcomes)} answers equal a single engine's, token by token. "
        f"{len(moved)} handoffs moved {_size(moved_bytes)}{speed}; "
        f"median TTFT {first_token_ms:.0f} ms; {took_s:.0f} s in all.",
        soft_wrap=True,
    )
    for number, outcome in enumerate(outcomes, start=1):
        if not outcome.is_equal:
            where = _where(outcome.expected, outcome.got)
            console.print(f"[red]#{number} differs[/] at {where}", soft_wrap=True)
        elif outcome.was_not_moved:
            console.print(f"[red]#{number} was not handed over[/]: the decode engine computed its prompt")
    if all(outcome.is_good for outcome in outcomes):
        console.print(
            f"Next: [bold]{command} up {model}[/] and use it with any OpenAI client.", soft_wrap=True
        )
    else:
        console.print(f"Something is wrong; the engines' logs are in {log_folder}.", soft_wrap=True)


def _verdict(is_equal: bool, complaint: str) -> str:
    if not is_equal:
        return "[red]NO[/]"
    return f"[red]{complaint}[/]" if complaint else "[green]yes[/]"


def _where(expected: Sequence[int], got: Sequence[int]) -> str:
    for position, (wanted, found) in enumerate(zip(expected, got, strict=False)):
        if wanted != found:
            return f"token {position}: {found} instead of {wanted}"
    return f"its length: {len(got)} tokens instead of {len(expected)}"


def _size(nbytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} B"
