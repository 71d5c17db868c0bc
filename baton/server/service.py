"""Service that the endpoints call: checks availability, and converts request bodies to engine requests.

All client errors are found here, before the engine gets the request.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from baton.core.config import ModelConfig
from baton.core.engine_card import EngineCard
from baton.core.errors import UserError
from baton.core.transfer_params import parse_transfer_params
from baton.engine.api import EngineRequest, SamplingParams
from baton.engine.core.client import EngineClient
from baton.engine.text.tokenizer import Tokenizer
from baton.http.bodies import Bodies
from baton.http.errors import ApiError
from baton.http.settings import HttpSettings
from baton.server import continuation
from baton.server.logprobs import LogprobFormat
from baton.server.metrics import ServerMetrics
from baton.server.protocol.sampling import MAX_PROMPT_LOGPROBS, SamplingFields
from baton.server.protocol.structured import Constraint
from baton.server.protocol.weights import UpdateWeightsRequest, WeightInfo
from baton.server.samples import Sample
from baton.server.text import SampleText, StopStringFinder
from baton.server.tokens import PromptEncoder, check_length
from baton.server.transfer_ask import CheckParams, TransferAsk, first_of
from baton.tracing.span import Tracer

DEFAULT_LIMITS = HttpSettings()
MAX_CHOICES = 1024  # Prompts times samples of one HTTP request.
MAX_REQUEST_ID_CHARS = 256
RETRY_AFTER_S = 1  # A draining server does not come back; a retry reaches another one.


def check_common_params(raw: Mapping[str, Any] | None) -> None:
    """Check what does not depend on the connector."""
    parse_transfer_params(raw)


@dataclass(kw_only=True)
class Service:
    engine: EngineClient
    model_config: ModelConfig
    tokenizer: Tokenizer
    encoder: PromptEncoder
    bodies: Bodies
    metrics: ServerMetrics
    limits: HttpSettings = DEFAULT_LIMITS
    tracer: Tracer | None = None
    admin_port: int | None = None  # Where metrics and /baton/* are; None: on the main port.
    check_params: CheckParams = check_common_params
    introduction: EngineCard | None = None
    weights_root: Path | None = None  # Updates of the weights come from below it; None: there are none.
    is_draining: bool = False
    started_at: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        return self.model_config.served_model_name

    @property
    def weight_info(self) -> WeightInfo:
        return WeightInfo(self.model_config.weights_version, self.model_config.weights_digest)

    def take_weights(self, model_config: ModelConfig) -> None:
        """The engine's weights are those of `model_config` now."""
        self.model_config = model_config
        self.metrics.observe_weights(model_config)
        if (card := self.introduction) is not None and card.kv_identity is not None:
            identity = card.kv_identity.updated(
                model_config.weights_digest, model_config.weights_version or None
            )
            self.introduction = msgspec.structs.replace(card, kv_identity=identity)

    async def update_weights(self, asked: UpdateWeightsRequest) -> None:
        """Raise UserError, ApiError 403, or an error of `EngineClient.update_weights`."""
        if (root := self.weights_root) is None:
            raise ApiError(
                403,
                "this engine takes no other weights; start it with --weights-root FOLDER to allow those of "
                "checkpoints below that folder",
                code="updates_not_allowed",
            )
        self.check_open()
        try:
            root = root.resolve()
            folder = (root / asked.folder).resolve()
        except (OSError, ValueError) as error:
            raise UserError(f"is no path: {error}", field="folder") from error
        if not folder.is_relative_to(root):
            raise UserError("must be below the engine's --weights-root", field="folder")
        await self.engine.update_weights(
            str(folder), asked.version, mode=asked.mode, timeout_s=asked.timeout_s
        )

    def check_open(self) -> None:
        """Raise ApiError 503 if no new request can be accepted."""
        if self.engine.is_dead:
            raise ApiError(503, "the engine has stopped", code="engine_dead")
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="draining", retry_after_s=RETRY_AFTER_S)

    def check_healthy(self) -> None:
        """Raise ApiError 503 if this engine should be restarted or replaced."""
        self.check_open()
        if (reason := self.engine.unready_reason) is not None:
            raise ApiError(503, reason, code="not_ready", retry_after_s=RETRY_AFTER_S)
        if self.metrics.is_connector_retired:
            raise ApiError(
                503,
                "the KV connector has failed permanently (see the log): this engine computes every prompt "
                "itself and transfers no KV; restart it",
                code="connector_retired",
            )

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for another model. None and an empty name mean the served model."""
        if name and name != self.model_name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def make_samples(
        self,
        fields: SamplingFields,
        prompts: Sequence[list[int]],
        *,
        request_id: str,
        max_tokens: int | None,
        max_tokens_field: str,
        logprobs: int | None,
        prompt_field: str,
        prompt_logprobs: int | None = None,
        bad_words: tuple[tuple[int, ...], ...] = (),
        grammar: str | None = None,
    ) -> list[Sample]:
        """Make the samples; choice `p * n + i` is sample i of prompt p. Raises UserError.

        `prompts` are truncated already; `bad_words` are token ids.
        """
        fields.check_stream_options()
        n = fields.num_samples
        if len(prompts) * n > MAX_CHOICES:
            raise UserError(f"at most {MAX_CHOICES} choices; are {len(prompts)} prompts times {n}", field="n")
        vocab_size = self.model_config.vocab_size
        ask = TransferAsk.parse(fields, self.check_params, num_prompts=len(prompts), vocab_size=vocab_size)
        allowed_token_ids = fields.checked_allowed_ids(vocab_size, len(prompts) * n)
        num_shown = sum(map(len, prompts)) * n * (1 + (prompt_logprobs or 0))
        if prompt_logprobs is not None and num_shown > MAX_PROMPT_LOGPROBS:
            raise UserError(
                f"would be {num_shown} log-probabilities with those of the alternatives; at most "
                f"{MAX_PROMPT_LOGPROBS} fit into one answer: ask for fewer alternatives or for less text",
                field="prompt_logprobs" if fields.prompt_logprobs is not None else "logprobs",
            )
        if max_tokens is None:  # vLLM's name of it in a checkpoint.
            default = self.model_config.generation_config.get("max_new_tokens")
            max_tokens = default if type(default) is int and default > 0 else None
        arrival_time_s = time.monotonic()
        samples = []
        whole: SamplingParams | None = None
        for prompt_index, token_ids in enumerate(prompts):
            where = prompt_field if len(prompts) == 1 else f"{prompt_field}[{prompt_index}]"
            room = check_length(
                token_ids,
                max_tokens,
                self.model_config.max_model_len,
                field=where,
                max_field=max_tokens_field,
                continues_elsewhere=ask.is_prefill_leg,
            )
            if whole is None:  # The same for all prompts except max_tokens; its lists are checked once.
                whole = fields.sampling_params(
                    max_tokens=room,
                    logprobs=logprobs,
                    vocab_size=vocab_size,
                    defaults=self.model_config.generation_config,
                    prompt_logprobs=prompt_logprobs,
                    allowed_token_ids=allowed_token_ids,
                    bad_words=bad_words,
                    grammar=grammar,
                )
            params = whole
            if room != whole.max_tokens:
                params = msgspec.structs.replace(whole, max_tokens=room)
            if ask.given:
                continuation.check_goes_on(
                    ask.given,
                    max_tokens=room,
                    min_tokens=params.min_tokens,
                    stop_token_ids=self._stop_token_ids(params),
                )
            continues = ask.is_prefill_leg and room > 1
            if continues:
                params = first_of(params)
            # An answer of one token ends here, so no other engine needs its KV.
            hands_over = continues or not ask.is_prefill_leg
            for sample_index in range(n):
                index = prompt_index * n + sample_index
                is_first = sample_index == 0
                seed = None if params.seed is None else params.seed + sample_index
                request = EngineRequest(
                    # The client may send one X-Request-Id twice; the engine never sees an id twice.
                    request_id=f"{request_id}-{index}-{secrets.token_hex(4)}",
                    prompt_token_ids=token_ids,
                    output_token_ids=ask.given,
                    sampling_params=msgspec.structs.replace(params, seed=seed),
                    arrival_time_s=arrival_time_s,
                    priority=fields.checked_priority,
                    cache_salt=fields.checked_cache_salt,
                    session_id=fields.session_id,
                    kv_transfer_params=ask.params_of(hands_over=is_first and hands_over),
                )
                samples.append(
                    Sample(
                        index=index,
                        prompt_index=prompt_index,
                        request=request,
                        text=self._text(fields),
                        ask=ask,
                        include_stop=bool(fields.include_stop_str_in_output),
                        # The first fetches the KV; the others find it in the prefix cache.
                        waits_for_first=not is_first and ask.fetches,
                        continues_elsewhere=continues,
                        is_cut=max_tokens is not None and max_tokens > room,
                    )
                )
        return samples

    async def replay_given(self, samples: Sequence[Sample]) -> dict[int, str]:
        """Let the text of samples that another engine has begun follow its tokens. Raises UserError.

        Returns the text that the client has, by sample.
        """
        return {
            sample.index: await self.encoder.in_thread(partial(continuation.replay, given, sample.text))
            for sample in samples
            if (given := sample.request.output_token_ids)
        }

    async def grammar_of(self, wanted: Constraint | None) -> str | None:
        """Raises UserError."""
        return None if wanted is None else await self.encoder.grammar_of(wanted)

    def logprob_format(self, fields: SamplingFields) -> LogprobFormat:
        """Return the format of one choice, before its first token."""
        return LogprobFormat(
            self.tokenizer,
            as_token_ids=bool(fields.return_tokens_as_token_ids),
            skip_special_tokens=fields.skip_special_tokens is not False,
        )

    async def formats_begun(
        self, fields: SamplingFields, samples: Sequence[Sample]
    ) -> dict[int, LogprobFormat]:
        """Return the formats of choices that another engine has begun, after the tokens it has given."""
        formats: dict[int, LogprobFormat] = {}
        for sample in samples:
            if given := sample.request.output_token_ids:
                formats[sample.index] = self.logprob_format(fields)
                if sample.request.sampling_params.logprobs is not None:
                    await self.encoder.in_thread(partial(formats[sample.index].read, given))
        return formats

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        eos = () if params.ignore_eos else self.model_config.eos_token_ids
        return frozenset((*eos, *params.stop_token_ids))

    def _text(self, fields: SamplingFields) -> SampleText:
        return SampleText(
            self.tokenizer.detokenizer(skip_special_tokens=fields.skip_special_tokens is not False),
            StopStringFinder(fields.stop_strings, include_in_output=bool(fields.include_stop_str_in_output)),
            min_tokens=fields.min_tokens or 0,
        )
