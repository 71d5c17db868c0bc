"""Estimate of what a tier would find with twice its memory, made while it runs.

A second policy of the same kind, with twice the capacity, gets the same keys. For a large tier it is a
*miniature*: it holds only keys of which the hash falls into a share of all, and so do all figures, which are
scaled up (Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015, and "Cache Modeling and
Optimization using Miniature Simulations", ATC 2017). A key that all prompts share may be sampled or not, and
would change the estimate much. So the keys that a sample has too few or too many count as found (their
SHARDS-adj).

The second policy holds keys only. It knows neither pins nor stores that are under way, so it may evict keys
that a real tier could not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from baton.stores.policies.policy import Admitted, EvictionPolicy, K

SAMPLED_KEYS = 4096  # SHARDS reports errors of about 1 % from some thousand keys on.


def _can_leave(key: object) -> bool:
    return True


class TwiceEstimated(EvictionPolicy[K]):
    """Passes all calls on to the policy of a tier, and estimates beside it."""

    def __init__(
        self, make: Callable[[int], EvictionPolicy[K]], capacity: int, sampled_keys: int = SAMPLED_KEYS
    ) -> None:
        super().__init__(capacity)
        self._policy = make(capacity)
        self._one_in = max(1, 2 * capacity // sampled_keys)
        self._twice = make(max(1, 2 * capacity // self._one_in))
        # Last sampled key before each held key in its prompt.
        self._sampled_before: dict[K, K | None] = {}
        self._carried = 0  # Keys that an earlier estimate has left for the next one; may be negative.

    def __len__(self) -> int:
        return len(self._policy)

    def __contains__(self, key: object) -> bool:
        return key in self._policy

    def num_found_by_twice(self, keys: Sequence[K]) -> int:
        """Estimated number of keys without a gap from the first that twice the memory would hold.

        For a large tier only the sum over many calls is an estimate.
        """
        sampled = [key for key in keys if self._is_sampled(key)]
        num_held = next((place for place, key in enumerate(sampled) if key not in self._twice), len(sampled))
        self._carried += len(keys) - self._one_in * (len(sampled) - num_held)
        num_found = min(max(self._carried, 0), len(keys))
        self._carried -= num_found
        return num_found

    def admit(self, key: K, can_leave: Callable[[K], bool], parent: K | None = None) -> Admitted[K] | None:
        sampled = parent
        if parent is not None and not self._is_sampled(parent):
            sampled = self._sampled_before.get(parent)
        self._note(key, sampled)
        admitted = self._policy.admit(key, can_leave, parent)
        if admitted is not None:
            self._sampled_before[key] = sampled
            if admitted.evicted is not None:
                del self._sampled_before[admitted.evicted]
        return admitted

    def use(self, key: K) -> None:
        self._note(key, self._sampled_before[key])
        self._policy.use(key)

    def refresh(self, keys: Iterable[K]) -> None:
        keys = list(keys)
        self._twice.refresh(key for key in keys if self._is_sampled(key))
        self._policy.refresh(keys)

    def discard(self, key: K) -> None:
        if key in self._twice:
            self._twice.discard(key)
        del self._sampled_before[key]
        self._policy.discard(key)

    def _is_sampled(self, key: K) -> bool:
        return hash(key) % self._one_in == 0

    def _note(self, key: K, parent: K | None) -> None:
        if not self._is_sampled(key):
            return
        if key in self._twice:
            self._twice.use(key)
        else:
            self._twice.admit(key, _can_leave, parent)
