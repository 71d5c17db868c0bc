"""Validation of new requests: refuses those that can never run, with what to change.

A request that passes may wait or be preempted, but it gets its whole answer: the pool can hold it alone.
"""

from baton.core.config import EngineConfig, ModelConfig
from baton.core.errors import UserError
from baton.engine.api import EngineRequest, SamplingParams


def check_can_run(asked: EngineRequest, config: EngineConfig, num_tokens_max: int) -> None:
    """Raises UserError naming the field. `num_tokens_max`: that of the configuration."""
    prompt, max_tokens = asked.prompt_token_ids, asked.sampling_params.max_tokens
    context = config.model_config.max_model_len
    if not prompt:
        raise UserError("must have at least one token", field="prompt")
    if min(prompt) < 0 or max(prompt) >= config.model_config.vocab_size:
        raise UserError(
            f"has a token id outside the vocabulary, [0, {config.model_config.vocab_size})", field="prompt"
        )
    given = asked.output_token_ids
    if given and not (min(given) >= 0 and max(given) < config.model_config.vocab_size):
        raise UserError(
            f"has a token id outside the vocabulary, [0, {config.model_config.vocab_size})",
            field="output_token_ids",
        )
    if len(given) >= max_tokens:
        raise UserError(
            f"has {len(given)} tokens; the answer has at most {max_tokens}, so none is left",
            field="output_token_ids",
        )
    _check_tokens_left(asked.sampling_params, config.model_config)
    room = num_tokens_max - len(prompt)
    if num_tokens_max < context:
        num_blocks = config.cache_config.num_gpu_blocks
        held = f"the {num_tokens_max} that the {num_blocks} KV blocks of this engine hold"
        remedy = ", or give the engine more blocks"
    else:
        held, remedy = f"the context length of {context}", ""
    if room < 1:
        raise UserError(
            f"has {len(prompt)} tokens; with one token of output that is more than {held}: shorten the "
            f"prompt{remedy}",
            field="prompt",
        )
    if max_tokens > room:
        raise UserError(
            f"is {max_tokens}; with the prompt's {len(prompt)} tokens that is more than {held}: ask for at "
            f"most {room}, or shorten the prompt{remedy}",
            field="max_tokens",
        )


def _check_tokens_left(params: SamplingParams, model: ModelConfig) -> None:
    """Raises UserError if bans could leave no token to choose at some position."""
    allowed = params.allowed_token_ids
    if allowed is not None and not (min(allowed) >= 0 and max(allowed) < model.vocab_size):
        raise UserError(f"must be in [0, {model.vocab_size})", field="allowed_token_ids")
    words = params.bad_words_token_ids
    ends: set[int] = set()
    if params.min_tokens:
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else model.eos_token_ids)}
    # Words apply at one position if the beginning of each is a suffix of the longest beginning.
    for longest in {word[:-1] for word in words} | {()}:
        barred = ends | {word[-1] for word in words if longest[len(longest) + 1 - len(word) :] == word[:-1]}
        if len(barred) < (model.vocab_size if allowed is None else len(allowed)):
            continue
        if not set(range(model.vocab_size) if allowed is None else allowed) - barred:
            raise UserError(
                "can leave no token to choose: bad_words and min_tokens bar all of them; allow more",
                field="bad_words" if allowed is None else "allowed_token_ids",
            )
