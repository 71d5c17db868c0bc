"""vLLM's own classes decode the events that we publish, and the reverse: the bytes are the same."""

from typing import Any

import msgspec
import zmq
from vllm.distributed import kv_events as theirs

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


def replayed(endpoint: str) -> list[Any]:
    """Return every batch that an engine has published, as vLLM decodes it."""
    batches: list[Any] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as replay:
        replay.connect(endpoint)
        replay.send_multipart((b"", bytes(8)))
        while True:
            assert replay.poll(WAIT_MS), "the publisher does not answer"
            *_, number, batch = replay.recv_multipart()
            if number == theirs.ZmqEventPublisher.END_SEQ:
                return batches
            batches.append(msgspec.msgpack.decode(batch, type=theirs.KVEventBatch))


def test_vllm_decodes_what_we_publish_and_replay() -> None:
    config = KVEventsConfig(
        enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*"
    )
    publisher = KVEventPublisher(config, clock=lambda: 1.5)
    assert publisher.replay_endpoint is not None
    publisher.publish(OURS)
    try:
        while not (batches := replayed(publisher.replay_endpoint)):
            pass  # A replay request may overtake the batch.
    finally:
        publisher.close()
    (batch,) = batches
    kinds = [theirs.BlockStored, theirs.BlockRemoved, theirs.AllBlocksCleared]
    assert [type(event) for event in batch.events] == kinds
    for ours, event in zip(OURS, batch.events, strict=True):
        for name in ours.__struct_fields__:
            assert getattr(event, name) == getattr(ours, name), name
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 0)


def test_our_bytes_equal_vllms() -> None:
    batch = KVEventBatch(ts=2.5, events=OURS, data_parallel_rank=0)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=theirs.KVEventBatch)
    assert msgspec.msgpack.encode(decoded) == msgspec.msgpack.encode(batch)


def test_the_end_of_a_replay_is_theirs() -> None:
    assert END == theirs.ZmqEventPublisher.END_SEQ
