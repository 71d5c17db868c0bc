"""Tries mutants, one at a time: each in a fork of a process that has collected the tests.

    tests, once                covered functions and duration of each test
    for each mutant            fork: the tests that cover its function, the fastest first, until one fails

`mutmut run` collects the tests anew for each mutant and runs slow tests first, which takes ten times as long.
A test that hangs has noticed the mutant, too. Hypothesis draws the same
examples for each mutant.
"""

import argparse
import contextlib
import fnmatch
import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from mutmut import __main__ as mutmut
from mutmut.mutation import trampoline
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.state import state

SLOW_S = 4.0  # Tests that take longer are left out.
LEAST_S = 12.0  # A test that takes less is never taken for one that hangs.
HANG_FACTOR = 10  # A test hangs that takes so many times as long as without a mutant.
NOTICED_WEIGHT = 20  # A test that has noticed n mutants counts as 1 + 20 n times as fast.


class Outcome(NamedTuple):
    mutant: str
    verdict: str  # killed: a test has failed or has hung. survived. no tests.
    by: str | None = None  # The test that has noticed it.


class Tries:
    """A pytest plugin that runs mutants instead of the session's tests."""

    def __init__(self, mutants: list[str]) -> None:
        self._mutants = mutants
        self._current = ""
        self.outcomes: list[Outcome] = []
        trampoline.get_mutant_under_test = lambda: self._current  # Mutmut's own reads the environment.

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Before the tests are imported, which take over the profile's settings."""
        from hypothesis import Phase, settings  # pytest warns if its plugin is imported before it starts.

        options: dict[str, Any] = {"derandomize": True, "database": None}
        usual = settings.get_profile("baton")
        settings.register_profile("mutants", parent=usual, phases=(Phase.explicit, Phase.generate), **options)
        settings.load_profile("mutants")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        gc.collect()
        gc.freeze()  # A fork then copies few pages.
        covered, durations_s = self._fork(lambda tell: self._cover(items, tell))[0]
        covering = defaultdict(list)
        for test, functions in covered.items():
            for function in functions:
                covering[function].append(test)
        noticed: defaultdict[str, Counter[str]] = defaultdict(Counter)  # Tests, by function.
        for number, mutant in enumerate(self._mutants):
            function = mutant.partition("__mutmut_")[0]
            tests = [test for test in covering[function] if durations_s[test] <= SLOW_S]
            # Tests that have noticed other mutants of the function go first.
            tests.sort(key=lambda test: durations_s[test] / (1 + NOTICED_WEIGHT * noticed[function][test]))
            outcome = Outcome(mutant, "no tests")
            if tests:
                told = self._fork(lambda tell: self._try(mutant, tests, items, durations_s, tell))  # noqa: B023
                outcome = Outcome(mutant, "survived")
                if told[-1] != "survived":
                    outcome = Outcome(mutant, "killed", told[-1])
                    noticed[function][told[-1]] += 1
            self.outcomes.append(outcome)
            print(f"{number + 1}/{len(self._mutants)} {outcome.verdict} {mutant}", file=sys.stderr)
        return True

    def _fork(self, run: Any) -> list[Any]:
        """What `run` tells in a child process, which may be killed by a signal."""
        with tempfile.TemporaryFile() as told:
            child = os.fork()
            if child == 0:
                os.setpgid(0, 0)
                silent = os.open(os.devnull, os.O_WRONLY)
                os.dup2(silent, 1)
                os.dup2(silent, 2)
                try:
                    run(lambda what: os.write(told.fileno(), json.dumps(what).encode() + b"\n"))
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # What its tests have left running.
            told.seek(0)
            return [json.loads(line) for line in told]

    def _cover(self, items: dict[str, pytest.Item], tell: Any) -> None:
        self._current = "stats"
        covered, durations_s = {}, {}
        for test, item in items.items():
            state()._stats.clear()
            began_s = time.monotonic()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            durations_s[test] = time.monotonic() - began_s
            covered[test] = [] if item.session.testsfailed else sorted(state()._stats)
            item.session.testsfailed = 0
        tell((covered, durations_s))

    def _try(
        self,
        mutant: str,
        tests: list[str],
        items: dict[str, pytest.Item],
        durations_s: dict[str, float],
        tell: Any,
    ) -> None:
        self._current = os.environ["MUTANT_UNDER_TEST"] = mutant
        for test in tests:
            tell(test)
            signal.alarm(int(LEAST_S + HANG_FACTOR * durations_s[test]))
            items[test].config.hook.pytest_runtest_protocol(item=items[test], nextitem=None)
            if items[test].session.testsfailed:
                return
        tell("survived")


def generate() -> list[str]:
    """Makes all mutants, in the folder `mutants`. Returns their names."""
    trampoline.set_mutant_under_test("mutant_generation")
    Path("mutants").mkdir()
    mutmut.copy_src_dir()
    mutmut.copy_also_copy_files()
    mutmut.setup_source_paths()
    mutmut.create_mutants(os.cpu_count() or 1)
    found, _ = mutmut.collect_source_file_mutation_data(mutant_names=())
    return sorted(name for _, name, _ in found)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Try changes of the code, and print those that no test notices."
    )
    parser.add_argument("names", nargs="*", default=["*"], help="patterns, such as 'baton.protocol.peers*'")
    parser.add_argument("--sample", type=int, help="try so many of them, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    options = parser.parse_args()
    mutants = [name for name in generate() if any(fnmatch.fnmatch(name, one) for one in options.names)]
    if options.sample is not None and options.sample < len(mutants):
        mutants = random.Random(options.seed).sample(mutants, options.sample)
    tries = Tries(mutants)
    settings_of_mutmut = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["mutmut"]
    arguments = [
        name
        for key in ("pytest_add_cli_args", "pytest_add_cli_args_test_selection")
        for name in settings_of_mutmut[key]
    ]
    root = Path.cwd()
    os.chdir("mutants")
    pytest.main(["--rootdir=.", "-q", "--timeout=0", *arguments], plugins=[tries])
    os.chdir(root)
    counts = Counter(outcome.verdict for outcome in tries.outcomes)
    for outcome in tries.outcomes:
        if outcome.verdict != "killed":
            print(f"\n# {outcome.mutant}: {outcome.verdict}\n{get_diff_for_mutant(outcome.mutant)}")
    print(f"\n{len(tries.outcomes)} of {len(mutants)} mutants tried: {dict(counts)}")
    return len(tries.outcomes) != len(mutants)


if __name__ == "__main__":
    sys.exit(main())
