"""Common parts of the tests of offload: engines stepped by hand."""

import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

from baton.connectors.offload.scheduler import OffloadSchedulerHalf
from baton.core.config import (
    EngineConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
)
from baton.core.kv_events import KVCacheEvent
from baton.engine.api import EngineRequest, SamplingParams
from baton.engine.core.engine_core import EngineCore
from baton.engine.llm import Completion
from tests.connectors import engine_world
from tests.connectors.engine_world import BLOCK

PATIENCE_S = 60.0
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


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


class Engine:
    """One engine, stepped by hand."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.completions: dict[str, Completion] = {}
        self.counts: Counter[str] = Counter()  # The connector's counts since start.
        self.failures: Counter[str] = Counter()
        self.num_preempted = 0
        self.num_load_failures = 0
        self._pause = threading.Event()

    def add(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams = GREEDY,
        params: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Completion:
        completion = self.completions[request_id] = Completion(request_id, prompt)
        refusal = self.core.add_request(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling_params=sampling,
                arrival_time_s=0.0,
                kv_transfer_params=params,
                **fields,
            )
        )
        if refusal is not None:
            completion.take(refusal)
        return completion

    def step(self) -> None:
        outputs = self.core.step()
        for output in outputs.outputs:
            self.completions[output.request_id].take(output)
        if outputs.stats is not None:
            self.num_preempted += outputs.stats.num_preempted
            self.num_load_failures += outputs.stats.num_kv_load_failures
            data = outputs.stats.kv_connector_stats or {}
            self.counts.update({name: data[name] for name in data if isinstance(data[name], int)})
            self.failures.update(data.get("failures", {}))
        if not self.core.num_scheduled_tokens:
            self._pause.wait(0.0005)  # The copy thread needs the interpreter too.

    def run(self) -> None:
        """Runs until all requests and everything that they started have ended."""
        deadline = time.monotonic() + PATIENCE_S
        while self.core.has_requests:
            assert time.monotonic() < deadline, "a request did not end"
            self.step()

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
