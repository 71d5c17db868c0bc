"""Counts words that make the text hard to read, and fails where a word has more uses than its limit.

`--counts` prints the counts and the limits. Lower a limit whenever its count has fallen.
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPENING = "module docstring that opens with What, Who, Which or How"
LIMITS = {
    "behind": 0,
    "nobody": 1,
    "whoever": 0,
    "said": 6,
    "who": 13,
    OPENING: 0,
}
PATTERNS = {word: re.compile(rf"\b{word}\b", re.IGNORECASE) for word in LIMITS if word != OPENING}
PATTERNS[OPENING] = re.compile(r'\A"""(?:What|Who|Which|How)\b')
TEXTS = ("baton/*.py", "benchmarks/*.py", "chaos/*.py", "tests/*.py", "README.md", "docs/*.md")
EXCEPT = ("docs/log", "docs/chaos.md", "docs/soak.md", "docs/benchmarks/")


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--", *TEXTS], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [ROOT / name for name in listed.stdout.splitlines() if not name.startswith(EXCEPT)]


def uses(files: Iterable[Path]) -> dict[str, list[str]]:
    """Return `file:line` of every use of each word."""
    found: dict[str, list[str]] = {word: [] for word in LIMITS}
    for file in files:
        text = file.read_text() if file.is_file() else ""
        for word, pattern in PATTERNS.items():
            found[word] += [
                f"{file}:{text.count(chr(10), 0, use.start()) + 1}" for use in pattern.finditer(text)
            ]
    return found


def main(arguments: list[str]) -> int:
    """Check the given files, or all texts. Exit status 1: a word has more uses than its limit."""
    names = [Path(name) for name in arguments if name != "--counts"]
    excess = False
    for word, places in uses(names or tracked()).items():
        if "--counts" in arguments:
            print(f"{word}: {len(places)} of {LIMITS[word]}")
        elif len(places) > LIMITS[word]:
            excess = True
            print(f"{word}: {len(places)} uses, at most {LIMITS[word]} allowed:", *places, sep="\n  ")
    return int(excess)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
