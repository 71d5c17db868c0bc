"""Keeps a folder within its limits of size and age. Several engines may sweep one folder at once.

The least recently used chunk goes first; its files' modification time, which readers renew, is its last use.
All files of a chunk, of every rank and kind of layers, are removed together, because one is of no use without
the others. A reader that has opened a file can read it to the end; one that comes later finds no file, and
its prompt is computed.

    too old       older than max_age_s
    too large     the oldest, down to LOW_WATER of max_bytes, so that sweeps are rare
    abandoned     temporary files of dead writers, older than ABANDONED_S
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from baton.connectors.shared_storage.chunk_name import SUFFIX
from baton.connectors.whole_file import TEMPORARY_PREFIX

LOW_WATER = 0.9
ABANDONED_S = 900.0  # Longer than a file takes to write; a slower writer fails with an error.


@dataclass(slots=True)
class Swept:
    num_kept: int = 0  # Chunks.
    kept_bytes: int = 0
    num_evicted: int = 0
    evicted_bytes: int = 0
    error: str = ""  # Why a chunk that should be evicted still exists.


@dataclass(slots=True)
class _Chunk:
    used_s: float = 0.0  # The latest of its files.
    nbytes: int = 0
    paths: list[str] = field(default_factory=list)


def sweep(folder: Path, *, max_bytes: int | None, max_age_s: float | None, now_s: float) -> Swept:
    """`now_s`: since the Unix epoch. Raises OSError if the folder itself cannot be read."""
    swept = Swept()
    chunks = sorted(_chunks(folder, now_s), key=lambda chunk: chunk.used_s)
    total = sum(chunk.nbytes for chunk in chunks)
    goal = total
    if max_bytes is not None and total > max_bytes:
        goal = int(LOW_WATER * max_bytes)
    for chunk in chunks:
        is_too_old = max_age_s is not None and now_s - chunk.used_s > max_age_s
        if is_too_old or total > goal:
            # A chunk that cannot be removed, for example another user's, stays; newer ones go instead.
            if not (error := _remove(*chunk.paths)):
                total -= chunk.nbytes
                swept.num_evicted += 1
                swept.evicted_bytes += chunk.nbytes
                continue
            swept.error = error
        swept.num_kept += 1
        swept.kept_bytes += chunk.nbytes
    return swept


def _chunks(folder: Path, now_s: float) -> list[_Chunk]:
    chunks: defaultdict[str, _Chunk] = defaultdict(_Chunk)
    for entry in _files(str(folder), depth=2):
        try:
            found = entry.stat()
        except FileNotFoundError:
            continue  # Another engine has swept it.
        if entry.name.startswith(TEMPORARY_PREFIX):
            if now_s - found.st_mtime > ABANDONED_S:
                _remove(entry.path)
        elif entry.name.endswith(SUFFIX):
            chunk = chunks[os.path.join(os.path.dirname(entry.path), entry.name.partition(".")[0])]
            chunk.used_s = max(chunk.used_s, found.st_mtime)
            chunk.nbytes += found.st_size
            chunk.paths.append(entry.path)
    return list(chunks.values())


def _files(folder: str, depth: int) -> Iterator[os.DirEntry[str]]:
    """Files two folders deep. Everything else in the folder is not ours, and stays."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if depth and entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path, depth - 1)
            elif not depth and entry.is_file(follow_symlinks=False):
                yield entry


def _remove(*paths: str) -> str:
    """Returns the first error, or "". A file that is already gone is not an error."""
    errors = []
    for path in paths:
        try:
            os.unlink(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            errors.append(str(error))
    return errors[0] if errors else ""
