"""scripts/install-torch, with a stand-in for pip: CUDA is installed only if it is asked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/bash
[ "$1" = -m ] || exec {python} "$@"
requires() {{ echo '{{"install": [{{"metadata": {{"requires_dist": ["'$1'"]}}}}]}}'; }}
case " $* " in
*"pytorch.org/whl/cpu "*" --report "*) requires {of_pytorch} ;;
*" --report "*) requires {of_index} ;;
*) echo "$*" >>{log} ;;
esac
"""


@pytest.mark.parametrize(
    ("of_index", "of_pytorch", "cuda", "printed", "options"),
    [
        ("sympy", "sympy", "", "for CPU, 0.8 GB", ""),
        ("nvidia-cudnn-cu13", "sympy", "", "for CPU, 0.8 GB", "--extra-index-url"),
        ("nvidia-cudnn-cu13", "nvidia-cudnn-cu13", "", "It needs 4.5 GB, 3.7 more than a CPU build", None),
        ("nvidia-cudnn-cu13", "sympy", "1", "with CUDA, 4.5 GB", ""),
    ],
)
def test_cuda_is_installed_only_if_asked_for(
    of_index: str, of_pytorch: str, cuda: str, printed: str, options: str | None, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    python, log = tmp_path / "bin/python", tmp_path / "log"
    python.write_text(PYTHON.format(python=sys.executable, of_pytorch=of_pytorch, of_index=of_index, log=log))
    python.chmod(0o755)
    ended = subprocess.run(
        [ROOT / "scripts/install-torch", tmp_path, "constraints.txt"],
        env={**os.environ, "CUDA": cuda, "TORCH_INDEX": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert printed in ended.stdout + ended.stderr
    assert ended.returncode == (options is None)
    assert log.exists() == (options is not None)
    if options is not None:
        installed = log.read_text()
        assert installed.startswith("-m pip install")
        assert ("--extra-index-url" in installed) == bool(options)
        assert "--constraint constraints.txt" in installed
