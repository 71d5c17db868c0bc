"""Memory that is taken and given back."""

from baton.tiers.aligned import PAGE_BYTES, AlignedPool


def test_what_is_given_back_is_taken_again() -> None:
    pool = AlignedPool(1)
    first, second = pool.take(10), pool.take(10)
    assert first is not second
    pool.give_back(first)
    pool.give_back(second)  # One is kept.
    assert pool.take(PAGE_BYTES) is first
    assert pool.take(1) not in (first, second)


def test_all_pieces_have_the_size_of_the_largest() -> None:
    pool = AlignedPool(4)
    small = pool.take(10)
    large = pool.take(PAGE_BYTES + 1)
    assert (len(small), len(large)) == (PAGE_BYTES, 2 * PAGE_BYTES)
    pool.give_back(small)  # Too small for the next one.
    assert len(pool.take(10)) == 2 * PAGE_BYTES
