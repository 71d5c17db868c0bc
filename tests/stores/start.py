"""Measures what a start knows of a folder with many chunks, and when: `python -m tests.stores.start 100000`.

Prints the time until the sizes are known from the totals of an earlier sweep, the time of the first hit, and
the time of a sweep, which scans.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from baton.stores.backends.files import FileStore
from baton.stores.backends.sweep import Limits, Sweeps, sweep
from baton.stores.backends.tiers import Tiers
from baton.stores.base.chunk_name import ChunkName

T = TypeVar("T")
CHUNK_BYTES = 4096
LIMITS = Limits(max_bytes=1 << 40)


def name_of(number: int) -> str:
    return str(ChunkName("0" * 32, number.to_bytes(4, "big") * 8, 0))


def measure(num_chunks: int, folder: Path) -> None:
    store = FileStore(folder, fsync=False)
    for start in range(0, num_chunks, 500):
        store.write_all([(name_of(start + n), (bytes(CHUNK_BYTES),)) for n in range(500)])
    sweep(store, LIMITS, now_s=time.time())
    print(f"{num_chunks} chunks of {CHUNK_BYTES} bytes in {folder}")
    sweeps = Sweeps([(FileStore(folder), LIMITS)])
    known_s, known = timed(lambda: sweeps.run(time.time()))
    print(f"sizes known after   {known_s * 1e3:10.3f} ms   {known.num_kept} chunks, {known.kept_bytes} bytes")
    found_s, found = timed(lambda: Tiers([FileStore(folder)]).find([name_of(7)]))
    print(f"first hit           {found_s * 1e3:10.3f} ms   {found}")
    swept_s, swept = timed(lambda: sweeps.run(time.time()))
    print(f"sweep (a scan)      {swept_s * 1e3:10.3f} ms   {swept.num_kept} chunks")


def timed(call: Callable[[], T]) -> tuple[float, T]:
    begun_s = time.perf_counter()
    result = call()
    return time.perf_counter() - begun_s, result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        measure(int(sys.argv[1]), Path(folder))
