"""Systems under comparison, as data: their engines, connectors and proxies.

    single engine     client ------------------------> engine
    pair              client --> front --> P, D        front: vLLM's own example proxy, or `baton route`

An engine computes on one core: P on the first that this process may use, D and single engines on the last.
Other threads and processes (HTTP, scheduler, proxies, the client) run on any core, unless an engine is
`confined`: then all of it runs on its one core.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lab.bench.compare.load import MODEL_NAME

HOST = "127.0.0.1"
MAX_MODEL_LEN = 4096
KV_CACHE_GIB = 1
BLOCK_TOKENS = 16  # Block size of the embedded engine; vLLM on CPU has its own.
VLLM_NEEDS_GIB = 2.6  # Memory of one engine, cache included; measured as the resident sets of its processes.
BATON_NEEDS_GIB = 2.0

Kind = Literal["vllm", "baton"]
Role = Literal["single", "prefill", "decode"]
Front = Literal["toy proxy", "push demo", "baton route"]


@dataclass(frozen=True, slots=True)
class Connector:
    name: str
    extra: dict[str, Any] = field(default_factory=dict)
    is_push: bool = False
    is_ours: bool = True

    def config(self, kind: Kind, role: Role, engine_id: str) -> dict[str, Any]:
        config: dict[str, Any] = {
            "kv_connector": self.name,
            "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
            "engine_id": engine_id,
            "kv_connector_extra_config": self.extra,
        }
        if kind == "baton":
            return config
        if self.is_ours:
            return {
                **config,
                "kv_connector_module_path": "baton.hosts.vllm",
                "kv_load_failure_policy": "recompute",
            }
        return {**config, "kv_role": "kv_both", "kv_buffer_device": "cpu"}  # NIXL's guide has these values.


@dataclass(frozen=True, slots=True)
class System:
    name: str
    kind: Kind
    connector: Connector | None = None  # None: a single engine.
    front: Front | None = None
    is_confined: bool = False
    dtype: str = "float32"

    @property
    def roles(self) -> tuple[Role, ...]:
        return ("single",) if self.connector is None else ("prefill", "decode")

    @property
    def needs_gib(self) -> float:
        return len(self.roles) * (VLLM_NEEDS_GIB if self.kind == "vllm" else BATON_NEEDS_GIB)

    @property
    def needs_nixl(self) -> bool:
        if self.connector is None:
            return False
        return not self.connector.is_ours or "nixl" in self.connector.extra.get("transports", ())

    def confined(self) -> "System":
        return replace(self, is_confined=True)


def _pull(*transports: str) -> Connector:
    return Connector("BatonPullConnector", {"transports": list(transports)})


def _push(stream: str) -> Connector:
    return Connector("BatonPushConnector", {"stream": stream, "transports": ["local"]}, is_push=True)


_NIXL_PULL = Connector("NixlConnector", is_ours=False)
_NIXL_PUSH = Connector("NixlPushConnector", is_push=True, is_ours=False)

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System("vllm", "vllm"),
        System("vllm nixl pull", "vllm", _NIXL_PULL, "toy proxy"),
        System("vllm nixl push", "vllm", _NIXL_PUSH, "push demo"),
        System("vllm baton pull local", "vllm", _pull("local"), "baton route"),
        System("vllm baton pull tcp", "vllm", _pull("tcp"), "baton route"),
        System("vllm baton pull nixl", "vllm", _pull("nixl"), "baton route"),
        System("vllm baton push chunk", "vllm", _push("chunk"), "baton route"),
        System("vllm baton push layer", "vllm", _push("layer"), "baton route"),
        System("vllm bfloat16", "vllm", dtype="bfloat16"),
        System("baton", "baton"),
        System("baton bfloat16", "baton", dtype="bfloat16"),
        System("baton pull", "baton", _pull("local"), "baton route"),
        System("baton push chunk", "baton", _push("chunk"), "baton route"),
    )
}

# Systems that run at the same time, so that they can alternate; the first is the reference of the others.
GROUPS: tuple[tuple[str, ...], ...] = (
    ("vllm", "vllm nixl pull", "vllm baton pull local"),
    ("vllm", "vllm nixl push", "vllm baton push chunk"),
    ("vllm", "vllm baton push layer", "vllm baton pull tcp"),
    ("vllm", "vllm baton pull nixl"),
    ("baton", "baton pull", "baton push chunk"),
)


# Single engines, the reference first.
SINGLES: tuple[tuple[str, str], ...] = (("vllm", "baton"), ("vllm bfloat16", "baton bfloat16"))


def chosen_groups(names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return each group with its single engine and the systems of `names`; all groups without names."""
    if not names:
        return GROUPS
    cut = ((group[0], *(name for name in group[1:] if name in names)) for group in GROUPS)
    return tuple(group for group in cut if len(group) > 1)


