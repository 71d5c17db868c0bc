"""Plots of a journal, one PNG each; parts that were not measured have none."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lab.bench.compare.figures import difference, median_by_round, percentile
from lab.bench.compare.journal import Findings

INCHES = (8, 4.5)
DOTS_PER_INCH = 110


def draw(findings: Findings, stem: Path) -> list[Path]:
    """Write files named after `stem`; none if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pictures: list[tuple[str, str, Callable[[Any, Findings], bool]]] = [
        ("ttft", "Time to the first token through the proxy, ms (p50)", _first_tokens),
        ("second-leg", "Second leg over the same prompt cached on D, ms (median)", _second_legs),
        ("embedded", "Tokens per second of one engine on one core (median)", _singles),
        ("raw", "Raw transports, GB/s", _raw),
        ("trace", "Trace: share of requests whose first token came within s", _trace),
    ]
    paths = []
    for name, title, plot in pictures:
        figure, axes = pyplot.subplots(figsize=INCHES)
        if plot(axes, findings):
            axes.set_title(title)
            axes.grid(visible=True, alpha=0.3)
            axes.legend(fontsize="small")
            figure.tight_layout()
            paths.append(stem.with_name(f"{stem.name}-{name}.png"))
            figure.savefig(paths[-1], dpi=DOTS_PER_INCH)
        pyplot.close(figure)
    return paths


def _first_tokens(axes: Any, findings: Findings) -> bool:
    settings = [name for name in findings.settings("c") if name.endswith(" 1 at once")]
    for system in findings.systems("c"):
        points = [
            (int(setting.split()[0]), 1e3 * percentile(values, 0.5))
            for setting in settings
            if (values := findings.values("c", setting, system, "ttft_s"))
        ]
        if points:
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=system)
    axes.set(xlabel="prompt tokens", xscale="log", yscale="log")
    return bool(axes.lines)


def _second_legs(axes: Any, findings: Findings) -> bool:
    return _bars(axes, findings, "b", findings.settings("b"), _more_ms)


def _more_ms(findings: Findings, setting: str, system: str) -> float | None:
    more = difference(
        findings.rounds("b", setting, system, "leg_s"), findings.rounds("b", setting, system, "cached_s")
    )
    return None if more is None else more.median * 1e3


def _singles(axes: Any, findings: Findings) -> bool:
    return _bars(axes, findings, "d", findings.settings("d"), _throughput)


def _throughput(findings: Findings, setting: str, system: str) -> float | None:
    rounds = median_by_round(findings.rounds("d", setting, system, "tokens_per_s"))
    return percentile(list(rounds.values()), 0.5) if rounds else None


def _bars(
    axes: Any,
    findings: Findings,
    part: str,
    settings: Sequence[str],
    height: Callable[[Findings, str, str], float | None],
) -> bool:
    """Draw groups of bars: one group per setting, one bar per system."""
    systems = findings.systems(part)
    width = 0.8 / max(1, len(systems))
    for index, system in enumerate(systems):
        heights = [height(findings, setting, system) or 0.0 for setting in settings]
        places = [place + index * width for place in range(len(settings))]
        axes.bar(places, heights, width, label=system)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(settings))], settings)
    return bool(systems)


def _raw(axes: Any, findings: Findings) -> bool:
    settings = findings.settings("raw")
    for system in findings.systems("raw"):
        points = [
            (int(setting.split()[0]), percentile(values, 0.5))
            for setting in settings
            if (values := findings.values("raw", setting, system, "gb_per_s"))
        ]
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=system)
    axes.set(xlabel="KiB of a block", xscale="log")
    return bool(axes.lines)


def _trace(axes: Any, findings: Findings) -> bool:
    for setting in findings.settings("trace"):
        for system in findings.systems("trace", setting):
            values = sorted(findings.values("trace", setting, system, "ttft_s"))
            if values:
                shares = [(index + 1) / len(values) for index in range(len(values))]
                axes.step(values, shares, where="post", label=system)
    axes.set(xlabel="s")
    return bool(axes.lines)
