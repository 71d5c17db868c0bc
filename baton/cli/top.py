"""`baton top`: shows a router's fleet in a terminal, from the same stream of events as its page."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.http_options import CA_HELP, verifying

if TYPE_CHECKING:
    import httpx
    from rich.console import RenderableType
    from rich.table import Table

app = typer.Typer(help="Show a router's fleet in the terminal, as it changes.")

KEY_ENV = "BATON_API_KEY"
CONNECT_S = 10.0
SILENT_S = 10.0  # The router sends something each second.
AGAIN_S = 2.0  # Time from the end of a stream to the next try.
NUM_EVENTS, NUM_FLOWS = 8, 8
STATES_OF_ONE = 5  # Seconds; the router knows rates when it has read its engines twice.
STYLES = {"up": "green", "down": "bold red", "refused": "bold red", "slow": "yellow"}
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="Of the router, or of its admin port.", metavar="URL")],
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help=f"File whose first line is a key of the router's administrator (or {KEY_ENV}).",
            show_default=False,
        ),
    ] = None,
    ca: Annotated[Path | None, typer.Option(help=CA_HELP, show_default=False)] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, after some seconds, and end.")
    ] = False,
) -> None:
    """Show engines, queues, latencies, flows of KV, and events. Ctrl-C ends it.

    The exit status is 1 if the router cannot be asked.
    """
    import httpx
    from rich.console import Console
    from rich.live import Live

    console, base = Console(), (url if "://" in url else f"http://{url}").rstrip("/")
    verify = verifying(ca)
    with httpx.Client(
        base_url=base, headers=_headers(api_key_file), timeout=CONNECT_S, verify=verify
    ) as client:
        if once:
            try:
                with client.stream("GET", "/fleet/stream", timeout=SILENT_S) as answer:
                    answer.raise_for_status()
                    states = list(islice(read_states(answer.iter_lines()), STATES_OF_ONE))
            except httpx.HTTPError as error:
                typer.echo(f"{base} does not show its fleet: {error}", err=True)
                raise typer.Exit(1) from error
            if not states:
                typer.echo(f"{base} is stopping", err=True)
                raise typer.Exit(1)
            console.print(frame(states[-1]))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            try:
                for shown in _frames(client, base):
                    live.update(shown, refresh=True)
            except KeyboardInterrupt:
                return


def _headers(api_key_file: Path | None) -> dict[str, str]:
    key = os.environ.get(KEY_ENV, "")
    if api_key_file is not None:
        try:
            key = api_key_file.read_text()
        except OSError as error:
            raise typer.BadParameter(str(error), param_hint="--api-key-file") from error
    keys = key.split()
    return {"authorization": f"Bearer {keys[0]}"} if keys else {}


def _frames(client: httpx.Client, base: str) -> Iterator[RenderableType]:
    """One for each event, and one for each attempt that fails. Does not end by itself."""
    import httpx
    from rich.text import Text

    while True:
        try:
            with client.stream("GET", "/fleet/stream", timeout=SILENT_S) as answer:
                answer.raise_for_status()
                for state in read_states(answer.iter_lines()):
                    yield frame(state)
        except httpx.HTTPError as error:
            yield Text(f"{base} does not answer: {error}", style="bold red")
        time.sleep(AGAIN_S)


def read_states(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """States of the fleet from the lines of a stream. A later one keeps the columns and events before it."""
    import json

    columns: dict[float, Any] = {}
    events: dict[int, Any] = {}
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: ") and name != "end":
            state = json.loads(line.removeprefix("data: "))
            if name == "snapshot":
                columns.clear()
                events.clear()
            columns.update((one["unix_s"], one) for one in state["latencies"]["columns"])
            events.update((one["number"], one) for one in state["events"])
            state["latencies"]["columns"] = [columns[at] for at in sorted(columns)][-6:]
            state["events"] = [events[number] for number in sorted(events)][-NUM_EVENTS:]
            yield state


# --- One frame


def frame(state: dict[str, Any]) -> RenderableType:
    """`state`: as /fleet/snapshot has it."""
    from rich.console import Group
    from rich.text import Text

    head = Text.assemble(
        ("Baton router ", "bold"),
        f"{state['version']}  {state['mode']}, policy {state['policy']}  ",
        (", ".join(state["models"]), "cyan"),
        *((f"  update under way: {one}", "bold yellow") for one in map(update, state.get("updates", ()))),
    )
    latencies = state["latencies"]
    figures = [
        ("requests", f"{state['requests_per_s']:.1f}/s"),
        ("in flight", f"{state['in_flight']}"),
        ("waiting", f"{state['waiting']}"),
        ("refused", f"{state['refused_per_s']:.1f}/s"),
        ("failed", f"{state['failed_per_s']:.1f}/s"),
        *(
            (f"{name} p{100 * share:.0f}", seconds(quantile(latencies, name.lower(), share)))
            for name in ("TTFT", "ITL")
            for share in (0.5, 0.95)
        ),
    ]
    line = Text("   ").join(Text.assemble(f"{name} ", (value, "bold")) for name, value in figures)
    return Group(head, line, Text(), _engines(state), _flows(state), _events(state))


def update(one: dict[str, Any]) -> str:
    return f"{one['model']} " + ", ".join(f"{name} on {num}" for name, num in one["weights"].items())


def _table(title: str, columns: Sequence[tuple[str, bool]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, expand=True)
    for name, is_number in columns:
        table.add_column(name, justify="right" if is_number else "left", overflow="fold")
    return table


def _engines(state: dict[str, Any]) -> Table:
    from rich.text import Text

    columns = [("engine", False), ("role", False), ("state", False), ("weights", False)]
    columns += [(name, True) for name in ("now", "queue", "speed", "GPU", "host", "hits", "KV in")]
    table = _table("Engines", columns)
    for one in state["engines"]:
        metrics = one["metrics"] or {}
        rate, step_s = one["prefill_tokens_per_s"], one["step_s"]
        speed = f"{rate:.0f} tok/s" if one["type"] == "prefill" and rate is not None else "–"
        if one["type"] == "decode" and step_s is not None:
            speed = f"{seconds(step_s)}/tok"
        table.add_row(
            Text(_short(one["url"])),  # Not markup: what engines report is text.
            one["type"],
            Text(one["state"], STYLES.get(one["state"], "yellow")),
            Text(one["weights"] or "–"),
            f"{one['in_flight']}",
            f"{one['queued_tokens']}",
            speed,
            *(_share(metrics.get(name)) for name in ("gpu_usage", "host_usage", "hit_rate")),
            _share(metrics.get("external_hit_rate")),
        )
    return table


def _flows(state: dict[str, Any]) -> Table:
    from rich.text import Text

    columns = [("flow", False), ("KV", True), ("handoff", True), ("handoffs", True), ("total", True)]
    table = _table("Flows", [*columns, ("state", False)])
    pairs = sorted(state["pairs"], key=lambda pair: (-(pair["bytes_per_s"] or 0.0), -pair["handed_over"]))
    for pair in pairs[:NUM_FLOWS]:
        wire_ms, rate = pair["wire_ms"], pair["bytes_per_s"]
        table.add_row(
            Text(f"{_short(pair['prefill'])} → {_short(pair['decode'])}"),
            "–" if rate is None else f"{num_bytes(rate)}/s",
            "–" if wire_ms is None else seconds(wire_ms / 1e3),
            f"{pair['handoffs_per_s']:.1f}/s",
            f"{pair['handed_over']}",
            Text("usable" if pair["usable"] else f"stopped: {pair['reason']}"),
        )
    return table


def _events(state: dict[str, Any]) -> Table:
    from rich.text import Text

    table = _table("Events", [("time", False), ("event", False), ("engine", False), ("why", False)])
    for one in reversed(state["events"][-NUM_EVENTS:]):
        times = f" ({one['count']} times)" if one["count"] > 1 else ""
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(one["last_unix_s"])),
            Text(one["kind"].replace("_", " "), STYLES.get(one["kind"], "yellow")),
            Text(_short(one["engine"] or "")),
            Text(one["why"] + times),
        )
    return table


def quantile(latencies: dict[str, Any], name: str, share: float) -> float | None:
    """The quantile in seconds, over the columns that are there. None: nothing was measured."""
    bounds_s, counts = latencies["bounds_s"][name], [one[name] for one in latencies["columns"] if name in one]
    total = [sum(numbers) for numbers in zip(*counts, strict=True)]
    left = share * sum(total)
    if not sum(total):
        return None
    for bucket, count in enumerate(total):
        if left <= count:
            low = bounds_s[bucket - 1] if bucket else 0.0
            high = bounds_s[min(bucket, len(bounds_s) - 1)]
            return float(low + (high - low) * left / count) if count else float(low)
        left -= count
    return float(bounds_s[-1])


def seconds(value_s: float | None) -> str:
    if value_s is None:
        return "–"
    return f"{1e3 * value_s:.1f} ms" if value_s < 1.0 else f"{value_s:.2f} s"


def num_bytes(value: float) -> str:
    for size, unit in UNITS:
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def _short(url: str) -> str:
    return url.removeprefix("http://")
