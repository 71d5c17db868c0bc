"""Record of one example: numbered calls, how often each rule was checked, and the first breach.

Calls without news (a poll that found nothing, a hook that returned None in an empty step) are left out, so
that the shrunk story of a failure is short enough to read.
"""

import reprlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

from baton.contract import KVConnectorTransferResults
from baton.core.errors import place_of
from baton.testing.contract.envelopes import RankNotes
from baton.testing.contract.rules import RULES

LINES_MAX = 120  # A longer story loses its beginning.

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60
_short.maxlist = _short.maxset = _short.maxdict = 8


def short(value: Any) -> str:
    """Return a value as one line of at most 100 characters."""
    request_id = getattr(value, "request_id", None)
    if isinstance(request_id, str):
        return request_id
    if isinstance(value, KVConnectorTransferResults):  # The repr is longer than a line.
        ids = (value.finished_sending, value.finished_recving, value.failed_recving)
        names = ("sent", "received", "failed")
        return ", ".join(f"{name} {short(i)}" for name, i in zip(names, ids, strict=True) if i) or "no ids"
    text = " ".join(_short.repr(value).split())
    return text if len(text) <= 100 else text[:97] + "..."


def why(error: BaseException) -> str:
    """Describe an exception of the connector and where it was raised."""
    return f"{type(error).__name__}: {error}{place_of(error)}"


class ContractBroken(AssertionError):
    """A connector broke `rule`; the message contains the story."""

    def __init__(self, rule: str, detail: str, story: str) -> None:
        super().__init__(f"{rule}: {RULES[rule].promise}\n  But: {detail}\n\n{story}")
        self.rule = rule
        self.detail = detail
        self.story = story


class Inconclusive(Exception):
    """Raised to end an example early without a verdict."""


@dataclass(frozen=True, slots=True)
class Breach:
    rule: str
    detail: str


class Story:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.checked: Counter[str] = Counter()  # Per rule: how often it was checked.
        self.seen: Counter[str] = Counter()  # Counts of events: loads, preemptions, aborts, ...
        self.breach: Breach | None = None  # The first breach.
        self.is_inconclusive = False  # The example ends early; no rule is checked any more.
        self.is_silent = False  # Calls belong to a diagnosis and are not recorded.
        self._end: int | None = None  # Number of lines up to the breach.

    def record_line(self, line: str) -> None:
        if self.is_silent or (self.lines and self.lines[-1] == line):
            return  # Repeated calls are recorded once.
        self.lines.append(line)

    def record_call(self, owner: str, method: str, arguments: tuple[Any, ...], answer: Any = None) -> None:
        call = f"{owner}.{method}({', '.join(map(short, arguments))})"
        self.record_line(call if answer is None else f"{call} -> {short(answer)}")

    def take_notes(self, engine: str, notes: RankNotes) -> None:
        """Record what one rank of `engine` has noted."""
        for line in notes.calls:
            self.record_line(f"{engine} {line}")
        self.checked.update(notes.checked)
        for rule, detail in notes.breaches:
            self.check(rule, False, detail)

    def check(self, rule: str, holds: bool, detail: str = "") -> bool:
        """Record a check and return `holds`. Only the first breach is reported."""
        assert rule in RULES, rule
        if self.is_inconclusive:
            return holds
        self.checked[rule] += 1
        if not holds and self.breach is None:
            self.breach = Breach(rule, detail)
            self.record_line(f"!! {detail}")
            self._end = len(self.lines)
        return holds

    def end_inconclusive(self, why: str) -> None:
        """End the example without a verdict: the connector raised an error that the kit had injected."""
        self.record_line(why)
        self.is_inconclusive = True

    def raise_if_broken(self) -> None:
        """Raises ContractBroken, or Inconclusive if the example ends early."""
        if self.breach is not None:
            raise ContractBroken(self.breach.rule, self.breach.detail, self.text())
        if self.is_inconclusive:
            raise Inconclusive

    @property
    def num_lines(self) -> int:
        return len(self.lines[: self._end])

    def text(self) -> str:
        numbered = [f"{number:4d}  {line}" for number, line in enumerate(self.lines[: self._end], start=1)]
        if len(numbered) > LINES_MAX:
            left_out = len(numbered) - LINES_MAX
            numbered = [f"      ... {left_out} calls before", *numbered[left_out:]]
        return "\n".join(numbered)
