"""Prints the table of docs/vllm.md: which releases of vLLM start, and what their runs of tests/vllm gave.

    .venv/bin/python scripts/vllm_table.py 0.32.0=.venv-vllm/results.xml 0.33.0=.venv-vllm-0.33.0/results.xml

The files are written by `make test-vllm V=...`. A release may be named several times, with the results of
parts of a run. The last result of a test counts.
"""

import sys
from collections import Counter
from xml.etree import ElementTree

from baton.hosts.vllm import versions
from baton.hosts.vllm.tier import settings

OUTCOMES = ("failure", "error", "skipped")
Test = tuple[str, str]  # Its module and its name.
Result = tuple[str, str]  # The outcome, and its reason if the test was skipped.


def read(path: str) -> dict[Test, Result]:
    results: dict[Test, Result] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        ended = next((child for child in case if child.tag in OUTCOMES), None)
        outcome = "passed" if ended is None else ended.tag.replace("error", "failure")
        why = ended.get("message", "") if ended is not None and outcome == "skipped" else ""
        results[case.get("classname", ""), case.get("name", "")] = outcome, why
    return results


def start(version: str) -> str:
    release = versions.release_of(version)
    tiers = "tiers" if release in settings.TESTED else "no tiers: refused"
    return f"connectors, {tiers}" if release in versions.TESTED else "refused"


def row(version: str, results: dict[Test, Result]) -> str:
    counts = Counter(outcome for outcome, _ in results.values())
    reasons = Counter(why for outcome, why in results.values() if outcome == "skipped")
    notes = [
        f"`{name}` failed" for (_, name), (outcome, _) in results.items() if outcome in ("failure", "error")
    ]
    notes += [f"{number} × {why}" for why, number in sorted(reasons.items())]
    numbers = [len({module for module, _ in results}), counts["passed"], counts["failure"], counts["skipped"]]
    return f"| {version} | {start(version)} | {' | '.join(map(str, numbers))} | {'; '.join(notes)} |"


def main(arguments: list[str]) -> None:
    runs: dict[str, dict[Test, Result]] = {}
    for argument in arguments:
        version, _, path = argument.partition("=")
        runs.setdefault(version, {}).update(read(path))
    print("| vLLM | what starts | files of tests | passed | failed | skipped | which, and why |")
    print("|---|---|---:|---:|---:|---:|---|")
    print(*(row(version, results) for version, results in sorted(runs.items())), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
