"""Several stores, the fastest first, as one. Writes go to all of them; reads come from the first that has it.

    write          files   objects            a failure in one store does not stop the others
    find           files > objects            a store is asked for what the faster ones do not have
    read           files > objects --.
    promote        files <-----------'        what came from a slower store is written to the faster ones

A store that fails is not asked for `RETRY_S`, so that each request does not wait for its deadline again.
One that fails a write, for example because it is full, is not written to; it is still read. With several
failing stores, what they hold is missing for that time; nothing else is.

Writes to a store with a bandwidth cap wait for it on the writer's thread, so a cap is a slow store: what then
waits too long is not stored (`backlog_max_mib`). Reads have no cap, because a request waits for them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from baton.stores.backends.pace import TokenBucket
from baton.stores.base.store import Parts, Store, StoreError, Unusable

logger = logging.getLogger(__name__)

RETRY_S = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReadValue(Generic[T]):
    proven: T
    nbytes: int
    store: int  # Index of the store that had the value.


class Place(NamedTuple):
    """Where a value is: the index of its store, and its bytes there."""

    store: int
    nbytes: int


@dataclass(slots=True)
class Written:
    """Outcome of a write, by the kind of store."""

    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # Error by kind of store.
    had: bool = False  # A store had it already.

    @property
    def is_stored(self) -> bool:
        return self.had or bool(self.done)


class Tiers:
    def __init__(
        self,
        stores: Sequence[Store],
        *,
        caps: Sequence[TokenBucket | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        """`caps`: caps of the writes to each store, which then come from one thread.

        `wait`: lets seconds pass; returns True if the stores are being closed.
        """
        assert stores
        self.stores = tuple(stores)
        self._caps = tuple(caps) if caps is not None else (None,) * len(stores)
        self._clock = clock
        self._closing = threading.Event()
        self._wait = wait or self._closing.wait
        self._lock = threading.Lock()  # Guards the times until which stores are not asked.
        self._skipped_until_s = [float("-inf")] * len(stores)
        self._unwritten_until_s = list(self._skipped_until_s)

    def check(self, *, is_written: bool = True) -> None:
        """Checks all stores. All but the slowest must be writable, because reads are copied to them."""
        for store in self.stores:
            store.check(is_written=is_written or store is not self.stores[-1])

    def find(self, names: Sequence[str]) -> list[bool]:
        """Whether each value is in some store. A store that fails has none. Raises StoreError if all fail."""
        return [place is not None for place in self.locate(names)]

    def locate(self, names: Sequence[str]) -> list[Place | None]:
        """Fastest store that has each value. Raises StoreError if all stores fail."""
        found: list[Place | None] = [None] * len(names)
        errors: list[StoreError] = []
        for index, store in self._asked():
            missing = [position for position, place in enumerate(found) if place is None]
            if not missing:
                break
            try:
                sizes = store.sizes([names[position] for position in missing])
            except StoreError as error:
                self._skip(index, error)
                errors.append(error)
                continue
            for position, size in zip(missing, sizes, strict=True):
                found[position] = None if size is None else Place(index, size)
        if len(errors) == len(self.stores):
            raise errors[0]
        return found

    def read(
        self,
        name: str,
        into: memoryview,
        prove: Callable[[memoryview], T],
        *,
        part: slice | None = None,
        only: int | None = None,
    ) -> ReadValue[T]:
        """Reads from the first store that has the value and whose copy is proven.

        `prove` gets the value, or this part of it, inside `into`, and raises Unusable. An unusable copy is
        removed. Raises Unusable with the first reason other than "gone"; it is "gone" only if all have been
        asked.

        `only`: index of the store that is asked.
        """
        fault, num_left = Unusable("gone"), len(self.stores) if only is None else 1
        for index, store in self._asked():
            if only not in (None, index):
                continue
            num_left -= 1
            try:
                if part is None:
                    nbytes = store.read(name, into)
                else:
                    nbytes = part.stop - part.start
                    store.read_part(name, into, part.start, nbytes)
                return ReadValue(prove(into[:nbytes]), nbytes, index)
            except Unusable as error:
                if error.reason == "io":
                    self._skip(index, error)
                elif error.reason != "gone":
                    self._remove_copy(name, store)
                if fault.reason == "gone":
                    fault = error
        if fault.reason == "gone" and num_left:
            raise Unusable("io", "a store that may have it has failed, and is not asked")
        raise fault

    def write(self, name: str, parts: Parts, *, below: int | None = None) -> Written:
        """Writes to every store that lacks the value. `below`: only to the stores before this index."""
        (written,) = self.write_all([(name, parts)], below=below)
        return written

    def write_all(self, values: Sequence[tuple[str, Parts]], *, below: int | None = None) -> list[Written]:
        """Writes several values like `write`. Returns the outcome of each."""
        outcomes = [Written() for _ in values]
        for index, store in self._asked(is_write=True):
            if below is not None and index >= below:
                break
            try:
                sizes = store.sizes([name for name, _ in values])
            except StoreError as error:
                self._skip(index, error)
                for written in outcomes:
                    written.failed[store.kind] = str(error)
                continue
            missing = [number for number, size in enumerate(sizes) if size is None]
            for number in {*range(len(values))} - {*missing}:
                outcomes[number].had = True
            errors = self._write_capped(index, [values[number] for number in missing])
            for number, failure in zip(missing, errors, strict=True):
                if failure is None:
                    outcomes[number].done.append(store.kind)
                else:
                    outcomes[number].failed[store.kind] = str(failure)
            if failures := [failure for failure in errors if failure is not None]:
                self._skip(index, failures[0], is_write=True)
        return outcomes

    def touch(self, name: str, used_s: float) -> None:
        for index, store in self._asked():
            if store.promise.has_time_of_use:
                try:
                    store.touch(name, used_s)
                except StoreError as error:
                    self._skip(index, error)

    def take_requests(self) -> Mapping[str, int]:
        """Requests of all stores since the last call, by operation."""
        return sum((Counter(store.take_requests()) for store in self.stores), Counter())

    def close(self) -> None:
        self._closing.set()
        for store in self.stores:
            store.close()

    def _write_capped(self, index: int, values: Sequence[tuple[str, Parts]]) -> list[StoreError | None]:
        """Writes values one by one if there is a cap, so that they do not go out in one burst."""
        store, cap = self.stores[index], self._caps[index]
        if cap is None:
            return store.write_all(values)
        errors: list[StoreError | None] = []
        for value in values:
            wait_s = cap.take(sum(map(len, value[1])), self._clock())
            is_closing = wait_s > 0 and self._wait(wait_s)
            errors += [StoreError("it is being closed")] if is_closing else store.write_all([value])
        return errors

    def _remove_copy(self, name: str, store: Store) -> None:
        try:
            store.remove([name])
        except StoreError as error:
            logger.warning("could not remove the unusable %s from %s: %s", name, store.kind, error)

    def _asked(self, *, is_write: bool = False) -> Iterator[tuple[int, Store]]:
        """Stores to ask. A single store is always asked, because its failure has to be reported."""
        until_s = self._unwritten_until_s if is_write else self._skipped_until_s
        for index, store in enumerate(self.stores):
            with self._lock:
                is_skipped = len(self.stores) > 1 and self._clock() < until_s[index]
            if not is_skipped:
                yield index, store

    def _skip(self, index: int, error: Exception, *, is_write: bool = False) -> None:
        if len(self.stores) > 1:
            kind, use = self.stores[index].kind, "written to" if is_write else "used"
            logger.warning("%s failed, and is not %s for %g s: %s", kind, use, RETRY_S, error)
        with self._lock:
            self._unwritten_until_s[index] = self._clock() + RETRY_S
            if not is_write:
                self._skipped_until_s[index] = self._unwritten_until_s[index]
