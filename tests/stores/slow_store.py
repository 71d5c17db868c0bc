"""A store in memory whose reads and writes can be held, as those of a file system that does not answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from baton.stores.base.store import Promise, Store, Stored, StoreError, Unusable

WAIT_S = 30.0  # Reached only on failure.


class SlowStore(Store):
    kind = "slow"
    where = "memory"

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.touched: dict[str, float] = {}
        self.is_full = False
        self.opened = threading.Event()
        self.opened.set()
        self.num_held = threading.Semaphore(0)  # Each call that waits releases it once.

    def hold(self) -> None:
        self.opened.clear()

    def wait_held(self) -> None:
        assert self.num_held.acquire(timeout=WAIT_S)

    def release(self) -> None:
        self.opened.set()

    @property
    def promise(self) -> Promise:
        return Promise(
            survives_process=False,
            survives_power_loss=False,
            has_time_of_use=True,
            evicts_itself=False,
            several_hosts=False,
        )

    def check(self, *, is_written: bool = True) -> None:
        return

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        return [len(self.values[name]) if name in self.values else None for name in names]

    def read(self, name: str, into: memoryview) -> int:
        self._wait()
        if name not in self.values:
            raise Unusable("gone")
        value = self.values[name]
        into[: len(value)] = value
        return len(value)

    def read_part(self, name: str, into: memoryview, start: int, nbytes: int) -> None:
        self._wait()
        if name not in self.values:
            raise Unusable("gone")
        part = self.values[name][start : start + nbytes]
        if len(part) != nbytes:
            raise Unusable("corrupt", "it is shorter")
        into[:nbytes] = part

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        self._wait()
        if self.is_full:
            raise StoreError("no space left")
        self.values[name] = b"".join(parts)

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self.values.pop(name, None)

    def touch(self, name: str, used_s: float) -> None:
        self.touched[name] = used_s

    def scan(self) -> Iterator[Stored]:
        return iter([Stored(name, len(value), 0.0) for name, value in self.values.items()])

    def close(self) -> None:
        return

    def _wait(self) -> None:
        if not self.opened.is_set():
            self.num_held.release()
            assert self.opened.wait(WAIT_S)
