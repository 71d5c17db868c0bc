"""What tests of the whole system share."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as small as they come, made by the command that users have."""
    folder = tmp_path_factory.mktemp("model") / "small"
    size = ["--hidden", "64", "--layers", "2"]
    command = [sys.executable, "-m", "baton.cli", "model", "new", str(folder), *size]
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL)
    return folder
