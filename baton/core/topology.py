"""Which KV heads a tensor-parallel rank holds. Functions of integers.

Zero-based, half-open. With more ranks than heads each head is replicated on `tp_size / num_kv_heads`
neighbouring ranks.
"""


def kv_heads_of(rank: int, *, tp_size: int, num_kv_heads: int) -> range:
    """Global indices of the KV heads held by `rank`.

    `tp_size` must divide `num_kv_heads` or be a multiple of it; checked where configuration is read.
    """
    assert 0 <= rank < tp_size
    if tp_size <= num_kv_heads:
        assert num_kv_heads % tp_size == 0
        per_rank = num_kv_heads // tp_size
        return range(rank * per_rank, (rank + 1) * per_rank)
    assert tp_size % num_kv_heads == 0
    head = rank * num_kv_heads // tp_size
    return range(head, head + 1)


def replica_of(reader: int, num_readers: int, num_replicas: int, rotation: int) -> int:
    """Which of several equal copies `reader` takes, so that none is asked much more often than another.

    As many readers as replicas: each has its own. Fewer: they are spread out, and `rotation` shifts them, so
    that groups of readers which know nothing of each other do not all ask the first.
    """
    spread = reader * num_replicas // num_readers
    return spread if num_readers >= num_replicas else (spread + rotation) % num_replicas
