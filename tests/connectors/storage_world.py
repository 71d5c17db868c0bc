"""Engines on one shared folder, and helpers of the tests of the shared storage."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from baton.core.config import ClusterSecret, EngineConfig, KVTransferConfig, ModelConfig
from baton.core.hashing import block_hash, root_hash
from baton.engine.api import SamplingParams
from baton.engine.llm import LLM
from baton.stores.base.chunk_name import SUFFIX
from tests.connectors import engine_world
from tests.connectors.engine_world import BLOCK, SECRET, Start, prompt_of, start_in

__all__ = ["BLOCK", "SECRET", "Start", "prompt_of"]

CHUNK = 8
WAIT_S = 30.0  # Reached only on failure.
FOR_BUSY_MACHINES = {"lookup_timeout_s": WAIT_S, "recompute_if_faster_by_s": None}
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def settings_in(folder: Path, **extra: Any) -> dict[str, Any]:
    """Settings with enough time for lookups, and with loads, however busy the machine."""
    return {"path": str(folder), "chunk_tokens": CHUNK, "fsync": False, **FOR_BUSY_MACHINES, **extra}


def storage(folder: Path, role: str = "kv_both", policy: str = "recompute", **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="BatonSharedStorageConnector",
        kv_role=role,  # type: ignore[arg-type]
        kv_load_failure_policy=policy,  # type: ignore[arg-type]
        kv_connector_extra_config=settings_in(folder, **extra),
    )


def config_of(
    model: ModelConfig,
    transfer: KVTransferConfig | None,
    *,
    secret: ClusterSecret | None = SECRET,
    budget: int = 2048,
    **options: Any,
) -> EngineConfig:
    """`options`: of `engine_world.config_of`."""
    secrets = {"cluster_secret": secret, "insecure_no_secret": secret is None}
    return engine_world.config_of(model, transfer, budget=budget, **secrets, **options)


@contextmanager
def starting(model: ModelConfig) -> Iterator[Start]:
    with ExitStack() as stack:
        yield lambda transfer=None, **options: start_in(stack, config_of(model, transfer, **options))


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*/*/*{SUFFIX}"))


def keys_of(prompt: list[int]) -> list[str]:
    keys: list[str] = []
    parent = root_hash()
    for start in range(0, len(prompt) - CHUNK + 1, CHUNK):
        parent = block_hash(parent, prompt[start : start + CHUNK])
        keys.append(parent.hex())
    return keys


def by_position(folder: Path, prompt: list[int], window: int | None = None) -> list[Path]:
    """The files in the order of the prompt, for one rank and the layers with that window."""
    kind = [] if window is None else [f".w{window}"]
    of_kind = [path for path in files_in(folder) if path.suffixes[1:-1] == kind]
    named = {path.name.partition(".")[0]: path for path in of_kind}
    return [named[key] for key in keys_of(prompt)]


def fill(llm: LLM, folder: Path, prompt: list[int], num_files: int) -> list[int]:
    """Makes the engine compute the prompt and store it. Returns its answer."""
    (completion,) = llm.generate([prompt], GREEDY)
    llm.settle(WAIT_S)
    wait_for(lambda: len(files_in(folder)) >= num_files)
    return completion.token_ids
