"""Writes docs/chaos.md from the journal's records: a pure function."""

from collections.abc import Iterable, Sequence

from lab.chaos.cell import Record
from lab.chaos.faults import FAULTS
from lab.chaos.modes import MODES

# Goals in seconds for a quiet machine. A cell that misses one is listed, but is not bad.
WAIT_GOAL_S = 15.0
SERVES_GOAL_S = 2.0
RESET_GOAL_S = 1.0  # Time beyond the median wait for a request that was open when the fault began.
SILENCE_GOAL_S = 11.0  # The same for faults that reset no connection: `silence_s`, and the answer.
RESETTING = ("kill-", "core-", "front-", "reset")
PAUSE_GOAL_S = 1.0  # Pause after kill -9; the prefill or the pull comes on top.
STALL_GOAL_S = 7.0  # Pause while an engine is stopped: until the router gives its streams up, and a second.
SILENT = ("cut-", "partition", "vanish-")

_PREFACE = (
    "Written by `make chaos`; do not edit. Two prefill engines, two decode engines and a router run as real",
    "processes, each engine in its own network namespace. Six clients send questions without a pause: chats",
    "and completions, streamed and whole. A single engine answers the same questions; tokens and texts have",
    "to be equal, logprobs within 5e-3. *Wrong*, *unclear* (neither an answer nor an error in OpenAI's form)",
    "and *hung* must be 0. After the load all blocks must be free, with no process and no file left.",
    "",
    "*Median wait*: of right answers before the fault. *Open at begin*: from the fault's begin to the end",
    "of the last request that was open then. *Pause*: the longest one in a stream that was open then and is",
    "right: another engine has continued it. *Right after begin (end)*: from then to the first right",
    "answer to a request sent since. *Serves again*: from the first healthy answer of the fault's target",
    "engine to its first token. *Hands over again*: from then, or from the fault's end, until every pair of",
    "a prefill and a decode engine has moved KV. *Pools whole*: from the last answer until all blocks were",
    "free.",
)
_COLUMNS = (
    "fault",
    "requests",
    "right",
    "clear errors",
    "wrong",
    "unclear",
    "hung",
    "left",
    "median wait, s",
    "longest wait, s",
    "open at begin, s",
    "pause, s",
    "right after begin, s",
    "right after end, s",
    "serves again, s",
    "hands over again, s",
    "pools whole, s",
    "processes left",
    "files left",
)


def latest(records: Iterable[Record]) -> dict[tuple[str, str], Record]:
    """Return the last record of each cell, by mode and fault."""
    return {(record.mode, record.fault): record for record in records}


def summary(records: Iterable[Record]) -> str:
    """Return one sentence with the total counts."""
    ran = [record for record in records if record.skipped is None]
    counts = [record.counts for record in ran if record.counts is not None]
    bad = sum(bool(record.defects) for record in ran)
    return (
        f"{len(ran)} cells, {sum(c.requests for c in counts)} requests: "
        f"{sum(c.right for c in counts)} right, "
        f"{sum(c.clear_errors for c in counts)} clear errors, {sum(c.left for c in counts)} left by their "
        f"clients, {sum(c.wrong for c in counts)} wrong, {sum(c.unclear for c in counts)} unclear, "
        f"{sum(c.hung for c in counts)} hung; {bad} cells are bad."
    )


