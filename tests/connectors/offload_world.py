"""Common parts of the tests of offload: engines stepped by hand."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

from baton.connectors.storage.memory.scheduler import OffloadSchedulerHalf
from baton.core.config import (
    EngineConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
)
from baton.core.kv_events import KVCacheEvent
from baton.engine.api import SamplingParams
from baton.engine.llm import Completion
from tests.connectors import engine_world
from tests.connectors.engine_world import BLOCK, GREEDY, Stepped

PATIENCE_S = 60.0


def config_of(
    model: ModelConfig,
    num_blocks: int = 40,
    *,
    slots: float | None = 64,
    extra: dict[str, Any] | None = None,
    policy: str = "recompute",
    events: bool = False,
    engine: dict[str, Any] | None = None,
    **scheduler: Any,
) -> EngineConfig:
    """`slots`: blocks in host memory; None: an engine without a connector."""
    transfer = None
    if slots is not None:
        block_bytes = model.num_hidden_layers * model.num_kv_heads * BLOCK * model.token_bytes
        cpu_gib = (slots + 0.5) * block_bytes / 2**30
        transfer = KVTransferConfig(
            kv_connector="BatonOffloadConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_gib": cpu_gib, **(extra or {})},
            kv_load_failure_policy=policy,  # type: ignore[arg-type]
        )
    return engine_world.config_of(
        model,
        transfer,
        num_blocks=num_blocks,
        scheduler_config=SchedulerConfig(**scheduler),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if events else None,
        **(engine or {}),
    )


class Engine(Stepped):
    @property
    def counts(self) -> Counter[str]:
        """The connector's counts since start."""
        counts = Counter[str]()
        for stats in self.stats:
            data = stats.kv_connector_stats or {}
            counts.update({name: count for name, count in data.items() if isinstance(count, int)})
        return counts

    def ask(self, prompt: list[int], sampling: SamplingParams = GREEDY, **fields: Any) -> Completion:
        completion = self.add(f"r{len(self.completions)}", prompt, sampling, **fields)
        self.run()
        return completion

    def tokens(self, prompt: list[int], **fields: Any) -> list[int]:
        return self.ask(prompt, **fields).token_ids

    def forget(self) -> None:
        """Clears the engine's own cache; host memory stays."""
        assert self.core.scheduler.reset_prefix_cache()

    @property
    def half(self) -> OffloadSchedulerHalf:
        half = self.core._half
        return getattr(half, "scheduler_half", half)  # type: ignore[return-value]

    def hear_events(self) -> list[KVCacheEvent]:
        """Returns a list that receives all events from now on."""
        heard: list[KVCacheEvent] = []
        self.core._event_publisher = SimpleNamespace(publish=heard.extend, close=lambda: None)  # type: ignore[assignment]
        return heard

    def assert_whole(self) -> None:
        """Asserts that nothing is held, pinned or awaited."""
        self.core.scheduler.kv_cache.block_pool.assert_empty()
        half = self.half
        assert not half._stores
        assert not half._loads
        assert not half._prompts
        half._index.assert_consistent()
