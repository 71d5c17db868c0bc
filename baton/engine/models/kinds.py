"""Kinds of layers. The layers of one kind share the plan and rotation of a step."""

from typing import Any, NamedTuple

import torch

Rotation = tuple[torch.Tensor, torch.Tensor]


class Kind(NamedTuple):
    """Layers of one kind share the attention plan and rotation of a step."""

    group: int  # KV-cache group of the layers.
    window: int | None
    has_state: bool = False  # A recurrent state instead of attention.


class StepOfKind(NamedTuple):
    """What one kind of layer needs in a step."""

    rotation: Rotation | None  # None: the model has no positions.
    plan: Any  # The attention backend's, or a StatePlan. None in a dummy run.
