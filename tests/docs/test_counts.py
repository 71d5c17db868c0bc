"""`scripts/sizes`, `scripts/walks` and the length of the glossary."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GLOSSARY_MAX = 40  # Terms.


def printed(name: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "scripts" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_sizes_counts_packages_and_names_the_largest_classes(tmp_path: Path) -> None:
    module = '"""Of\ntwo lines."""\n# A comment.\nclass One:\n    """A class."""\n    text = """a\n b"""\n'
    files = {
        "baton/__init__.py": "A = 1\n",
        "baton/core/ids.py": module,
        "baton/core/hosts.py": "class Two:\n    a = 1\n",
        "tests/conftest.py": "class OfATest:\n    a = 1\n\n\n\n",
    }
    for name, text in {**files, "baton/contract/base.py": module}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for command in (["init", "-q"], ["add", *files]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, timeout=120)
    header, *rows, last = printed("sizes", str(tmp_path)).splitlines()
    assert header.split() == ["files", "lines", "code"]
    assert [row.split() for row in rows] == [
        ["baton", "3", "10", "6"],
        ["baton/core", "2", "9", "5"],
        ["tests", "1", "5", "2"],
    ]
    assert last == "largest classes: One (baton/core/ids.py) 4, Two (baton/core/hosts.py) 2"


def test_walks_counts_files_and_stops_and_lists_them() -> None:
    first, *rest = printed("walks", "--list").splitlines()
    counted = re.fullmatch(r"files (\d+), resume (\d+) stops, free (\d+) stops", first)
    assert counted is not None
    router = re.fullmatch(r"router: files (\d+), (\d+) stops", rest[0])
    assert router is not None
    lists = {
        title: [entry.split()[0] for entry in entries.splitlines()]
        for title, entries in re.findall(r"^([\w ]+):\n((?:  .*\n?)*)", "\n".join(rest), re.MULTILINE)
    }
    assert [len(lists[name]) for name in ("files", "resume", "free")] == [int(n) for n in counted.groups()]
    assert [len(lists[name]) for name in ("files of the router", "router")] == [
        int(n) for n in router.groups()
    ]
    assert all((ROOT / "baton" / file).is_file() for files in lists.values() for file in files)


def test_the_glossary_stays_short() -> None:
    glossary = (ROOT / "docs" / "architecture.md").read_text().split("## Glossary")[1]
    rows = [line.split("|")[1] for line in glossary.splitlines() if line.startswith("| ")][1:]
    assert 0 < sum(len(row.split(",")) for row in rows) <= GLOSSARY_MAX
