"""Random draws: a seed and a position give the same number in every release."""

import numpy as np

from baton.engine.runner.sampler import seed_of, uniforms


def test_draws() -> None:
    assert seed_of(7, "request", 0) == 11873505365014741023
    drawn = uniforms(np.array([1, 2**63], dtype=np.uint64), np.array([0, 5]))
    assert drawn.tolist() == [0.3381666012719897, 0.4538905258914596]
