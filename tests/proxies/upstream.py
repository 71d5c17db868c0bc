"""Published stock proxies: two files of vLLM's source distribution, fetched when a test needs them.

pip downloads the archive from its configured index and checks its hash. The two files, and their additional
dependencies, go to a cache outside the tree. Nothing of vLLM is installed, built, imported or committed.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

VERSION = "0.33.0"
SHA256 = "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"
TOY_PROXY = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"
PUSH_DEMO = "examples/disaggregated/disaggregated_serving/disagg_proxy_pushconnector_demo.py"
IMPORTED_BY_THEM = ("aiohttp>=3.9", "uvloop>=0.19")
FETCH_S = 240.0

# pip needs an archive's metadata, and asks the build backend that the archive names. This backend replaces
# it: it answers from the archive's own PKG-INFO, and runs nothing of the archive.
_BACKEND = """
import pathlib, shutil
from email.parser import HeaderParser

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    info = HeaderParser().parsestr(pathlib.Path("PKG-INFO").read_text())
    folder = pathlib.Path(metadata_directory) / f"{info['Name']}-{info['Version']}.dist-info"
    folder.mkdir()
    shutil.copy("PKG-INFO", folder / "METADATA")
    return folder.name
"""


class NotFetched(Exception):
    """The index cannot be reached, or lacks the archive. The message contains pip's."""


@dataclass(frozen=True)
class StockProxies:
    toy_proxy: Path
    push_demo: Path
    site: Path  # Dependencies of the proxies that this project lacks.


def stock_proxies() -> StockProxies:
    """The proxies, from the cache or from the index. Raises NotFetched."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton-tests"
    # Wheels of the dependencies are for one Python and one machine.
    wanted = hashlib.sha256(repr((SHA256, IMPORTED_BY_THEM)).encode()).hexdigest()[:8]
    made_for = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
    folder = root / f"vllm-{VERSION}-{made_for}-{wanted}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # Released with the file, also if the test is killed.
            if not folder.exists():
                _fetch(folder)
    except (OSError, subprocess.SubprocessError) as error:
        raise NotFetched(f"vLLM {VERSION}'s proxies cannot be fetched: {error}") from error
    return StockProxies(folder / "toy_proxy.py", folder / "push_demo.py", folder / "site")


def _fetch(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch, "made")
        archive = _download(Path(scratch))
        made.mkdir()
        with tarfile.open(archive) as source:
            for path, name in ((TOY_PROXY, "toy_proxy.py"), (PUSH_DEMO, "push_demo.py")):
                member = source.extractfile(f"vllm-{VERSION}/{path}")
                assert member is not None, f"{path} is no file"
                with made.joinpath(name).open("wb") as target:
                    shutil.copyfileobj(member, target)
        _pip(["install", "--target", str(made / "site"), "--no-warn-script-location", *IMPORTED_BY_THEM])
        made.rename(folder)  # Atomic.


def _download(scratch: Path) -> Path:
    backend = scratch / "backend" / "setuptools"
    backend.mkdir(parents=True)
    backend.joinpath("__init__.py").touch()
    backend.joinpath("build_meta.py").write_text(_BACKEND)
    wanted = scratch / "wanted.txt"
    wanted.write_text(f"vllm=={VERSION} --hash=sha256:{SHA256}\n")
    what = ["--no-deps", "--no-binary", "vllm", "--no-build-isolation", "--requirement", str(wanted)]
    _pip(["download", *what, "--dest", str(scratch)], PYTHONPATH=str(backend.parent))
    return scratch / f"vllm-{VERSION}.tar.gz"


def _pip(arguments: list[str], **env: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    command += ["--retries", "1", "--timeout", "20", *arguments]
    ended = subprocess.run(
        command, env={**os.environ, **env}, timeout=FETCH_S, capture_output=True, text=True, check=False
    )
    if ended.returncode != 0:
        errors = [line for line in ended.stderr.splitlines() if line.strip()]
        raise OSError(f"pip {arguments[0]} says: {errors[-1] if errors else f'status {ended.returncode}'}")
