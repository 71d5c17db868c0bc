"""`baton demo --connector ...` for connectors that store KV: sends each prompt twice.

                    first round                           second round
    offload         one engine computes and stores        the same one loads from host memory
    shared-storage  one engine computes and writes files  another one loads them
    tiered          one engine computes and writes to     it was killed and started again: it loads from
                    host memory and files                 files
    multi           P and D with a router: pull           the same two, each from its own host memory
                    hands over, offload stores

The engines' own prefix caches are off, so that tokens not computed in the second round are from the
connector. Both answers are compared with a single engine's.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx

from baton.cli import asking
from baton.cli.asking import AskingError
from baton.cli.demo_check import REQUEST_TIMEOUT_S, samples
from baton.cli.demo_prompts import DemoPrompt, num_new_blocks
from baton.cli.processes import free_ports
from baton.cli.system import EngineArguments, EnginePlan, HandoffArguments, SystemPlan, plan_system

KEEPING: Final = ("offload", "shared-storage", "tiered", "multi")
HOST_MEMORY_GIB = 0.25
STORE_TIMEOUT_S = 30.0  # The KV of the first round is stored in the background.
LOOK_EVERY_S = 0.05

NO_PREFIX_CACHE = "--no-enable-prefix-caching"

_TITLES: Final = {
    "offload": "One engine computes and stores, then loads from host memory",
    "shared-storage": "One engine computes and writes files, another one loads them",
    "tiered": "One engine computes and stores, is killed, starts again and loads from files",
    "multi": "P hands over to D and both store, then load from host memory",
}
_LOADED: Final = {  # (metric, label) -> name in the table.
    ("baton:kv_transfer_bytes_total", None): "pull",
    ("baton:kv_offload_bytes_total", "load"): "offload",
    ("baton:storage_loaded_bytes_total", None): "files",
}
_STORED: Final = "baton:kv_offload_stored_chunks_total"


@dataclass(frozen=True, slots=True)
class RoundsPlan:
    """Processes to start, and URLs to ask in each round."""

    connector: str
    system: SystemPlan | None  # P and D with a router; None: only engines.
    engines: tuple[EnginePlan, ...]
    single_url: str
    first_url: str
    second_url: str
    storing: tuple[EnginePlan, ...]  # Must have stored all prompts before the second round.
    folder: Path | None = None  # Folder of the files.
    restarts: bool = False  # The engines that store are killed and started again between the rounds.

    @property
    def title(self) -> str:
        return _TITLES[self.connector]


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: tuple[int, ...]
    first_token_s: float
    moved_bytes: dict[str, int]  # Bytes by name in the table.


@dataclass(frozen=True, slots=True)
class RoundsOutcome:
    prompt: DemoPrompt
    must_load: bool  # The prompt has blocks that the store keeps.
    expected: tuple[int, ...]
    first: Answer
    second: Answer
    stores: tuple[str, ...]  # The sources from which the second round may load.

    @property
    def is_equal(self) -> bool:
        return bool(self.expected) and self.expected == self.first.tokens == self.second.tokens

    @property
    def loaded_bytes(self) -> int:
        """Bytes that the second round has loaded from the stores."""
        return sum(self.second.moved_bytes.get(store, 0) for store in self.stores)

    @property
    def was_not_loaded(self) -> bool:
        return self.must_load and not self.loaded_bytes

    @property
    def is_good(self) -> bool:
        return self.is_equal and not self.was_not_loaded


def plan_rounds(
    connector: str, arguments: EngineArguments, *, folder: Path, handoff: HandoffArguments
) -> RoundsPlan:
    """Plan the rounds. `folder`: for the shared files. `handoff`: for multi."""
    assert connector in KEEPING
    uncached = replace(arguments, extra=(*arguments.extra, NO_PREFIX_CACHE))
    if connector == "multi":
        return _plan_multi(arguments, uncached, handoff)
    names = ("writer", "reader") if connector == "shared-storage" else ("engine",)
    single_port, *ports = free_ports(1 + len(names))
    stored = _storage(folder, arguments.block_size)
    transfer = {"offload": _offload(), "shared-storage": stored, "tiered": _tiered(stored)}[connector]
    single = EnginePlan("single", single_port, arguments, None)
    engines = tuple(
        EnginePlan(name, port, uncached, {**transfer, "kv_role": "kv_both", "engine_id": name})
        for name, port in zip(names, ports, strict=True)
    )
    return RoundsPlan(
        connector,
        None,
        (*engines, single),
        single.url,
        first_url=engines[0].url,
        second_url=engines[-1].url,
        storing=engines[:1],
        folder=None if connector == "offload" else folder,
        restarts=connector == "tiered",
    )


def _plan_multi(
    arguments: EngineArguments, uncached: EngineArguments, handoff: HandoffArguments
) -> RoundsPlan:
    system = plan_system(
        arguments, num_prefill=1, num_decode=1, num_single=1, handoff=handoff, prefill_arguments=uncached
    )

    def with_store(engine: EnginePlan) -> EnginePlan:
        """Put the store first, because its memory is nearer than another engine's. It stores and loads."""
        handing_over = dict(engine.transfer_config or {})
        shared = {"kv_role": "kv_both", "engine_id": handing_over.pop("engine_id")}
        children = [_offload(), handing_over]
        return replace(
            engine,
            arguments=uncached,
            transfer_config={
                "kv_connector": "BatonMultiConnector",
                "kv_connector_extra_config": {"connectors": children},
                **shared,
            },
        )

    system = replace(
        system,
        prefill=tuple(with_store(engine) for engine in system.prefill),
        decode=tuple(with_store(engine) for engine in system.decode),
    )
    return RoundsPlan(
        "multi",
        system,
        system.engines,
        system.single[0].url,
        first_url=system.router_url,
        second_url=system.router_url,
        storing=(*system.prefill, *system.decode),
    )


