"""Examples in real engines: a small checkpoint, real executors, tokens as without a connector."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from baton.contract import NullSchedulerHalf
from baton.core.config import CacheConfig, EngineConfig, ParallelConfig
from baton.engine.api import EngineRequest, SamplingParams
from baton.engine.checkpoint import load_model_config
from baton.engine.executor import Executor, start_executor
from baton.engine.executor.inprocess import InProcessExecutor
from baton.engine.new_model import write_checkpoint
from baton.engine.scheduler import Scheduler
from baton.testing.contract.arithmetic import VOCAB
from baton.testing.contract.case import BLOCK, KV_HEADS, MAX_MODEL_LEN, ConnectorCase, Shape, engine_config
from baton.testing.contract.engine import KitEngine
from baton.testing.contract.ledger import Ledger
from baton.testing.contract.site import ToySite
from baton.testing.contract.story import Story
from baton.testing.contract.watched_factory import PATH

ExecutorName = Literal["inprocess", "multiprocess", "ray"]


class EngineSite(ToySite):
    """Like a ToySite, over an executor of the engine's own."""

    is_dear = True

    def __init__(self, case: ConnectorCase, executor: ExecutorName) -> None:
        super().__init__(case)
        self._executor = executor
        self.keeps_files = executor == "ray"  # Its logs, and connections to actors that have ended.
        self._folder = tempfile.TemporaryDirectory(prefix="baton-kit-")
        write_checkpoint(
            Path(self._folder.name), hidden=32, layers=2, heads=KV_HEADS, kv_heads=KV_HEADS, vocab=512
        )
        self._model = load_model_config(Path(self._folder.name), max_model_len=MAX_MODEL_LEN)
        assert self._model.vocab_size >= VOCAB, "the kit's prompts are the model's tokens"
        self._reference = Reference(engine_config(case, Shape(), model=self._model))

    def start(self, shape: Shape, story: Story, *, name: str, role: str) -> KitEngine:
        config = engine_config(
            self.case,
            shape,
            engine_id=name,
            role=role,
            model=self._model,
            executor=self._executor,
            secret=self.secret,
        )
        return KitEngine(
            config,
            story,
            make_half=self.make_scheduler_half,
            make_executor=self._start_executor,
            expect=self._reference.tokens,
            name=name,
            checks_tokens=self.case.speaks_text,
        )

    def _start_executor(self, config: EngineConfig, ledger: Ledger, salts: dict[str, str | None]) -> Executor:
        return start_executor(config, PATH)

    def close(self) -> None:
        self._reference.close()
        self._folder.cleanup()


class Reference:
    """An engine of one rank without a connector. Greedy, so that ranks and batches make no difference."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = msgspec.structs.replace(
            config,
            kv_transfer_config=None,
            parallel_config=ParallelConfig(),
            cache_config=CacheConfig(block_size=BLOCK, num_gpu_blocks=2 * MAX_MODEL_LEN // BLOCK),
        )
        self._executor = InProcessExecutor(self._config, None)
        self._scheduler = Scheduler(self._config, NullSchedulerHalf())
        self._said: dict[tuple[int, ...], list[int]] = {}

    def tokens(self, prompt: Sequence[int], salt: str | None, count: int) -> list[int]:
        said = self._said.get(tuple(prompt), [])
        if len(said) < count:
            said = self._said[tuple(prompt)] = self._ask(prompt, count)
        return said[:count]

    def _ask(self, prompt: Sequence[int], count: int) -> list[int]:
        request_id = f"{len(self._said)}-{count}"
        self._scheduler.add_request(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=list(prompt),
                sampling_params=SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True),
                arrival_time_s=0.0,
            )
        )
        tokens: list[int] = []
        while self._scheduler.has_requests():
            step = self._scheduler.schedule()
            for output in self._scheduler.update_from_output(step, self._executor.execute(step)).outputs:
                tokens += output.new_token_ids
        return tokens

    def close(self) -> None:
        self._executor.shutdown()
