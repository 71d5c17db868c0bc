"""Leak checks: threads, files, and ids of ended requests that a connector still holds."""

import gc
import os
import threading
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

THREAD_END_S = 2.0  # Time for a thread that was asked to end.
THREAD_END_MIN_S = 0.1
THREAD_LOOK_S = 0.02
FILES_SLACK = 3  # Descriptors that libraries keep open after first use.
IDS_MIN = 3  # Ended requests needed before their ids are searched for.
_WALK_MAX = 20_000  # Objects.


def running_threads() -> set[int]:
    return {thread.ident for thread in threading.enumerate() if thread.ident is not None}


def new_threads(before: set[int], patience_s: float) -> list[str]:
    """Return the names of new threads that do not end in the given time.

    The time is counted in joins, so time in which this process does not run is not counted. Dummy threads are
    ignored: they stand for threads that Python did not start (such as Ray's actor threads), cannot be joined,
    and belong to the host.
    """
    num_looks = round(min(THREAD_END_S, THREAD_END_MIN_S + patience_s) / THREAD_LOOK_S)
    left = []
    for thread in threading.enumerate():
        if thread.ident in before or thread is threading.current_thread():
            continue
        if isinstance(thread, threading._DummyThread):
            continue
        while thread.is_alive() and num_looks > 0:
            thread.join(THREAD_LOOK_S)  # Counted, not timed: the thread may wait for a core.
            num_looks -= 1
        if thread.is_alive():
            left.append(thread.name)
    return left


def open_files() -> Counter[str]:
    """Count what this process has open, by name; empty where /proc is not available."""
    folder = Path("/proc/self/fd")
    found: Counter[str] = Counter()
    if not folder.exists():
        return found
    gc.collect()
    for link in folder.iterdir():
        try:
            name = os.readlink(link)
        except OSError:
            continue  # The descriptor of this listing.
        found[name.partition(":[")[0]] += 1
    return found


class RankLeaks:
    """Leaks of a worker half in a process of its own, where only the rank can look.

    Made before the half. A few files that a library opens once and keeps are allowed; growth with steps and
    requests is not.
    """

    def __init__(self) -> None:
        self._threads = running_threads()
        self._files = open_files()

    def find(self) -> Iterator[tuple[str, str]]:
        """Yield (rule, description of the leak, or "" if there is none). Call after the half's shutdown."""
        threads = new_threads(self._threads, THREAD_END_S)
        yield "threads-left", f"these threads still run: {', '.join(threads)}" if threads else ""
        files = open_files() - self._files
        names = ", ".join(f"{count} x {name}" for name, count in files.most_common(5))
        yield "files-left", f"these files are still open: {names}" if files.total() > FILES_SLACK else ""


def keys_reachable_from(root: Any) -> set[str]:
    """Return the strings that are keys or members of containers in the object's state."""
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
    # The engine's own state, which a connector may reference, is not the connector's memory.
    if type(value).__module__.startswith("baton.engine."):
        return ()
    return gc.get_referents(value)