def _offload() -> dict[str, Any]:
    return {
        "kv_connector": "BatonOffloadConnector",
        "kv_connector_extra_config": {"cpu_gib": HOST_MEMORY_GIB},
    }


def _storage(folder: Path, block_size: int | None) -> dict[str, Any]:
    # The demo must load from files even on a machine with slow lookups and reads.
    extra = {
        "path": str(folder.absolute()),
        "chunk_tokens": block_size,
        "lookup_timeout_s": STORE_TIMEOUT_S,
        "recompute_if_faster_by_s": None,
    }
    return {"kv_connector": "BatonSharedStorageConnector", "kv_connector_extra_config": extra}


def _tiered(stored: dict[str, Any]) -> dict[str, Any]:
    extra = dict(stored["kv_connector_extra_config"])
    tiers = [
        {"type": "host", "cpu_gib": HOST_MEMORY_GIB},
        {"type": "files", "path": extra.pop("path")},
    ]
    return {"kv_connector": "BatonTieredConnector", "kv_connector_extra_config": {"tiers": tiers, **extra}}


def run_rounds(
    plan: RoundsPlan,
    prompts: Sequence[DemoPrompt],
    *,
    max_tokens: int,
    restart: Callable[[Sequence[EnginePlan]], None],
) -> list[RoundsOutcome]:
    """Run both rounds. `restart`: kills engines and starts them again. Raises AskingError."""
    block_size = plan.storing[0].arguments.block_size
    assert block_size is not None
    stores = {"shared-storage": ("files",), "tiered": ("offload", "files")}.get(plan.connector, ("offload",))
    with httpx.Client(timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:

        def ask_measured(url: str, prompt: DemoPrompt) -> Answer:
            before = _loaded_bytes(client, plan)
            answer = asking.ask(client, url, prompt.token_ids, max_tokens=max_tokens)
            after = _loaded_bytes(client, plan)
            moved = {name: after[name] - before[name] for name in after if after[name] > before[name]}
            return Answer(answer.token_ids, answer.first_token_s, moved)

        expected = [
            asking.ask(client, plan.single_url, prompt.token_ids, max_tokens=max_tokens).token_ids
            for prompt in prompts
        ]
        first = [ask_measured(plan.first_url, prompt) for prompt in prompts]
        num_chunks = sum(num_new_blocks(prompts, i, block_size=block_size) for i in range(len(prompts)))
        _wait_stored(client, plan, num_chunks)
        if plan.restarts:
            restart(plan.storing)
        second = [ask_measured(plan.second_url, prompt) for prompt in prompts]
    return [
        RoundsOutcome(prompt, (len(prompt.token_ids) - 1) // block_size > 0, right, computed, loaded, stores)
        for prompt, right, computed, loaded in zip(prompts, expected, first, second, strict=True)
    ]


def _loaded_bytes(client: httpx.Client, plan: RoundsPlan) -> dict[str, int]:
    """Return the bytes loaded by all engines since they started, by name in the table."""
    loaded = dict.fromkeys(_LOADED.values(), 0.0)
    for engine in plan.engines:
        for sample in samples(client, engine.url):
            name = _LOADED.get((sample.name, sample.labels.get("direction")))
            if name is not None:
                loaded[name] += sample.value
    return {name: round(nbytes) for name, nbytes in loaded.items()}


def _wait_stored(client: httpx.Client, plan: RoundsPlan, num_chunks: int) -> None:
    """Wait until everything is stored. Raises AskingError after the timeout."""
    deadline_s = time.monotonic() + STORE_TIMEOUT_S
    while any((stored := _num_stored(client, plan, engine)) < num_chunks for engine in plan.storing):
        if time.monotonic() > deadline_s:
            raise AskingError(f"{stored} of {num_chunks} blocks were stored within {STORE_TIMEOUT_S:.0f} s")
        time.sleep(LOOK_EVERY_S)


def _num_stored(client: httpx.Client, plan: RoundsPlan, engine: EnginePlan) -> int:
    if plan.folder is not None:  # An idle engine runs no step that could update its metrics.
        return len(list(plan.folder.rglob("*.safetensors"))) // engine.arguments.tp
    return round(sum(s.value for s in samples(client, engine.url) if s.name == _STORED))
