"""Interface of the storage under a tier: named byte strings, each of which is there whole or not at all.

    name    "<namespace>/<2 hex>/<key>.<rank>.safetensors" (`chunk_name`)
    value   the parts of a write, one after the other

Calls block, and several threads may call at a time. A store proves nothing: its caller verifies (`chunk`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

# Reason why a value cannot be used. A label of `baton:storage_unusable_files`.
Fault: TypeAlias = Literal["gone", "corrupt", "foreign", "io"]

Parts: TypeAlias = Sequence[bytes | memoryview]


# Parts of a URL: user and password, if any; the target; a query, if any, which may have a signature.
_URL = re.compile(r"://(?:\S*@)?([^\s?]*)(?:\?\S*)?")


def without_credentials(text: str) -> str:
    """A URL, or a text with URLs, for logs and errors."""
    return _URL.sub(r"://\1", text)


class Unusable(Exception):
    """The value is not what was requested."""

    def __init__(self, reason: Fault, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class StoreError(OSError):
    """The storage failed, or does not answer: nothing is known about the value."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One value, as a scan finds it."""

    name: str
    nbytes: int
    used_s: float  # Last use, or the write if the store keeps no time of use. Since the Unix epoch.


@dataclass(frozen=True, slots=True)
class Promise:
    """What a store guarantees. docs/tiers.md has the table."""

    survives_process: bool  # A value that was written is there after the end of the process that wrote it.
    survives_power_loss: bool  # A value is also there after a crash of the machine.
    has_time_of_use: bool  # `touch` has an effect, so the least recently used value can be evicted.
    evicts_itself: bool  # The store removes values without being asked.
    several_hosts: bool  # Hosts other than this one can read what is written.


class Store(ABC):
    """One place for values. `kind` names it in logs and metrics."""

    kind: ClassVar[str]
    where: str  # Folder or address, without credentials, for logs.

    @property
    @abstractmethod
    def promise(self) -> Promise: ...

    @abstractmethod
    def check(self, *, is_written: bool = True) -> None:
        """Prepares the store for use. `is_written`: False if it is only read.

        Raises ConfigError, which names the setting, if it cannot be used.
        """

    @abstractmethod
    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Bytes of each value; None: it is not there. Raises StoreError."""

    @abstractmethod
    def read(self, name: str, into: memoryview) -> int:
        """Reads a value into the beginning of `into` and returns its bytes.

        Raises Unusable: "gone"; "corrupt" if the value is longer than `into`, or changes while it is read;
        "foreign" if it cannot be a store's; "io" if the storage fails. `into` may be overwritten even then.
        """

    @abstractmethod
    def read_part(self, name: str, into: memoryview, start: int, nbytes: int) -> None:
        """Reads the value's bytes from `start` on into the beginning of `into`.

        Raises Unusable as `read` does; "corrupt" if the value is shorter. Two reads may see two values of one
        name. With direct I/O, a part that begins with a page, and `into` has room for whole pages.
        """

    @abstractmethod
    def write(self, name: str, parts: Parts) -> None:
        """Writes a value; replaces one that is there. If it raises StoreError, no part of it is visible."""

    def write_all(self, values: Sequence[tuple[str, Parts]]) -> list[StoreError | None]:
        """Writes several values, and returns the error of each. A store may have a faster way."""
        errors: list[StoreError | None] = []
        for name, parts in values:
            try:
                self.write(name, parts)
                errors.append(None)
            except StoreError as error:
                errors.append(error)
        return errors

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Removes values; one that is not there is not an error. Tries all of them, then raises
        StoreError."""

    @abstractmethod
    def touch(self, name: str, used_s: float) -> None:
        """Updates the time of last use, if the store has one. Raises StoreError if it does not answer."""

    @abstractmethod
    def scan(self) -> Iterator[Stored]:
        """All values, in any order. Values written or removed meanwhile may be missing. Raises StoreError."""

    def take_requests(self) -> Mapping[str, int]:
        """Requests since the last call, by operation, of a store whose requests cost money."""
        return {}

    def collect(self, now_s: float) -> None:  # noqa: B027 - most stores have nothing to remove.
        """Removes what writers that ended in the middle of a write have left. Raises StoreError."""

    @abstractmethod
    def close(self) -> None: ...