def write_report(records: Sequence[Record], *, machine: str, date: str) -> str:
    """Return the report in Markdown. Cells follow the order of the tables of faults and modes."""
    cells = latest(records)
    modes = [mode for mode in MODES if any(key[0] == mode.name for key in cells)]
    faults = [fault for fault in FAULTS if any(key[1] == fault.name for key in cells)]
    commits = sorted({record.commit for record in cells.values()})
    lines = [
        "# Chaos matrix",
        "",
        *_PREFACE,
        "",
        f"{date}, commit {', '.join(commits)}, {machine}. {summary(cells.values())}",
        "",
        "## Faults and modes",
        "",
        "`ok`: a good cell; `BAD`: listed below; `-`: the fault does not apply, or was not run.",
        "",
        "| fault | " + " | ".join(mode.name for mode in modes) + " | what it does |",
        "|---|" + "---|" * (len(modes) + 1),
    ]
    for fault in faults:
        marks = [_mark(cells.get((mode.name, fault.name))) for mode in modes]
        what = f"{fault.what} (open: {fault.open_defects})" if fault.open_defects else fault.what
        lines.append(f"| {fault.name} | " + " | ".join(marks) + f" | {what} |")
    for mode in modes:
        ordered = [record for fault in FAULTS if (record := cells.get((mode.name, fault.name))) is not None]
        lines += ["", f"## {mode.name}: {mode.what}", ""]
        lines += ["| " + " | ".join(_COLUMNS) + " |", "|---|" + "---:|" * (len(_COLUMNS) - 1)]
        lines += [_row(record) for record in ordered if record.counts is not None]
        skipped = [record for record in ordered if record.skipped is not None]
        lines += ["", *(f"* {record.fault}: not run; {record.skipped}" for record in skipped)]
    errors = sorted({(message, key) for key, record in cells.items() for message in _errors(record)})
    if errors:
        lines += ["", "## Clear errors", ""]
        lines += [f"* {mode}, {fault}: {message}" for message, (mode, fault) in errors]
    bad = [record for record in cells.values() if record.defects]
    if bad:
        lines += ["", "## Bad cells", ""]
        lines += [f"* {record.mode}, {record.fault}: {'; '.join(record.defects)}" for record in bad]
        for record in bad:
            if record.counts is not None and record.counts.details:
                lines += ["", f"{record.mode}, {record.fault}:", ""]
                lines += [f"    {detail}" for detail in record.counts.details]
    late = [sentence for record in cells.values() for sentence in _missed_goals(record)]
    if late:
        lines += ["", "## Missed goals", "", *(f"* {sentence}" for sentence in late)]
    return "\n".join(lines).rstrip() + "\n"


def _errors(record: Record) -> tuple[str, ...]:
    return record.counts.errors if record.counts is not None else ()


def _mark(record: Record | None) -> str:
    if record is None or record.skipped is not None:
        return "-"
    return "BAD" if record.defects else "ok"


def _row(record: Record) -> str:
    counts = record.counts
    assert counts is not None
    values: list[str | int] = [
        record.fault,
        counts.requests,
        counts.right,
        counts.clear_errors,
        counts.wrong,
        counts.unclear,
        counts.hung,
        counts.left,
        _seconds(counts.median_wait_s),
        _seconds(counts.longest_wait_s),
        _seconds(counts.open_longest_s),
        _seconds(counts.open_pause_s),
        _seconds(counts.after_begin_s),
        _seconds(counts.after_end_s),
        _seconds(record.serves_again_s),
        _seconds(record.hands_over_again_s),
        "no" if record.held else _seconds(record.rest_s),
        len(record.processes_left),
        record.files_left,
    ]
    return "| " + " | ".join(str(value) for value in values) + " |"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _beyond_median_s(record: Record) -> float:
    counts = record.counts
    if counts is None or counts.open_longest_s is None or counts.median_wait_s is None:
        return 0.0
    return counts.open_longest_s - counts.median_wait_s


def _missed_goals(record: Record) -> list[str]:
    cell = f"{record.mode}, {record.fault}"
    missed = []
    if record.counts is not None and record.counts.longest_wait_s > WAIT_GOAL_S:
        missed.append(f"{cell}: a request waited {record.counts.longest_wait_s:.1f} s (goal {WAIT_GOAL_S:g})")
    late_s = _beyond_median_s(record)
    if record.fault.startswith(RESETTING) and late_s > RESET_GOAL_S:
        missed.append(f"{cell}: open requests ended {late_s:.1f} s late (goal {RESET_GOAL_S:g})")
    if record.fault.startswith(SILENT) and late_s > SILENCE_GOAL_S:
        missed.append(f"{cell}: open requests ended {late_s:.1f} s late (goal {SILENCE_GOAL_S:g})")
    pause_s = record.counts.open_pause_s if record.counts is not None else None
    pause_goal_s = STALL_GOAL_S if record.fault.startswith("stop-d") else PAUSE_GOAL_S
    if (
        record.fault.startswith(("kill-d", "core-d", "stop-d"))
        and pause_s is not None
        and pause_s > pause_goal_s
    ):
        missed.append(f"{cell}: a stream paused {pause_s:.1f} s (goal {pause_goal_s:g})")
    if record.serves_again_s is not None and record.serves_again_s > SERVES_GOAL_S:
        missed.append(f"{cell}: served {record.serves_again_s:.1f} s after healthy (goal {SERVES_GOAL_S:g})")
    if record.strikes == 0:
        missed.append(f"{cell}: the fault affected no packet, so the cell shows nothing")
    return missed
