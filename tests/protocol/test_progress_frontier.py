"""Progress frontiers and the parts between them, compared with cells counted one by one."""

from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.progress_frontier import ProgressFrontier, parts_between

NUM_LAYERS = 4
fronts = st.builds(ProgressFrontier, st.integers(0, 9), st.integers(0, 9), st.integers(0, NUM_LAYERS + 1))


def cells_of(front: ProgressFrontier, num_layers: int = NUM_LAYERS) -> set[tuple[int, int]]:
    whole = {(token, layer) for token in range(front.num_tokens) for layer in range(num_layers)}
    layers = range(min(front.partial_layers, num_layers))
    return whole | {(token, layer) for token in range(front.partial_tokens) for layer in layers}


@given(fronts, fronts)
def test_the_parts_between_two_frontiers_cover_the_difference_without_overlap(
    old: ProgressFrontier, new: ProgressFrontier
) -> None:
    cells = [
        (token, layer)
        for part in parts_between(old, new, NUM_LAYERS)
        for token in range(part.first_token, part.first_token + part.num_tokens)
        for layer in range(*(part.layers or (0, NUM_LAYERS)))
    ]
    assert len(cells) == len(set(cells))
    assert set(cells) == cells_of(new) - cells_of(old)


@given(fronts, fronts)
def test_a_frontier_reaches_another_if_it_covers_it_for_any_number_of_layers(
    new: ProgressFrontier, old: ProgressFrontier
) -> None:
    covers = all(cells_of(new, layers) >= cells_of(old, layers) for layers in range(1, NUM_LAYERS + 3))
    assert new.reaches(old) is covers


@given(fronts, st.integers(0, 9), st.integers(0, 9))
def test_between_limits_the_frontier_to_a_range(front: ProgressFrontier, first: int, end: int) -> None:
    first = min(first, end)
    kept = cells_of(front.between(first, end))
    inside = {cell for cell in cells_of(front) if cell[0] < end}
    assert kept == inside | cells_of(ProgressFrontier(first))


def test_a_chunk_that_is_announced_by_layers_is_read_by_layers() -> None:
    assert parts_between(ProgressFrontier(8, 16, 1), ProgressFrontier(8, 16, 3), 4)[0].layers == (1, 3)
    [rest] = parts_between(ProgressFrontier(8, 16, 3), ProgressFrontier(16), 4)
    assert (rest.first_token, rest.num_tokens, rest.layers) == (8, 8, (3, 4))
    whole, begun = parts_between(ProgressFrontier(8), ProgressFrontier(16, 24, 1), 4)
    assert (whole.layers, begun.layers) == (None, (0, 1))
