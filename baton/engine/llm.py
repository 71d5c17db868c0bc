"""An engine in the caller's process: takes prompts, returns completions.

    with LLM(config) as llm:
        [completion] = llm.generate([[1, 2, 3]], SamplingParams(temperature=0))

`LLM` is for tests, demos and benchmarks; a server uses `EngineClient`.
"""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from baton.core.config import EngineConfig
from baton.core.secret_source import with_secret
from baton.engine.api import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    PromptLogprobs,
    RequestError,
    SamplingParams,
    TokenLogprobs,
)
from baton.engine.core.engine_core import EngineCore
from baton.engine.core.step_waits import StepWaits, Waker
from baton.engine.core.weights_update import WAIT_S, prepare_update

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Completion:
    """Completion of one prompt."""

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None  # Rows of the prompt's tokens except the first.
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
    kv_transfer_params: dict[str, Any] | None = None
    num_cached_tokens: int = 0
    num_transferred_tokens: int = 0

    def take(self, output: EngineOutput) -> None:
        self.token_ids += output.new_token_ids
        self.logprobs += output.new_logprobs or []
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.finish_reason = output.finish_reason
        self.error = output.error
        self.kv_transfer_params = output.kv_transfer_params
        self.num_cached_tokens = output.num_cached_tokens
        self.num_transferred_tokens = output.num_transferred_tokens


class LLM:
    """An engine in the caller's process. Use it as a context manager, or call `close`."""

    def __init__(
        self, config: EngineConfig, connector_factory: str | None = None, *, core: EngineCore | None = None
    ) -> None:
        """Load the model and start the engine.

        `connector_factory`: "module:name" of a factory for the halves of the configured connector; None:
        Baton's own. `core`: an engine core to use instead of a new one. If the configuration moves KV and has
        no secret, the secret of the environment or of the user is used. Raises UserError for a configuration
        that cannot run.
        """
        if core is None:
            config, warning = with_secret(config, os.environ)
            if warning:
                logger.warning(warning)
            core = EngineCore(config, connector_factory)
        self.core = core
        self._waker = Waker()
        self._waits = StepWaits(self.core, self._waker)
        self._num_requests = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        *,
        kv_transfer_params: Sequence[dict[str, Any] | None] | None = None,
    ) -> list[Completion]:
        """Run all prompts to their end, batched. Returns the completions in the order of the prompts.

        `prompts`: token ids. `sampling_params`: for all prompts, or one per prompt. `kv_transfer_params`: one
        per prompt, for the KV connector. A prompt that cannot run gets a completion with `error`.
        """
        num_prompts = len(prompts)
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * num_prompts
        kv_transfer_params = kv_transfer_params or [None] * num_prompts
        completions: dict[str, Completion] = {}
        for prompt, params, transfer in zip(prompts, sampling_params, kv_transfer_params, strict=True):
            completion = Completion(f"llm-{self._num_requests}", list(prompt))
            self._num_requests += 1
            completions[completion.request_id] = completion
            refusal = self.core.add_request(
                EngineRequest(
                    request_id=completion.request_id,
                    prompt_token_ids=completion.prompt_token_ids,
                    sampling_params=params,
                    arrival_time_s=time.monotonic(),
                    kv_transfer_params=transfer,
                )
            )
            if refusal is not None:
                completion.take(refusal)
        while any(completion.finish_reason is None for completion in completions.values()):
            for output in self._step():
                completions[output.request_id].take(output)
        return list(completions.values())

    def update_weights(
        self,
        folder: str | Path,
        version: str | None = None,
        *,
        mode: str = "wait",
        timeout_s: float = WAIT_S,
    ) -> None:
        """Compute with the weights of a checkpoint folder of the same architecture from now on.

        Raises UserError for a folder that does not fit, and UpdateFailed; the old weights then stay in use.

        Args:
            folder: has tensors of the same names, shapes and dtypes. Only its weights are taken.
            version: name of the weights, part of their identity in the fleet. None: their digest is enough.
            mode: what becomes of running requests; see `baton.engine.core.weights_update`.
            timeout_s: longest time that the mode may wait.
        """
        update = prepare_update(self.core.config.model_config, folder, version, mode, timeout_s)
        self.core.begin_update(update)
        while (end := self.core.take_update_end()) is None:
            self._step()
        end.check()

    def settle(self, timeout_s: float) -> None:
        """Step until the ranks have all messages and no block is held, lent blocks included.

        Raises TimeoutError.
        """
        deadline_s = time.monotonic() + timeout_s
        while self.core.has_requests:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the engine is not at rest after {timeout_s:g} s")
            self._step()

    def _step(self) -> list[EngineOutput]:
        outputs = self.core.step().outputs
        self._waits.wait_for_more()
        return outputs

    def close(self) -> None:
        """Idempotent."""
        self.core.shutdown()
        self._waker.close()
