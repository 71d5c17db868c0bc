"""KV heads of each tensor-parallel rank, as functions of integers.

Ranks and heads are zero-based, ranges half-open. With more ranks than heads each head is replicated on
`tp_size / num_kv_heads` neighbouring ranks.
"""


def kv_heads_of(rank: int, *, tp_size: int, num_kv_heads: int) -> range:
    """Global indices of the KV heads held by `rank`.

    `tp_size` must divide `num_kv_heads` or be a multiple of it; the configuration checks that.
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
    """Index of the replica that `reader` reads from, chosen so that all get about the same load.

    With at least as many readers as replicas, every replica is used. With fewer, the readers are spread out,
    and `rotation` shifts them, so that independent groups of readers do not all read the first replica.
    """
    spread = reader * num_replicas // num_readers
    return spread if num_readers >= num_replicas else (spread + rotation) % num_replicas
