"""Report page of a journal: sessions, goals, all tables, and skipped parts."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from lab.bench.compare.figures import Spread, difference, percentile, ratio
from lab.bench.compare.goals import Verdict, num_missed, single_of, verdict_word, verdicts_of
from lab.bench.compare.journal import Findings, read_journal
from lab.bench.compare.plots import draw
from lab.bench.compare.systems import SINGLES

NOTHING = ""
INTRODUCTION = """\
Made by `scripts/bench compare` (see [benchmarks.md](../benchmarks.md)). Loads and their figures are those of
`vllm bench serve`. Systems alternate round by round with the same prompts; while one is measured the others
are stopped. Ratios are medians over rounds, with the lowest and the highest."""
LOADS = {
    "c": "Pairs with their proxies, compared with a single engine",
    "a": "Decode engines asked directly, compared with a single engine without a connector",
    "d": "Single engines, each with one core for everything",
    "trace": "A slice of the Mooncake conversation trace, with its arrival times",
}


def write_report(journal: Path, page: Path) -> list[Path]:
    """Write the page and its plots. Raises ValueError for a file that is not a journal."""
    findings = read_journal(journal)
    page.parent.mkdir(parents=True, exist_ok=True)
    pictures = draw(findings, page.with_suffix(""))
    page.write_text(page_of(findings, pictures), encoding="utf-8")
    return [page, *pictures]


def page_of(findings: Findings, pictures: Sequence[Path] = ()) -> str:
    verdicts = verdicts_of(findings)
    parts = [
        "# Baton compared with its peers",
        INTRODUCTION,
        "\n".join((*_session_lines(findings), *_load_lines(findings))),
    ]
    if verdicts:
        parts += [f"## Goals: {num_missed(verdicts)} missed", _goals_table(verdicts)]
    parts += [f"![{picture.stem}]({picture.name})" for picture in pictures]
    for part, title in LOADS.items():
        if findings.settings(part):
            parts += [f"## {title}", _load_table(findings, part)]
    for title, table in (
        ("Answers of the embedded engine and of vLLM, compared with float64", _ties_table),
        ("Second legs on D, compared with the same prompt cached there", _legs_table),
        ("Raw transports: 64 MiB in shuffled blocks between two processes", _raw_table),
        ("An engine killed with -9 during a load", _faults_table),
        ("Start-up and memory", _start_table),
    ):
        if text := table(findings):
            parts += [f"## {title}", text]
    if findings.skipped:
        parts += ["## Skipped", "\n".join(_skipped_lines(findings))]
    return "\n\n".join(parts) + "\n"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; all columns but the first are numbers."""
    lines = ["| " + " | ".join(headings) + " |", "|---|" + "---:|" * (len(headings) - 1)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _session_lines(findings: Findings) -> Iterator[str]:
    for session in findings.sessions:
        versions = ", ".join(f"{name} {version}" for name, version in session["versions"].items())
        machine = f"{session['machine']}, {session['memory_gib']} GiB"
        yield f"* {session['date']}, commit {session['commit']}: {machine}"
        yield f"  * {versions}; options {session['options']}"


def _load_lines(findings: Findings) -> Iterator[str]:
    """Yield load averages. The system under test causes about two; the rest is other programs."""
    for part in findings.settings("machine"):
        loads = findings.values("machine", part, "all", "load_1min")
        median, most = percentile(loads, 0.5), max(loads)
        yield f"* load average while {part} was measured: {median:.1f}, at most {most:.1f}"


def _goals_table(verdicts: Sequence[Verdict]) -> str:
    rows = [(v.goal, v.what, v.measured, v.limit, verdict_word(v.is_met), v.why) for v in verdicts]
    return table(("goal", "what", "measured", "limit", "", "reason for a miss"), rows)


def _load_table(findings: Findings, part: str) -> str:
    headings = (
        "load",
        "system",
        "TTFT p50, ms",
        "p99",
        "of the single engine's",
        "ITL p50",
        "p99",
        "TPOT p50",
        "tokens/s",
        "CPU s",
        "failed",
        "differing",
        "of",
    )
    rows = []
    singles = {name: pair[0] for pair in SINGLES for name in pair}
    for setting in findings.settings(part):
        for system in findings.systems(part, setting):

            def of(metric: str, setting: str = setting, system: str = system) -> list[float]:
                return findings.values(part, setting, system, metric)

            reference = single_of(system) if part != "d" else singles[system]
            share = ratio(
                findings.rounds(part, setting, system, "ttft_s"),
                findings.rounds(part, setting, reference, "ttft_s"),
            )
            rows.append(
                (
                    setting,
                    system,
                    _ms(of("ttft_s"), 0.5),
                    _ms(of("ttft_s"), 0.99),
                    NOTHING if system == reference else _range(share, "{:.2f}"),
                    _ms(of("itl_s"), 0.5),
                    _ms(of("itl_s"), 0.99),
                    _ms(of("tpot_s"), 0.5),
                    _at(of("tokens_per_s"), 0.5, "{:.1f}"),
                    _at(of("cpu_s"), 0.5, "{:.1f}"),
                    _total(of("failed")),
                    _total(of("differing_answers")),
                    _total(of("answers")),
                )
            )
    return table(headings, rows)


def _ties_table(findings: Findings) -> str:
    rows = []
    for setting in findings.settings("ties"):

        def of(metric: str, setting: str = setting) -> list[float]:
            return findings.values("ties", setting, "baton", metric)

        rows.append(
            (
                setting,
                *(_total(of(kind)) for kind in ("equal", "tied", "different")),
                f"{max(of('shortfall'), default=0.0):.1e}",
                f"{max(of('error')):.1e}",
            )
        )
    headings = (
        *("load", "equal", "ties within rounding", "different"),
        *("largest shortfall of a token", "largest error of a logprob"),
    )
    return table(headings, rows) if rows else NOTHING


def _legs_table(findings: Findings) -> str:
    rows = []
    for setting in findings.settings("b"):
        for system in findings.systems("b", setting):

            def rounds(metric: str, setting: str = setting, system: str = system) -> dict[int, list[float]]:
                return findings.rounds("b", setting, system, metric)

            legs = findings.values("b", setting, system, "leg_s")
            more = difference(rounds("leg_s"), rounds("cached_s"))
            rows.append(
                (
                    setting,
                    system,
                    _ms(legs, 0.5),
                    _ms(findings.values("b", setting, system, "cached_s"), 0.5),
                    NOTHING if more is None else _range(_scaled(more, 1e3), "{:.1f}"),
                    _at(findings.values("b", setting, system, "gb_per_s"), 0.5, "{:.2f}"),
                    _at(findings.values("b", setting, system, "cpu_s_per_gb"), 0.5, "{:.2f}"),
                    _total(findings.values("b", setting, system, "differing_answers")),
                    str(len(legs)),
                )
            )
    headings = (
        *("prompt", "system", "leg, ms", "cached, ms", "more, ms"),
        *("GB/s in that time", "more CPU s per GB", "differing", "of"),
    )
    return table(headings, rows) if rows else NOTHING


def _raw_table(findings: Findings) -> str:
    settings = findings.settings("raw")
    rows = []
    for system in findings.systems("raw"):
        cells = []
        for setting in settings:
            speed = findings.values("raw", setting, system, "gb_per_s")
            cost = findings.values("raw", setting, system, "cpu_s_per_gb")
            shown = _at(speed, 0.5, "{:.2f}")
            cells.append(f"{shown} ({_at(cost, 0.5, '{:.2f}')})" if any(cost) else shown)
        rows.append((system, *cells))
    headings = ("GB/s (CPU s of both per GB)", *settings)
    return table(headings, rows) if rows else NOTHING


def _faults_table(findings: Findings) -> str:
    rows = []
    for setting in findings.settings("faults"):
        for system in findings.systems("faults", setting):

            def of(metric: str, setting: str = setting, system: str = system) -> list[float]:
                return findings.values("faults", setting, system, metric)

            counts = (_total(of(name)) for name in ("requests", "right", "wrong", "errors", "hung"))
            seconds = (
                _at(of(name), 0.5, "{:.1f}") or "never" for name in ("alone_s", "restart_s", "again_s")
            )
            rows.append((setting, system, *counts, *seconds))
    headings = (
        *("fault", "system", "requests", "right", "wrong", "errors", "hung"),
        *("s to an answer without it", "s to restart it", "s to an answer after that"),
    )
    return table(headings, rows) if rows else NOTHING


def _start_table(findings: Findings) -> str:
    rows = [
        (
            system,
            _at(findings.values("start", "to ready", system, "start_s"), 0.5, "{:.1f}"),
            _at(findings.values("start", "alive", system, "memory_gib"), 0.5, "{:.2f}"),
        )
        for system in findings.systems("start")
    ]
    return table(("system", "s until its engines are ready", "GiB of memory"), rows) if rows else NOTHING


def _skipped_lines(findings: Findings) -> Iterator[str]:
    seen = dict.fromkeys((one.part, one.what, one.reason) for one in findings.skipped)
    for part, what, reason in seen:
        yield f"* {part}: {what}: {' '.join(reason.split())[:300]}"


def _ms(values: Sequence[float], share: float) -> str:
    return _at([value * 1e3 for value in values], share, "{:.1f}")


def _at(values: Sequence[float], share: float, form: str) -> str:
    return form.format(percentile(values, share)) if values else NOTHING


def _total(values: Sequence[float]) -> str:
    return f"{sum(values):.0f}" if values else NOTHING


def _scaled(spread: Spread, factor: float) -> Spread:
    return Spread(spread.median * factor, spread.low * factor, spread.high * factor, spread.num_rounds)


def _range(spread: Spread | None, form: str) -> str:
    if spread is None:
        return NOTHING
    median, low, high = (form.format(value) for value in (spread.median, spread.low, spread.high))
    return f"{median} ({low} to {high})"
