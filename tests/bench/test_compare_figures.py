"""Percentiles and ratios of systems that were measured alternately."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.bench.compare.figures import Spread, difference, percentile, ratio

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


@given(values, st.floats(0, 1))
def test_a_percentile_agrees_with_numpy(measured: list[float], share: float) -> None:
    assert percentile(measured, share) == pytest.approx(np.percentile(measured, share * 100), abs=1e-6)


def test_a_ratio_is_taken_within_each_round() -> None:
    ours = {1: [2.0], 2: [40.0, 20.0, 30.0], 3: [5.0]}
    theirs = {1: [1.0], 2: [10.0], 4: [7.0]}
    assert ratio(ours, theirs) == Spread(median=2.5, low=2.0, high=3.0, num_rounds=2)


def test_the_allowance_of_a_goal_is_subtracted_first() -> None:
    assert ratio({1: [1.25]}, {1: [1.0]}, extra=0.25) == Spread(1.0, 1.0, 1.0, 1)


def test_systems_without_a_common_round_have_no_ratio() -> None:
    assert ratio({1: [1.0]}, {2: [1.0]}) is None
    assert ratio({1: []}, {1: [1.0]}) is None
    assert difference({}, {}) is None


def test_a_difference_is_taken_within_each_round() -> None:
    assert difference({1: [3.0], 2: [5.0]}, {1: [1.0], 2: [1.0]}) == Spread(3.0, 2.0, 4.0, 2)
