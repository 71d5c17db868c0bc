"""Kinds of layers: layers of one kind share the attention plan and rotation of a step."""

from typing import Any, NamedTuple, TypeAlias

import torch

Rotation: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class Kind(NamedTuple):
    """Key of `StepOfKind`."""

    group: int  # KV-cache group of the layers.
    window: int | None


class StepOfKind(NamedTuple):
    """What attention needs for one kind of layer in a step."""

    rotation: Rotation
    plan: Any  # The backend's. None in a dummy run.
