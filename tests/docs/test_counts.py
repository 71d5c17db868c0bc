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


def test_sizes_has_a_row_for_each_package_and_the_largest_classes() -> None:
    header, *rows, last = printed("sizes").splitlines()
    assert header.split() == ["files", "lines", "code"]
    counts = {}
    for row in rows:
        name, *numbers = row.replace(",", "").split()
        counts[name] = [int(number) for number in numbers]
    files, lines, code = counts["baton"]
    assert files > 300
    assert lines > code > 30_000
    assert {"baton/core", "baton/router", "tests"} <= counts.keys()
    assert re.fullmatch(r"largest classes: \w+ \(baton/\S+\.py\) \d+(, \w+ \(baton/\S+\.py\) \d+){2}", last)


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