FAULT_SYSTEMS = ("vllm nixl pull", "vllm baton pull local", "baton pull")
QUICK_FAULT_SYSTEMS = ("vllm baton pull local",)
TRACE_GROUP = ("vllm", "vllm nixl pull", "vllm baton pull local")

# Our systems, and the peers that they must not be worse than.
PEERS: dict[str, str] = {
    "vllm baton pull local": "vllm nixl pull",
    "vllm baton push chunk": "vllm nixl push",
}


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of one engine. `side`: the port for handshakes of NIXL's connector."""

    http: int
    side: int

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.http}"


def engine_id_of(system: System, role: Role) -> str:
    return f"{system.name} {role}".replace(" ", "-")


def core_of(role: Role) -> int:
    cores = sorted(os.sched_getaffinity(0))
    return cores[0] if role == "prefill" else cores[-1]


def engine_command(
    system: System, role: Role, ports: Ports, *, model: Path, vllm_python: Path, num_blocks: int
) -> list[str]:
    transfer = (
        []
        if system.connector is None
        else [
            "--kv-transfer-config",
            json.dumps(system.connector.config(system.kind, role, engine_id_of(system, role))),
        ]
    )
    served = ["--served-model-name", MODEL_NAME, "--dtype", system.dtype]
    served += ["--max-model-len", str(MAX_MODEL_LEN)]
    served += ["--host", HOST, "--port", str(ports.http), *transfer]
    match system.kind:
        case "vllm":
            program = [str(vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
            command = [*program, *served, "--enforce-eager"]
        case "baton":
            program = [sys.executable, "-m", "baton.cli", "serve", str(model)]
            command = [*program, *served, "--num-blocks", str(num_blocks), "--threads", "1"]
            command += ["--drain-timeout-s", "0"] if transfer else []
    return ["taskset", "-c", str(core_of(role)), *command] if system.is_confined else command


def engine_environment(system: System, role: Role, ports: Ports) -> dict[str, str]:
    match system.kind:
        case "vllm":
            return {
                "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
                "VLLM_CPU_OMP_THREADS_BIND": str(core_of(role)),
                "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.side),
            }
        case "baton":
            return {}


def front_command(
    system: System, port: int, prefill: Ports, decode: Ports, *, model: Path, proxies: Path | None
) -> list[str]:
    """Return the proxy's command. `proxies`: folder with vLLM's example proxies (scripts/setup-peers)."""
    assert system.connector is not None
    match system.front:
        case "toy proxy":
            assert proxies is not None
            command = [sys.executable, str(proxies / "toy_proxy.py"), "--port", str(port)]
            command += ["--prefiller-hosts", HOST, "--prefiller-ports", str(prefill.http)]
            return [*command, "--decoder-hosts", HOST, "--decoder-ports", str(decode.http)]
        case "push demo":
            assert proxies is not None
            command = [sys.executable, str(proxies / "push_demo.py"), "--port", str(port)]
            command += ["--model", str(model), "--prefill", f"{HOST}:{prefill.http}"]
            command += ["--decode", f"{HOST}:{decode.http}"]
            command += ["--prefill-engine-id", engine_id_of(system, "prefill"), "--prefill-kv-host", HOST]
            return [*command, "--prefill-side-channel-port", str(prefill.side)]
        case _:
            mode = "push" if system.connector.is_push else "pull"
            command = [sys.executable, "-m", "baton.cli", "route", "--mode", mode, "--port", str(port)]
            return [*command, "--prefill", prefill.url, "--decode", decode.url]


HEALTH_PATHS: dict[Front, str] = {"toy proxy": "healthcheck", "push demo": "status", "baton route": "health"}
