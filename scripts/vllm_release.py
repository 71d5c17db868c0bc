"""Compares the sources of a vLLM release with the environment whose compiled kernels it is to use.

    .venv-vllm/bin/python scripts/vllm_release.py VERSION SOURCES KERNELS

SOURCES is the unpacked source distribution, KERNELS the installed package vllm. Prints the release's
requirements of `vllm-releases.toml`, and on stderr the ops that differ. Fails if the row of the release is
missing or wrong.
"""

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

RELEASES = Path(__file__).with_name("vllm-releases.toml")
BINDINGS = "csrc/cpu/torch_bindings.cpp"
LITERAL = r'"((?:[^"\\]|\\.)*)"'
DEFINED = re.compile(rf"\.def\(\s*((?:{LITERAL}\s*)+)")


def differing_ops(bindings: str, kernels: bytes) -> list[str]:
    """Return the ops that the sources define and whose schema is not in the libraries, as text.

    Libraries for other processors cannot be loaded here, so their bytes are searched.
    """
    code = re.sub(r"//[^\n]*", "", bindings)
    schemas = ["".join(re.findall(LITERAL, found[1])).replace('\\"', '"') for found in DEFINED.finditer(code)]
    return sorted({s.partition("(")[0] for s in schemas if s.encode() not in kernels})


def unmet(requirements: str, pins: list[str]) -> list[str]:
    """Return the requirements that neither this environment nor the pins meet."""
    pinned = {pin.partition("==")[0]: pin.partition("==")[2] for pin in pins}

    def is_met(wanted: Requirement) -> bool:
        try:
            return wanted.specifier.contains(pinned.get(wanted.name) or version(wanted.name))
        except PackageNotFoundError:
            return False

    lines = (line.partition("#")[0].strip() for line in requirements.splitlines())
    wanted = [Requirement(line) for line in lines if line and not line.startswith("-")]
    return [str(one) for one in wanted if (one.marker is None or one.marker.evaluate()) and not is_met(one)]


def main(release: str, sources: Path, kernels: Path) -> int:
    row = tomllib.loads(RELEASES.read_text()).get(release)
    pins = [] if row is None else row["requirements"]
    libraries = b"".join(path.read_bytes() for path in kernels.glob("_C*.so"))
    ops = differing_ops((sources / BINDINGS).read_text(), libraries)
    missing = unmet((sources / "requirements/common.txt").read_text(), pins)
    print(
        f"setup-vllm: vLLM {release}: ops that the kernels lack, or whose schema differs: {', '.join(ops)}",
        file=sys.stderr,
    )
    if row is None or missing or sorted(row["differing_ops"]) != ops:
        problem = "is not known" if row is None else "differs from its row"
        table = "".join(f"{op} = []\n" for op in ops)
        print(
            f"setup-vllm: vLLM {release} {problem} in {RELEASES.name}. Pin what meets {missing}, name the "
            f"files of tests that need an op, and write:\n\n[{release!r}]\nrequirements = {pins}\n\n"
            f"[{release!r}.differing_ops]\n{table}",
            file=sys.stderr,
        )
        return 1
    print("\n".join(pins))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
