"""Recurrent states of vLLM's layers as parts that plans can divide over ranks.

    conv state "DS", family known    the parts that the embedded engine has too: any TP sizes, either host
    anything else                    whole tensors of one rank: between engines of one TP size only

vLLM's page of a state is the convolution's tensor and then the recurrent ones, without gaps. The channels of
the convolution are x, B and C (Mamba 2). With the layout "DS" the inputs of a channel are adjacent, so a
slice of the channels is one run of bytes. `VLLM_SSM_CONV_STATE_LAYOUT` chooses it; the default depends on the
CPU.

Sources: `MambaSpec` in `vllm/v1/kv_cache_interface.py`, `model_executor/layers/mamba/mamba_utils.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from baton.checkpoints.families import parse_architecture
from baton.core.errors import ConfigError, UserError
from baton.core.layout import FORMATS
from baton.core.states import StatePart, place_parts
from baton.hosts.vllm.groups import is_state, specs_of, state_spec

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_DIVISIBLE: Final = frozenset({"mamba2", "granite_hybrid"})
"""Families whose tensors in vLLM have the order of the embedded engine's parts."""


def parts_of(vllm_config: Any, kv_cache_config: Any) -> tuple[StatePart, ...]:
    """Parts of one layer's state in the whole model; empty without states. Raises ConfigError."""
    spec = state_spec(kv_cache_config)
    if spec is None:
        return ()
    if getattr(vllm_config.cache_config, "use_replayssm", False):
        raise ConfigError(
            "keeps inputs beside the state, which no peer would get; leave it out (vLLM's NIXL connector "
            "refuses it too)",
            field="cache_config.use_replayssm",
        )
    tp_size = int(vllm_config.parallel_config.tensor_parallel_size)
    layout = _conv_layout()
    if layout == "DS" and (parts := _known_parts(vllm_config, spec, tp_size)) is not None:
        return parts
    if tp_size > 1 or layout != "DS":
        logger.info("the states of this model can be handed over between engines of one TP size only")
    return tuple(
        StatePart(
            f"{layout} tensor {index} of {tp_size} ranks",
            tp_size,
            tuple(map(int, shape)),
            _dtype_name(dtype),
        )
        for index, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True))
    )


def with_states_as_bytes(
    kv_caches: Mapping[str, torch.Tensor], kv_cache_config: Any
) -> dict[str, torch.Tensor]:
    """The caches, those of states as `[num_blocks, bytes]`. Raises ConfigError for one of another size."""
    import torch

    sizes = {
        name: int(spec.state_content_size_bytes)
        for group in kv_cache_config.kv_cache_groups
        for spec in specs_of(group)
        if is_state(spec)
        for name in group.layer_names
    }
    as_bytes = dict(kv_caches)
    for name, nbytes in sizes.items():
        pages = kv_caches[name]
        content = pages[0].numel() * pages.element_size()
        if content < nbytes or (pages.numel() and not pages[0].is_contiguous()):
            raise ConfigError(
                f"has {content} bytes in a block, and a state has {nbytes}", field=f"kv_caches.{name}"
            )
        rows = pages.flatten(1) if pages.dim() > 2 else pages
        as_bytes[name] = rows.view(torch.uint8)[:, :nbytes]
    return as_bytes


def _known_parts(vllm_config: Any, spec: Any, tp_size: int) -> tuple[StatePart, ...] | None:
    """None: the family is not known, or this vLLM's state has another size than the family's."""
    try:
        architecture = parse_architecture(vllm_config.model_config.hf_config.to_dict())
    except UserError:
        return None
    if architecture.family not in _DIVISIBLE:
        return None
    conv_dtype, *others = map(_dtype_name, spec.dtypes)
    parts = tuple(
        StatePart(part.name, part.num_units, part.unit_shape, conv_dtype if _is_conv(part) else others[0])
        for part in architecture.state_parts(conv_dtype)
    )
    placed = [*place_parts(parts, tp_rank=0, tp_size=tp_size, alignment=1)]
    conv_bytes = sum(one.nbytes for one in placed if _is_conv(one.part))
    wanted = math.prod(spec.shapes[0]) * FORMATS[conv_dtype].itemsize
    total = placed[-1].offset + placed[-1].nbytes
    return parts if (conv_bytes, total) == (wanted, int(spec.state_content_size_bytes)) else None


def _is_conv(part: StatePart) -> bool:
    return part.name.startswith("conv")


def _conv_layout() -> str:
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    return str(get_conv_state_layout())


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
