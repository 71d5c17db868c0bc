"""A normally distributed tensor of a random checkpoint."""

from typing import NamedTuple


class RandomTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
