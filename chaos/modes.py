"""The modes of the matrix: how KV gets from prefill engines to decode engines, as engine arguments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from chaos.questions import MAX_MODEL_LEN
from chaos.rules import CONTROL_PORT

PREFILL = ("p0", "p1")
DECODE = ("d0", "d1")
ENGINES = (*PREFILL, *DECODE)

BLOCK_SIZE = 16
NUM_BLOCKS = 512  # Tokens of about twenty prompts: prefix caches forget, so that nearly all prompts move.
CHUNK_TOKENS = 32  # Of a stored file; short prompts have one too.
OFFLOAD_GIB = 0.03
STEP_TOKENS = 256  # Of a step: long prompts take several, so that a push reads while P computes.

Feature = Literal["network", "ranks", "storage", "mount"]
Transfer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """What a KV transfer configuration depends on."""

    engine: str
    host: str  # Address of the engine.
    storage: Path  # The folder that all engines share.

    @property
    def is_prefill(self) -> bool:
        return self.engine in PREFILL


@dataclass(frozen=True, slots=True)
class Mode:
    """`has`: what faults may ask for. "network": KV crosses the switch."""

    name: str
    what: str
    transfer: Callable[[Place], Transfer]
    has: frozenset[Feature] = frozenset({"network"})
    router: str = "pull"
    prefill_tp: int = 1
    hands_over: bool = True  # Every prompt moves from P to D; otherwise a store may have it first.

    def engine_options(self, engine: str) -> list[str]:
        tp = self.prefill_tp if engine in PREFILL else 1
        return [
            *("--block-size", str(BLOCK_SIZE), "--max-model-len", str(MAX_MODEL_LEN)),
            *("--max-num-batched-tokens", str(STEP_TOKENS), "--tensor-parallel-size", str(tp)),
        ]


def _handing_over(place: Place, connector: str, transport: str, **extra: Any) -> Transfer:
    return {
        "kv_connector": connector,
        "kv_role": "kv_producer" if place.is_prefill else "kv_consumer",
        "engine_id": place.engine,
        "kv_connector_extra_config": {
            "host": place.host,
            "port": CONTROL_PORT,
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
)


def mode_named(name: str) -> Mode:
    """Raises KeyError."""
    return {mode.name: mode for mode in MODES}[name]
