"""Journal of a session: one JSON object per line, written at once, so that an interrupted session keeps it.

{"kind": "session", "date": ..., "machine": ..., "commit": ..., "versions": {...}, "options": {...}}
{"kind": "samples", "part": "c", "setting": "in 512", "system": "vllm", "metric": "ttft_s", "round": 1,
 "values": [0.91, 0.92]}
{"kind": "skipped", "part": "raw", "what": "Mooncake", "reason": ...}
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

DIGITS = 6  # Decimals of a value; for seconds, microseconds.


@dataclass(frozen=True, slots=True)
class Samples:
    """Values of one metric of one system in one round; the metric's name ends in its unit."""

    part: str
    setting: str
    system: str
    metric: str
    round: int
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Skipped:
    part: str
    what: str
    reason: str


@dataclass(slots=True)
class Findings:
    """Contents of a journal."""

    sessions: list[dict[str, Any]] = field(default_factory=list)
    samples: list[Samples] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def rounds(self, part: str, setting: str, system: str, metric: str) -> dict[int, list[float]]:
        found: dict[int, list[float]] = defaultdict(list)
        for one in self.samples:
            if (one.part, one.setting, one.system, one.metric) == (part, setting, system, metric):
                found[one.round] += one.values
        return dict(found)

    def values(self, part: str, setting: str, system: str, metric: str) -> list[float]:
        rounds = self.rounds(part, setting, system, metric)
        return [value for number in sorted(rounds) for value in rounds[number]]

    def settings(self, part: str) -> list[str]:
        return list(dict.fromkeys(one.setting for one in self.samples if one.part == part))

    def not_measured(self, parts: Sequence[str]) -> list[str]:
        """Return the `parts` without a figure of any system."""
        measured = {one.part for one in self.samples}
        return [part for part in parts if part not in measured]

    def systems(self, part: str, setting: str | None = None) -> list[str]:
        return list(
            dict.fromkeys(
                one.system for one in self.samples if one.part == part and setting in (None, one.setting)
            )
        )


class Journal:
    """Writes a journal. An existing file is extended: new rounds are numbered after its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _drop_unfinished_line(path)
        before = read_journal(path) if path.exists() else Findings()
        self._round = max((one.round for one in before.samples), default=0)
        self._file: TextIO = path.open("a", encoding="utf-8")

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *unused: object) -> None:
        self._file.close()

    def next_round(self) -> int:
        """Return a new round number. Measurements of one round alternated and may be compared."""
        self._round += 1
        return self._round

    def session(self, facts: dict[str, Any]) -> None:
        self._write({"kind": "session", **facts})

    def samples(
        self, part: str, setting: str, system: str, metric: str, number: int, values: Iterable[float]
    ) -> None:
        """Write samples. `number`: from `next_round`."""
        rounded = tuple(round(value, DIGITS) for value in values)
        one = Samples(part, setting, system, metric, number, rounded)
        self._write({"kind": "samples", **asdict(one)})

    def skipped(self, part: str, what: str, reason: str) -> None:
        self._write({"kind": "skipped", **asdict(Skipped(part, what, reason))})

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def read_journal(path: Path) -> Findings:
    """Read a journal without an unfinished last line. Raises ValueError for another bad record."""
    findings = Findings()
    for record in _records(path.read_text(encoding="utf-8").split("\n")):
        match record.pop("kind", None):
            case "session":
                findings.sessions.append(record)
            case "samples":
                findings.samples.append(Samples(**{**record, "values": tuple(record["values"])}))
            case "skipped":
                findings.skipped.append(Skipped(**record))
            case kind:
                raise ValueError(f"{path} has a record of unknown kind {kind!r}")
    return findings


def _drop_unfinished_line(path: Path) -> None:
    """Drop the last line of a session that was killed while it wrote."""
    with path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def _records(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the records. All but the last line ended with a newline, so they are complete."""
    for line in lines[:-1]:
        if line:
            yield json.loads(line)
