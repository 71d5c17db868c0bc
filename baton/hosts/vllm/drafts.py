"""Layers of vLLM's draft model (EAGLE, MTP, a draft model of its own), by what vLLM has registered.

vLLM loads the model first and then the draft, and each attention layer registers itself as it is made. So
the draft's layers come last. How many they are is in the draft's configuration, and how many come before in
the model's; if these do not add up to what is registered, no layer counts as the draft's, and peers without
one are refused as before. Peers compare too: `baton.protocol.plan.unfilled_drafts`.

Sources: `LLMBaseProposer.load_model` in `vllm/v1/spec_decode/llm_base_proposer.py`, and
`_uses_trailing_mtp_layers` in `vllm/v1/core/kv_cache_utils.py`, which relies on the same order.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import Any

logger = logging.getLogger(__name__)


def draft_config(vllm_config: Any) -> Any | None:
    """vLLM's ModelConfig of the draft; None without a draft that has layers in the KV cache."""
    speculative = vllm_config.speculative_config
    if speculative is None or not (speculative.use_eagle() or speculative.uses_draft_model()):
        return None
    return speculative.draft_model_config


def draft_layers(vllm_config: Any, with_cache: Collection[str]) -> frozenset[str]:
    """Names of the draft's layers on this rank: some of `with_cache`, the registered caches.

    Only the last pipeline stage has them.
    """
    draft = draft_config(vllm_config)
    if draft is None:
        return frozenset()
    in_order = vllm_config.compilation_config.static_forward_context
    registered = [(name, re.findall(r"\d+", name)) for name in in_order if name in with_cache]
    num_target = int(vllm_config.model_config.get_num_layers(vllm_config.parallel_config))
    return last_layers(registered, num_target, int(draft.get_total_num_hidden_layers()))


def last_layers(registered: Iterable[tuple[str, object]], num_target: int, num_draft: int) -> frozenset[str]:
    """Names of the last `num_draft` layers, if `num_target` layers come before them; else none.

    `registered`: names of caches in the order of registration, with the index of their layer. Caches of one
    layer (latents and index keys) follow each other.
    """
    layers: Sequence[list[str]] = [
        [name for name, _ in caches] for _, caches in groupby(registered, lambda cache: cache[1])
    ]
    if len(layers) == num_target + num_draft:
        return frozenset(name for layer in layers[num_target:] for name in layer)
    if len(layers) != num_target:  # Otherwise it is a pipeline stage without the draft.
        logger.warning(
            "%d layers with a cache are registered, expected %d of the model and %d of its draft: only "
            "engines with the same draft can hand over prompts",
            len(layers),
            num_target,
            num_draft,
        )
    return frozenset()
