"""Progress of a prompt's KV as a staircase of tokens and layers, and the parts between two such frontiers.

layers
  ^   |#################|              all layers of the first num_tokens tokens,
  |   |#################|:::::::|      and partial_layers of the first partial_tokens
  +---------------------+-------+----> tokens
"""

from collections.abc import Iterable
from itertools import pairwise

import msgspec

from baton.protocol.effects import Part


class ProgressFrontier(msgspec.Struct, frozen=True):
    num_tokens: int
    partial_tokens: int = 0
    partial_layers: int = 0

    def layers_at(self, token: int, num_layers: int) -> int:
        if token < self.num_tokens:
            return num_layers
        return min(self.partial_layers, num_layers) if token < self.partial_tokens else 0

    def reaches(self, other: "ProgressFrontier") -> bool:
        """Whether this frontier covers everything that `other` covers, for any number of layers."""
        if self.num_tokens >= other.end:
            return True
        if other.end == other.num_tokens:
            return False
        return (
            self.num_tokens >= other.num_tokens
            and self.partial_tokens >= other.partial_tokens
            and self.partial_layers >= other.partial_layers
        )

    @property
    def end(self) -> int:
        """The first token of which the frontier covers no layer."""
        return max(self.num_tokens, self.partial_tokens if self.partial_layers else 0)

    def between(self, first_token: int, end_token: int) -> "ProgressFrontier":
        """The frontier limited to the tokens from `first_token` (counted as covered) to `end_token`."""
        return ProgressFrontier(
            min(max(self.num_tokens, first_token), end_token),
            min(self.partial_tokens, end_token),
            self.partial_layers,
        )


def parts_between(old: ProgressFrontier, new: ProgressFrontier, num_layers: int) -> tuple[Part, ...]:
    """What `new` covers and `old` does not, in parts that do not overlap."""
    parts = []
    for first, end in pairwise(sorted({0, old.num_tokens, old.end, new.num_tokens, new.end})):
        low, high = old.layers_at(first, num_layers), new.layers_at(first, num_layers)
        if low < high:
            layers = None if (low, high) == (0, num_layers) else (low, high)
            parts.append(Part(first, end - first, layers))
    return tuple(parts)


def num_tokens_in(parts: Iterable[Part]) -> int:
    """Number of tokens in any of these parts, regardless of layers and groups."""
    count = end = 0
    for part in sorted(parts, key=lambda part: part.first_token):
        last = part.first_token + part.num_tokens
        count += max(0, last - max(part.first_token, end))
        end = max(end, last)
    return count
