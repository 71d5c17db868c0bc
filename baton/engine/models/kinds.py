"""Kinds of layers. The layers of one kind share the plan and rotation of a step."""

from typing import Any, NamedTuple

import torch

Rotation = tuple[torch.Tensor, torch.Tensor]


class Kind(NamedTuple):
    """Layers of one kind share the attention plan and rotation of a step."""

    group: int  # KV-cache group of the layers.
    window: int | None


class StepOfKind(NamedTuple):
    """What one kind of layer needs in a step."""

    rotation: Rotation
    plan: Any  # The attention backend's. None in a dummy run.
