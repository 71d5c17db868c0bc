"""Fixtures: a checkpoint, and the plug-in with the stub of vLLM."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoints.random_model import write_checkpoint
from baton.hosts.vllm import CONNECTORS

FAKE = Path(__file__).with_name("fake_vllm")
OURS = frozenset({*CONNECTORS.values(), "baton.hosts.vllm.forwarding", "baton.hosts.vllm.stats"})
"""Modules that import vllm, and are reloaded with the stub."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, hidden=32, layers=2, heads=4, kv_heads=2, vocab=512)
    return folder


def _is_loaded_here(name: str) -> bool:
    return name in OURS or name == "vllm" or name.startswith("vllm.")


@pytest.fixture(scope="module")
def plugin() -> Iterator[Any]:
    """`baton.hosts.vllm`, imported with the stub of vLLM while these tests run."""
    import baton.hosts.vllm

    before = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_loaded_here(name)}
    sys.path.insert(0, str(FAKE))
    with pytest.MonkeyPatch.context() as patches:
        # The stub has few of vLLM's classes.
        patches.setattr("baton.hosts.vllm.drift.find_misfits", lambda package, version: [])
        yield baton.hosts.vllm
    sys.path.remove(str(FAKE))
    for name in [name for name in sys.modules if _is_loaded_here(name)]:
        del sys.modules[name]
    sys.modules.update(before)
