"""Environment of a session: the checkpoint, the peers' environments, and facts about the machine."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

import baton
from baton.bench.machine import machine_line

ROOT = Path(__file__).parents[3]
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
PEERS = ROOT / ".venv-peers"
QUESTION_TIMEOUT_S = 120.0
FLOAT32_BYTES = 4


def stock_proxies_folder() -> Path | None:
    """Return the newest folder of vLLM's example proxies, put there by scripts/setup-peers or the tests,
    or None.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton-tests"
    found = sorted(
        path.parent for path in cache.glob(f"vllm-*-{sys.implementation.cache_tag}-*/toy_proxy.py")
    )
    return found[-1] if found else None


def kv_bytes_per_token(model: Path) -> int:
    """Return the bytes of KV per token in float32, from config.json."""
    config = json.loads((model / "config.json").read_text())
    return int(
        config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * config["head_dim"] * FLOAT32_BYTES
    )


def vocab_size(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def versions_in(python: Path, *names: str) -> dict[str, str]:
    """Return the versions of distributions in another environment, without missing ones."""
    program = (
        "import importlib.metadata as m, json, sys\n"
        "found = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "print(json.dumps({n: found[n] for n in sys.argv[1:] if n in found}))"
    )
    answer = subprocess.run(
        [str(python), "-c", program, *names],
        capture_output=True,
        text=True,
        timeout=QUESTION_TIMEOUT_S,
        check=False,
    )
    if answer.returncode != 0:
        return {}
    found: dict[str, str] = json.loads(answer.stdout)
    return found


def session_facts(versions: Mapping[str, str], options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": machine_line(),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "commit": _commit(),
        "versions": {"baton": baton.__version__, "python": platform.python_version(), **versions},
        "options": dict(options),
    }


def _commit() -> str:
    answer = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        timeout=QUESTION_TIMEOUT_S,
        check=False,
    )
    return answer.stdout.strip() or "unknown"
