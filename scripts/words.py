"""Counts words that make the text hard to read, and fails where a word has more uses than its limit.

It also counts comments and docstrings that open with a preposition or a pronoun ("Of this engine."): their
subject stands elsewhere, and the reader has to look for it.

`--counts` prints the counts and the limits. Lower a limit whenever its count has fallen.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPENING = "module docstring that opens with What, Who, Which or How"
FRAGMENT = "comment or docstring that opens with a preposition or pronoun"
LIMITS = {
    "behind": 0,
    "nobody": 1,
    "whoever": 0,
    "said": 6,
    "who": 13,
    OPENING: 0,
    FRAGMENT: 0,
}
WORDS = [word for word in LIMITS if word not in (OPENING, FRAGMENT)]
PATTERNS = {word: re.compile(rf"\b{word}\b", re.IGNORECASE) for word in WORDS}
PATTERNS[OPENING] = re.compile(r'\A"""(?:What|Who|Which|How)\b')
FRAGMENTS = re.compile(
    r"(?:After|Among|As|At|Before|Beside|Besides|Between|By|For|From|In|Into|It|Its|Of|On|Over|Since|Than|That"
    r"|Their|Them|They|Through|To|Under|Until|Which|Whose|With|Within|Without)(?![\w-])"
)
TEXTS = (
    "baton/*.py",
    "lab/*.py",
    "examples/*.py",
    "tests/*.py",
    "README.md",
    "docs/*.md",
)
EXCEPT = ("docs/log", "docs/chaos.md", "docs/soak.md", "docs/benchmarks/")


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--", *TEXTS], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [ROOT / name for name in listed.stdout.splitlines() if not name.startswith(EXCEPT)]


def remarks(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring, and of each comment's beginning."""
    for node in ast.walk(ast.parse(text)):
        is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_documented and (docstring := ast.get_docstring(node)):
            yield node.body[0].lineno, docstring
    comment_above = 0  # The line of the last comment that has a line of its own.
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, is_own = token.start[0], token.line.lstrip().startswith("#")
            if not is_own or comment_above != line - 1:
                yield line, token.string.lstrip("#: ")
            comment_above = line if is_own else 0


def fragments(text: str) -> Iterator[int]:
    """Yield the lines of comments and docstrings whose subject stands elsewhere."""
    for line, remark in remarks(text):
        if FRAGMENTS.match(remark):
            yield line


def uses(files: Iterable[Path]) -> dict[str, list[str]]:
    """Return `file:line` of every use of each word."""
    found: dict[str, list[str]] = {word: [] for word in LIMITS}
    for file in files:
        text = file.read_text() if file.is_file() else ""
        for word, pattern in PATTERNS.items():
            found[word] += [
                f"{file}:{text.count(chr(10), 0, use.start()) + 1}" for use in pattern.finditer(text)
            ]
        if file.suffix == ".py":
            found[FRAGMENT] += [f"{file}:{line}" for line in fragments(text)]
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
