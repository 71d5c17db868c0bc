"""P/D system of child processes: their commands, and their start in the right order.

    engines (all at once) --all healthy--> router --healthy--> ready

The router starts last, so that its first check finds every engine. All processes share BATON_SECRET, or a
secret made for this run, which is passed in the environment and written nowhere.
"""

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from baton.cli.http_options import verifying_own
from baton.cli.processes import Fleet, free_ports
from baton.core.errors import ConfigError
from baton.core.secret_source import SECRET_ENV
from baton.http.tls import TlsFiles

CONNECTORS = {"pull": "BatonPullConnector", "push": "BatonPushConnector"}
STREAMS = ("off", "chunk", "layer")
LOOPBACK = "127.0.0.1"
ROUTER = "router"
# Shorter than the router's, so that it can forward its engines' error events when all end.
ENGINE_SHUTDOWN_S = 2.0
ROUTER_DRAIN_S = 5.0  # Below the time after which `baton up` kills stopped processes.
ROUTER_START_S = 120.0  # The router takes a second, or many on a busy machine.

KVRole = Literal["kv_producer", "kv_consumer"]


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """Arguments common to all engines of the system. None: the engine's own default."""

    model: Path
    tp: int = 1
    block_size: int | None = None
    num_blocks: int | None = None
    max_model_len: int | None = None
    dtype: str | None = None
    served_model_name: str | None = None
    device: str | None = None
    extra: tuple[str, ...] = ()  # Passed on to `baton serve`.

    def command(self, port: int, transfer_config: dict[str, Any] | None) -> list[str]:
        options: dict[str, object | None] = {
            "--host": LOOPBACK,
            "--port": port,
            "--tensor-parallel-size": self.tp,
            "--block-size": self.block_size,
            "--num-blocks": self.num_blocks,
            "--max-model-len": self.max_model_len,
            "--dtype": self.dtype,
            "--device": self.device,
            "--served-model-name": self.served_model_name,
            "--kv-transfer-config": json.dumps(transfer_config) if transfer_config else None,
            "--drain-timeout-s": 0
            if transfer_config
            else None,  # All end together: no engine will fetch a loan.
            "--shutdown-timeout-s": ENGINE_SHUTDOWN_S if transfer_config else None,
        }
        given = [text for key, value in options.items() if value is not None for text in (key, str(value))]
        return [sys.executable, "-m", "baton.cli", "serve", str(self.model), *given, *self.extra]


@dataclass(frozen=True, slots=True)
class HandoffArguments:
    """How KV is transferred from prefill to decode engines. Raises ConfigError."""

    mode: str = "pull"
    stream: str | None = None  # Setting of push; None: the connector's default.
    transports: tuple[str, ...] = ()  # Empty: the connector's default.

    def __post_init__(self) -> None:
        if self.mode not in CONNECTORS:
            raise ConfigError(f"must be one of {', '.join(CONNECTORS)}, is {self.mode!r}", field="mode")
        if self.stream is not None and self.stream not in STREAMS:
            raise ConfigError(f"must be one of {', '.join(STREAMS)}, is {self.stream!r}", field="stream")
        if self.stream is not None and self.mode != "push":
            raise ConfigError("is only for --mode push", field="stream")

    def transfer_config(self, engine_id: str, role: KVRole) -> dict[str, Any]:
        config = {"kv_connector": CONNECTORS[self.mode], "kv_role": role, "engine_id": engine_id}
        given = {"stream": self.stream, "transports": list(self.transports)}
        extra = {name: value for name, value in given.items() if value}
        return {**config, "kv_connector_extra_config": extra} if extra else config


@dataclass(frozen=True, slots=True)
class EnginePlan:
    name: str
    port: int
    arguments: EngineArguments
    transfer_config: dict[str, Any] | None  # None: an engine without a connector.

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def command(self) -> list[str]:
        return self.arguments.command(self.port, self.transfer_config)


@dataclass(frozen=True, slots=True)
class SystemPlan:
    """All processes of a system, before any is started."""

    handoff: HandoffArguments
    prefill: tuple[EnginePlan, ...]
    decode: tuple[EnginePlan, ...]
    single: tuple[EnginePlan, ...]
    router_host: str
    router_port: int
    router_tls: TlsFiles | None = None

    @property
    def engines(self) -> tuple[EnginePlan, ...]:
        return (*self.prefill, *self.decode, *self.single)

    @property
    def roles(self) -> tuple[tuple[str, ...], ...]:
        """Names of processes, grouped by the work that they do."""
        engines = (self.prefill, self.decode, self.single)
        return (*(tuple(engine.name for engine in role) for role in engines if role), (ROUTER,))

    @property
    def router_url(self) -> str:
        scheme = "http" if self.router_tls is None else "https"
        return f"{scheme}://{self.router_host}:{self.router_port}"

    def router_command(self) -> list[str]:
        command = [sys.executable, "-m", "baton.cli", "route"]
        command += ["--host", self.router_host, "--port", str(self.router_port), "--mode", self.handoff.mode]
        command += ["--drain-timeout-s", str(ROUTER_DRAIN_S)]
        if self.router_tls is not None:
            command += ["--tls-cert", self.router_tls.cert, "--tls-key", self.router_tls.key]
        for engine in self.prefill:
            command += ["--prefill", engine.url]
        for engine in self.decode:
            command += ["--decode", engine.url]
        return command


