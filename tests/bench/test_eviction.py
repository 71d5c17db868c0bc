"""The replay of traces, compared with all possible decisions of a small tier."""

from itertools import combinations
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.stores.policies.eviction import make_policy
from lab.bench.eviction import measure, num_hits, num_hits_of_optimum, plot, read_prompts

# Prefixes of four chains that share their first block.
PROMPTS = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 3)).map(
        lambda it: [0, *(10 * it[0] + place for place in range(1, it[1]))]
    ),
    max_size=6,
)


def best_of_all(prompts: list[list[int]], capacity: int) -> int:
    """Hits if each step keeps any subset of what was held and what was just used."""
    reached = {frozenset[int](): 0}
    for prompt in prompts:
        after: dict[frozenset[int], int] = {}
        for held, hits in reached.items():
            found = next((place for place, key in enumerate(prompt) if key not in held), len(prompt))
            present = held | set(prompt)
            for size in range(min(capacity, len(present)) + 1):
                for kept in combinations(sorted(present), size):
                    key = frozenset(kept)
                    after[key] = max(after.get(key, 0), hits + found)
        reached = after
    return max(reached.values())


@settings(max_examples=50)
@given(prompts=PROMPTS, capacity=st.integers(1, 4))
def test_the_optimum_is_the_best_of_all_decisions(prompts: list[list[int]], capacity: int) -> None:
    assert num_hits_of_optimum(prompts, capacity) == best_of_all(prompts, capacity)


def test_a_hit_ends_at_the_first_block_that_is_missing() -> None:
    policy = make_policy("lru", 3)
    assert num_hits([[1, 2, 3], [1, 2, 4]], policy) == 2
    assert num_hits([[9, 2]], policy) == 0  # The tier holds block 2, but not the block before it.
    assert num_hits([[9]], policy) == 1


def test_a_block_that_is_not_full_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"input_length": 1000, "hash_ids": [5, 6]}\n{"input_length": 1024, "hash_ids": [5, 7]}\n'
    )
    assert read_prompts(path, full_only=False) == [[5, 6], [5, 7]]
    assert read_prompts(path, full_only=True) == [[5], [5, 7]]


def test_shares_are_measured_and_drawn(tmp_path: Path) -> None:
    found = measure([[0, *range(10 * number, 10 * number + 9)] for number in range(1, 8)] * 3)
    assert (found.blocks, found.distinct) == (210, 64)
    assert found.shares.keys() == {*found.us_a_block, "optimum"}
    assert found.shares["optimum"][-1] >= max(shares[-1] for shares in found.shares.values())
    picture = tmp_path / "eviction.png"
    plot({"conversation": found, "synthetic": found}, picture)
    assert picture.stat().st_size > 10_000
