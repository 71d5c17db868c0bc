"""Memory that is taken and given back."""

from baton.stores.base.aligned import PAGE_BYTES, AlignedPool


def test_what_is_given_back_is_taken_again() -> None:
    pool = AlignedPool(1)
    first, second = pool.take(10), pool.take(10)
    assert first is not second
    pool.give_back(first)
    pool.give_back(second)  # One is kept.
    assert pool.take(PAGE_BYTES) is first
    assert pool.take(1) not in (first, second)


def test_pieces_have_the_size_of_the_largest() -> None:
    pool = AlignedPool(4)
    small = pool.take(10)
    large = pool.take(PAGE_BYTES + 1)
    assert (len(small), len(large)) == (PAGE_BYTES, 2 * PAGE_BYTES)
    pool.give_back(small)  # Too small for the next one.
    assert len(pool.take(PAGE_BYTES + 1)) == 2 * PAGE_BYTES


def test_a_small_piece_does_not_take_the_memory_of_a_large_one() -> None:
    pool = AlignedPool(4)
    pool.give_back(pool.take(8 * PAGE_BYTES))
    small = pool.take(10)
    assert len(small) == PAGE_BYTES
    pool.give_back(small)
    assert [len(pool.take(5 * PAGE_BYTES)) for _ in range(2)] == [8 * PAGE_BYTES] * 2
