"""vLLM's own classes decode the events that we publish, and the reverse."""

from inspect import signature
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed import kv_events as theirs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from baton.core.config import KVEventsConfig
from baton.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from baton.engine.core.kv_event_publisher import END, KVEventPublisher
from baton.router.fleet.block_index import BlockIndex, Match, prefix_keys, root_key

WAIT_MS = 30_000
BLOCK = 16
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
            # What an older vLLM does not know is not set, so it is not sent.
            assert getattr(event, name, None) == getattr(ours, name), name
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 0)


def test_our_maps_equal_vllms() -> None:
    """The header of a map depends on how many fields the events of a version can have."""
    batch = KVEventBatch(ts=2.5, events=OURS, data_parallel_rank=0)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=theirs.KVEventBatch)
    ours, vllms = (msgspec.msgpack.encode(one) for one in (batch, decoded))
    assert msgspec.msgpack.decode(ours) == msgspec.msgpack.decode(vllms)


def test_no_field_of_vllms_events_is_missing() -> None:
    for ours in OURS:
        theirs_of = getattr(theirs, type(ours).__name__)
        assert set(theirs_of.__struct_fields__) - set(ours.__struct_fields__) == set()


def test_the_end_of_a_replay_is_theirs() -> None:
    assert END == theirs.ZmqEventPublisher.END_SEQ


def stored_by_vllm(tokens: list[int], salt: str | None, **hashed: int) -> list[Any]:
    """The events of vLLM's own block pool, as a router decodes them."""
    init_none_hash(sha256)
    asked = Request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=2),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256, **hashed),
        cache_salt=salt,
    )
    num_blocks = len(tokens) // BLOCK
    pool = BlockPool(
        num_gpu_blocks=num_blocks + 2,
        enable_caching=True,
        hash_block_size=BLOCK,
        enable_kv_cache_events=True,
        **hashed,
    )
    blocks = pool.get_new_blocks(num_blocks)
    pool.cache_full_blocks(asked, blocks, 0, num_blocks, BLOCK, 0)
    batch = theirs.KVEventBatch(ts=0.0, events=pool.take_events())
    return list(msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch).events)


@pytest.mark.parametrize("salt", [None, "theirs"])
def test_a_router_finds_a_prompt_where_vllm_has_it(salt: str | None) -> None:
    tokens = list(range(1, 601))
    index = BlockIndex()
    index.apply("e", stored_by_vllm(tokens, salt))
    for asked in (None, "theirs", "ours"):
        found = index.match(prefix_keys(tokens, BLOCK, root_key(None, asked)), BLOCK)
        assert found == ({"e": Match.in_cache(512)} if asked == salt else {})


@pytest.mark.skipif(
    "num_hash_lookahead_tokens" not in signature(BlockPool).parameters, reason="this vLLM hashes blocks alone"
)
def test_a_router_finds_blocks_whose_hash_covers_tokens_after_them() -> None:
    tokens = list(range(1, 601))
    (stored,) = events = stored_by_vllm(tokens, None, num_hash_lookahead_tokens=2)
    assert stored.lookahead_token_ids[:2] == [[17, 18], [33, 34]]
    index = BlockIndex()
    index.apply("e", events)
    assert index.match(prefix_keys(tokens, BLOCK, root_key(None, None)), BLOCK) == {"e": Match.in_cache(512)}