def plan_system(
    arguments: EngineArguments,
    *,
    num_prefill: int,
    num_decode: int,
    num_single: int = 0,
    router_host: str = LOOPBACK,
    router_port: int | None = None,
    router_tls: TlsFiles | None = None,
    handoff: HandoffArguments | None = None,
    prefill_arguments: EngineArguments | None = None,
) -> SystemPlan:
    """Plan a system on free loopback ports; `router_port` may be given.

    `prefill_arguments`: for the prefill engines, if they differ from `arguments`.
    """
    handoff = handoff if handoff is not None else HandoffArguments()
    roles: list[tuple[str, KVRole | None, int, EngineArguments]] = [
        ("prefill", "kv_producer", num_prefill, prefill_arguments or arguments),
        ("decode", "kv_consumer", num_decode, arguments),
        ("single", None, num_single, arguments),
    ]
    ports = iter(free_ports(num_prefill + num_decode + num_single + 1))
    engines: dict[str, tuple[EnginePlan, ...]] = {}
    for kind, role, count, its_arguments in roles:
        names = [f"{kind}-{index}" for index in range(count)]
        engines[kind] = tuple(
            EnginePlan(
                name, next(ports), its_arguments, handoff.transfer_config(name, role) if role else None
            )
            for name in names
        )
    spare_port = next(ports)
    return SystemPlan(
        handoff,
        prefill=engines["prefill"],
        decode=engines["decode"],
        single=engines["single"],
        router_host=router_host,
        router_port=spare_port if router_port is None else router_port,
        router_tls=router_tls,
    )


def start_system(fleet: Fleet, plan: SystemPlan, *, timeout_s: float, console: Console) -> None:
    """Start everything and wait until it answers. Raises ChildDied or StartTimeout; the fleet's owner
    stops the rest.
    """
    with _showing_start(console) as show:
        _start_engines(fleet, plan.engines, timeout_s, show)
        began_s = time.monotonic()
        router = fleet.start(ROUTER, plan.router_command())
        show(router.name, None)
        fleet.wait_ready(
            {router: f"{plan.router_url}/health"},
            timeout_s=ROUTER_START_S,
            verify=True if plan.router_tls is None else verifying_own(plan.router_tls),
        )
        show(router.name, time.monotonic() - began_s)


def start_engines(fleet: Fleet, engines: Sequence[EnginePlan], *, timeout_s: float, console: Console) -> None:
    """Start engines as `start_system` does, without a router."""
    with _showing_start(console) as show:
        _start_engines(fleet, engines, timeout_s, show)


def _start_engines(
    fleet: Fleet, engines: Sequence[EnginePlan], timeout_s: float, show: Callable[[str, float | None], None]
) -> None:
    env = {SECRET_ENV: os.environ.get(SECRET_ENV) or secrets.token_hex(32), "TOKENIZERS_PARALLELISM": "false"}
    began_s = time.monotonic()
    started = {fleet.start(e.name, e.command(), env=env): e for e in engines}
    for engine in engines:
        show(engine.name, None)
    fleet.wait_ready(
        {child: f"{engine.url}/health" for child, engine in started.items()},
        timeout_s=timeout_s,
        on_ready=lambda child: show(child.name, time.monotonic() - began_s),
    )


@contextmanager
def _showing_start(console: Console) -> Iterator[Callable[[str, float | None], None]]:
    """Show spinners on a terminal, else one line per event. The function is called with None at a start."""
    if not console.is_terminal:

        def show_line(name: str, took_s: float | None) -> None:
            console.print(f"{name}: starting" if took_s is None else f"{name}: ready after {took_s:.1f} s")

        yield show_line
        return

    columns = (SpinnerColumn(finished_text="[green]✓"), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        tasks = {}

        def show(name: str, took_s: float | None) -> None:
            if took_s is None:
                tasks[name] = progress.add_task(f"{name} starts", total=1)
            else:
                progress.update(tasks[name], completed=1, description=f"{name} ready")

        yield show
