"""`scripts/words.py`, the part of `make check` that limits words."""

import subprocess
import sys
from pathlib import Path

WORDS = Path(__file__).parents[2] / "scripts" / "words.py"
OPENING = "What"


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(WORDS), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def limits(file: Path) -> dict[str, int]:
    counted = [line.rsplit(": ", 1) for line in run("--counts", str(file)).stdout.splitlines()]
    return {word: int(counts.split()[-1]) for word, counts in counted}


def test_an_excess_word_fails_and_is_located(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text('"""A module."""\n')
    word, limit = next(iter(limits(file).items()))
    file.write_text('"""A module."""\n' + f"# {word.upper()}\n" * limit)
    assert run(str(file)).returncode == 0
    file.write_text(file.read_text() + f"# {word}\n")
    done = run(str(file))
    assert done.returncode == 1
    assert f"{file}:{limit + 2}\n" in done.stdout


def test_a_docstring_that_opens_with_a_question_word_counts(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(f'"""{OPENING} it does."""\n')
    (tmp_path / "two.py").write_text('"""A module."""\n')
    done = run("--counts", str(tmp_path / "one.py"), str(tmp_path / "two.py"))
    assert "How: 1 of 0" in done.stdout


def test_a_comment_without_its_subject_is_located(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        '"""A module."""\n\n# The first line of a comment\n# of two lines.\nvalue = 1  # Of this module.\n'
        '# It is large.\nsize = value  # Ofen.\n\n\ndef grow() -> None:\n    """After a start."""\n'
    )
    done = run(str(file))
    assert done.returncode == 1
    assert [line.strip() for line in done.stdout.splitlines()[1:]] == [f"{file}:11", f"{file}:5", f"{file}:6"]
