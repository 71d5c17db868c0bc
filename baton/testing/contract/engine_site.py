"""Kit site with real engines: a small checkpoint and real executors; checks tokens against a reference."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from baton.checkpoints.checkpoint import load_model_config
from baton.checkpoints.random_model import write_checkpoint
from baton.contract import NullSchedulerHalf
from baton.core.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from baton.engine.api import EngineRequest, SamplingParams
from baton.engine.executor import Executor
from baton.engine.executor.inprocess import InProcessExecutor
from baton.engine.executor.start import start_executor
from baton.engine.step import ModelRunnerOutput, SchedulerOutput
from baton.testing.contract.arithmetic import VOCAB
from baton.testing.contract.case import (
    BLOCK,
    KV_HEADS,
    MAX_MODEL_LEN,
    STATE,
    ConnectorCase,
    Shape,
    Windows,
    engine_config,
    knows_groups,
    knows_states,
)
from baton.testing.contract.engine import Expect
from baton.testing.contract.ledger import Ledger
from baton.testing.contract.site import ToySite
from baton.testing.contract.watched_worker import PATH
from baton.testing.host.engine import Engine

if TYPE_CHECKING:
    from baton.engine.executor.ray_actors import RankActors

WINDOWS: Windows = (None, 6)  # Windows of the model with several KV-cache groups.
STATES: Windows = (STATE, None)  # Layers of the model with recurrent states.

MODEL_VOCAB = 512

ExecutorName = Literal["inprocess", "multiprocess", "ray"]


class EngineSite(ToySite):
    """A ToySite that runs on one of the engine's own executors."""

    is_expensive = True
    num_marks = MODEL_VOCAB - VOCAB

    def __init__(self, case: ConnectorCase, executor: ExecutorName) -> None:
        super().__init__(case)
        self.executor = executor
        if executor == "inprocess":
            self.steps_in_flight = (1,)  # A submitted step has run already.
        # Ray's own files, and its connections to the actors of all examples.
        self.keeps_files = executor == "ray"
        self._actors: RankActors | None = None
        # Made before the first example, so that Ray's threads are not blamed on the connector.
        if executor == "ray":
            from baton.engine.executor.ray_actors import RankActors

            self._actors = RankActors(engine_config(case, Shape()))
        self._folder = tempfile.TemporaryDirectory(prefix="baton-kit-")
        self.windows = ((), WINDOWS) if knows_groups(case) else ((),)
        if knows_states(case):
            self.windows += (STATES,)
        self._models: dict[Windows, tuple[ModelConfig, Reference]] = {}

    def model_of(self, shape: Shape) -> tuple[ModelConfig, Expect]:
        windows = shape.windows
        if windows not in self._models:
            folder = Path(self._folder.name) / str(len(self._models))
            write_checkpoint(
                folder,
                family="granite_hybrid" if windows == STATES else "qwen3",
                hidden=32,
                layers=2,
                heads=KV_HEADS,
                kv_heads=KV_HEADS,
                vocab=MODEL_VOCAB,
                sliding_window=windows[-1] if windows == WINDOWS else None,
            )
            model = load_model_config(folder, max_model_len=MAX_MODEL_LEN)
            assert model.vocab_size == MODEL_VOCAB, "the model must have every token of the kit's prompts"
            if windows == STATES:
                assert model.state_layers == (0,), model.state_layers
            else:
                assert model.windows in (windows, (None,) * len(model.windows)), model.windows
            self._models[windows] = model, Reference(engine_config(self.case, Shape(), model=model))
        model, reference = self._models[windows]
        return model, reference.tokens

    def final_notes_folder(self) -> str | None:
        if self.executor == "inprocess":
            return None
        return tempfile.mkdtemp(prefix="last-words-", dir=self._folder.name)

    def start_executor(self, config: EngineConfig, ledger: Ledger, salts: dict[str, str | None]) -> Executor:
        if self._actors is None:
            return start_executor(config, PATH)
        from baton.engine.executor.ray import RayExecutor

        return RayExecutor(config, PATH, self._actors)

    def close(self) -> None:
        if self._actors is not None:
            self._actors.close()
        for _, reference in self._models.values():
            reference.close()
        self._folder.cleanup()


class Reference(Engine):
    """Engine with one rank and no connector. Greedy, so ranks and batches make no difference."""

    def __init__(self, config: EngineConfig) -> None:
        config = msgspec.structs.replace(
            config,
            kv_transfer_config=None,
            parallel_config=ParallelConfig(),
            cache_config=CacheConfig(block_size=BLOCK, num_gpu_blocks=4 * MAX_MODEL_LEN // BLOCK),
        )
        super().__init__(config, NullSchedulerHalf(), {})
        self._executor = InProcessExecutor(config, None)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def finish(self, output: SchedulerOutput, begun: None) -> ModelRunnerOutput:
        return self._executor.execute(output)

    def tokens(self, prompt: Sequence[int], salt: str | None, count: int) -> list[int]:
        known = self._known.get(tuple(prompt), [])
        if len(known) < count:
            known = self._known[tuple(prompt)] = self._ask(prompt, count)
        return known[:count]

    def _ask(self, prompt: Sequence[int], count: int) -> list[int]:
        request_id = f"{len(self.answers)}-{count}"
        self.add_request(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=list(prompt),
                sampling_params=SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True),
                arrival_time_s=0.0,
            )
        )
        self.run()
        return self.answers[request_id].token_ids

    def close(self) -> None:
        self._executor.shutdown()
