"""vLLM's own classes decode the events that we publish, and the reverse: the bytes are the same."""

import msgspec
import zmq
from vllm.distributed.kv_events import (
    AllBlocksCleared as VllmAllBlocksCleared,
)
from vllm.distributed.kv_events import (
    BlockRemoved as VllmBlockRemoved,
)
from vllm.distributed.kv_events import (
    BlockStored as VllmBlockStored,
)
from vllm.distributed.kv_events import (
    KVEventBatch as VllmKVEventBatch,
)
from vllm.distributed.kv_events import (
    ZmqEventPublisher,
)

from baton.contract.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from baton.core.config import KVEventsConfig
from baton.engine.core.kv_event_publisher import END, KVEventPublisher

WAIT_MS = 30_000
OURS = [
    BlockStored(
        block_hashes=[b"a" * 32, b"b" * 32],
        parent_block_hash=b"p" * 32,
        token_ids=[1, 2, 3, 4],
        block_size=2,
        medium="GPU",
    ),
    BlockRemoved(block_hashes=[b"a" * 32], medium="GPU"),
    AllBlocksCleared(),
]


def test_vllm_decodes_what_we_publish_and_replay() -> None:
    config = KVEventsConfig(
        enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*"
    )
    publisher = KVEventPublisher(config, clock=lambda: 1.5)
    assert publisher.replay_endpoint is not None
    publisher.publish(OURS)
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as replay:
            replay.connect(publisher.replay_endpoint)
            payload = b""
            while not payload:  # A replay request may overtake the batch.
                replay.send_multipart((b"", bytes(8)))
                while True:
                    assert replay.poll(WAIT_MS)
                    *_, number, answer = replay.recv_multipart()
                    if number == END:
                        break
                    payload = answer
        batch = msgspec.msgpack.decode(payload, type=VllmKVEventBatch)
    finally:
        context.destroy(linger=0)
        publisher.close()
    stored, removed, cleared = batch.events
    assert isinstance(stored, VllmBlockStored)
    assert isinstance(removed, VllmBlockRemoved)
    assert isinstance(cleared, VllmAllBlocksCleared)
    for ours, theirs in zip(OURS[:2], (stored, removed), strict=True):
        for name in ours.__struct_fields__:
            assert getattr(theirs, name) == getattr(ours, name), name
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 0)


def test_our_bytes_equal_vllms() -> None:
    batch = KVEventBatch(ts=2.5, events=OURS, data_parallel_rank=0)
    theirs = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=VllmKVEventBatch)
    assert msgspec.msgpack.encode(theirs) == msgspec.msgpack.encode(batch)


def test_the_end_of_a_replay_is_theirs() -> None:
    assert END == ZmqEventPublisher.END_SEQ
