"""What is left of a connector when nothing should be: threads, files, and memory of ended requests."""

from __future__ import annotations

import gc
import os
import threading
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

THREAD_END_S = 2.0  # For a thread that was told to end.
THREAD_END_MIN_S = 0.1
THREAD_LOOK_S = 0.02
FILES_SLACK = 3  # Descriptors that libraries keep once they have been used.
IDS_MIN = 3  # Ended requests before their ids are looked for.
_WALK_MAX = 20_000  # Objects.


def running_threads() -> set[int]:
    return {thread.ident for thread in threading.enumerate() if thread.ident is not None}


def new_threads(before: set[int], patience_s: float) -> list[str]:
    """Names of threads that were not there before and do not end, in time in which this process runs.

    A dummy stands for one that Python has not started (Ray's, say, when it runs an actor's method): it cannot
    be waited for, and is the host's.
    """
    num_looks = round(min(THREAD_END_S, THREAD_END_MIN_S + patience_s) / THREAD_LOOK_S)
    left = []
    for thread in threading.enumerate():
        if thread.ident in before or thread is threading.current_thread():
            continue
        if isinstance(thread, threading._DummyThread):
            continue
        while thread.is_alive() and num_looks > 0:
            thread.join(
                THREAD_LOOK_S
            )  # However long it takes: where we wait for a core, the thread does too.
            num_looks -= 1
        if thread.is_alive():
            left.append(thread.name)
    return left


def open_files() -> Counter[str]:
    """What this process has open, by name; empty where /proc does not tell."""
    folder = Path("/proc/self/fd")
    found: Counter[str] = Counter()
    if not folder.exists():
        return found
    gc.collect()
    for link in folder.iterdir():
        try:
            name = os.readlink(link)
        except OSError:
            continue  # The listing's own.
        found[name.partition(":[")[0]] += 1
    return found


class RankLeaks:
    """What a worker half leaves in a process of its own, where nobody but the rank itself can look.

    Made before the half is. A few files that a library has opened once and keeps are no leak; what grows with
    steps and requests is.
    """

    def __init__(self) -> None:
        self._threads = running_threads()
        self._files = open_files()

    def find(self) -> Iterator[tuple[str, str]]:
        """(rule, what is left; empty if that is nothing), after the half's shutdown."""
        threads = new_threads(self._threads, THREAD_END_S)
        yield "threads-left", f"these threads go on: {', '.join(threads)}" if threads else ""
        files = open_files() - self._files
        names = ", ".join(f"{count} x {name}" for name, count in files.most_common(5))
        yield "files-left", f"more are open than before: {names}" if files.total() > FILES_SLACK else ""


def keys_reachable_from(root: Any) -> set[str]:
    """Strings that are keys or members of containers in the object's own state."""
    found: set[str] = set()
    seen = {id(root)}
    queue = [root]
    while queue and len(seen) < _WALK_MAX:
        value = queue.pop()
        if isinstance(value, dict | set | frozenset):
            found.update(key for key in value if isinstance(key, str))
        for child in _children(value):
            if id(child) not in seen:
                seen.add(id(child))
                queue.append(child)
    return found


_LEAVES = (
    str,
    bytes,
    int,
    float,
    bool,
    type(None),
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.CodeType,
)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, _LEAVES) or type(value).__module__.partition(".")[0] in (
        "torch",
        "numpy",
        "threading",
    ):
        return ()
    # The engine's own state, which a connector may hold on to, is not the connector's memory.
    if type(value).__module__.startswith("baton.engine."):
        return ()
    return gc.get_referents(value)
