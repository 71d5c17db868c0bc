"""The copy library, built from this tree."""

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.transport.fake_cuda import BUILD_TIMEOUT_S, COMPILER

ROOT = Path(__file__).parents[2]
PART_BYTES = 100_000  # `stream.c` moves and hashes this much at once. Small, for tests.


@functools.cache
def built() -> Path:
    """The path of the library. Skips the test if there is no C compiler."""
    if COMPILER is None:
        pytest.skip("there is no C compiler")
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    library = Path(folder, "_gather.so")
    strict = {
        **os.environ,
        "CC": COMPILER,
        "CFLAGS": f"-Wall -Wextra -Wpedantic -Werror -DPART_BYTES={PART_BYTES}",
    }
    subprocess.run(
        [ROOT / "scripts/build-library", "gather", library], check=True, timeout=BUILD_TIMEOUT_S, env=strict
    )
    return library
