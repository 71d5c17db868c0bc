"""Faults of the shared folder, and the fault layer that delays or hangs file calls and steps clocks."""

import ctypes
import os
import random
import struct
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from baton.core.errors import BatonError

FOLDER_BYTES = 96 << 20  # More than the files of all questions take.
MS_RDONLY, MS_REMOUNT, MNT_DETACH = 0x1, 0x20, 0x2
REMOUNT_S = 20.0  # A mount can turn read-only only when no file in it is open for writing.
_LAYER_SOURCE = Path(__file__).with_name("fault_layer.c")
_BALLAST = ".ballast"
_CHUNK = bytes(1 << 20)
_CONTROL = struct.Struct("3q")  # The struct in fault_layer.c.

_libc = ctypes.CDLL(None, use_errno=True)


class CannotDo(BatonError):
    """The fault needs something that this machine does not allow or have."""


def mount(source: bytes, target: Path, kind: bytes | None, flags: int, data: bytes | None = None) -> None:
    """Call mount(2). Raises OSError."""
    if _libc.mount(source, os.fsencode(target), kind, flags, data) != 0:
        raise OSError(ctypes.get_errno(), f"mount {target}: {os.strerror(ctypes.get_errno())}")


class Disk:
    """A folder with a small file system of its own. `is_mounted` is false where mounts are refused."""

    def __init__(self, folder: Path, *, may_mount: bool) -> None:
        self.folder = folder
        self.is_mounted = may_mount
        folder.mkdir(parents=True, exist_ok=True)
        if may_mount:
            mount(b"chaos", folder, b"tmpfs", 0, b"size=%d" % FOLDER_BYTES)

    def close(self) -> None:
        if self.is_mounted:
            _libc.umount2(os.fsencode(self.folder), MNT_DETACH)

    def files(self) -> list[Path]:
        """Return the files of stored chunks."""
        return [path for path in self.folder.rglob("*.safetensors") if path.is_file()]

    def fill(self) -> None:
        """Fill the file system until no byte is free."""
        with (self.folder / _BALLAST).open("wb", buffering=0) as ballast, suppress(OSError):
            while ballast.write(_CHUNK):
                pass

    def empty(self) -> None:
        (self.folder / _BALLAST).unlink(missing_ok=True)

    def set_read_only(self, is_read_only: bool) -> None:
        """Remount the file system. Raises OSError if a file stays open for writing for 20 s."""
        flags = MS_REMOUNT | (MS_RDONLY if is_read_only else 0)
        deadline_s = time.monotonic() + REMOUNT_S
        while True:
            try:
                return mount(b"chaos", self.folder, None, flags, b"size=%d" % FOLDER_BYTES)
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.01)

    def corrupt(self, rng: random.Random) -> None:
        """Damage three of four files: flip one bit (two of four) or cut off the end (one of four)."""
        for path in self.files():
            with suppress(FileNotFoundError), path.open("r+b") as file:
                size = os.fstat(file.fileno()).st_size
                damage = rng.randrange(4)
                if damage == 1:
                    file.truncate(rng.randrange(size))
                elif damage > 1:
                    at = rng.randrange(size)
                    file.seek(at)
                    [byte] = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte ^ 1 << rng.randrange(8)]))

    def put_fifos(self, rng: random.Random) -> None:
        """Replace every second file by a FIFO."""
        for path in self.files():
            if rng.random() < 0.5:
                path.unlink(missing_ok=True)
                with suppress(FileExistsError):
                    os.mkfifo(path)

    def remove_fifos(self) -> None:
        for path in self.folder.rglob("*.safetensors"):
            if path.is_fifo():
                path.unlink(missing_ok=True)

    def remove_files(self) -> None:
        for path in self.files():
            path.unlink(missing_ok=True)


class Layer:
    """The fault layer of one process and its children. It delays file calls under `folder`."""

    def __init__(self, path: Path, *, library: Path, folder: Path) -> None:
        self._path = path
        self.set()
        self.env = {"LD_PRELOAD": str(library), "CHAOS_LAYER": str(path), "CHAOS_FOLDER": str(folder)}

    def set(self, *, clock_offset_s: int = 0, delay_s: float = 0.0, is_hung: bool = False) -> None:
        values = _CONTROL.pack(clock_offset_s * 10**9, round(delay_s * 1e6), is_hung)
        with self._path.open("r+b" if self._path.exists() else "wb") as file:
            file.write(values)


def build_layer(folder: Path) -> Path:
    """Compile the fault layer and return the library's path. Raises CannotDo without a C compiler."""
    library = folder / "fault_layer.so"
    if not library.exists():
        command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(_LAYER_SOURCE), "-ldl"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise CannotDo("there is no C compiler (cc) to build the fault layer") from error
        except subprocess.CalledProcessError as error:
            raise CannotDo(f"the fault layer cannot be compiled: {error.stderr}") from error
    return library
