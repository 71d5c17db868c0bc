"""Baton's part in vLLM's block pool: events of offloaded blocks, and block tables that keep one more token.

Uses vLLM's objects without a model; no engine is started.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from baton.connectors.host_view import HostPolicy
from baton.connectors.storage.memory.identity import OffloadIdentity
from baton.connectors.storage.memory.metadata import OffloadMetadata, OffloadReport
from baton.connectors.storage.memory.scheduler import OffloadSchedulerHalf
from baton.connectors.storage.memory.settings import OffloadSettings
from baton.core.errors import ConfigError
from baton.core.kv_groups import NULL_BLOCK_ID, KVCacheGroup
from baton.core.layout import CacheSpec
from baton.hosts.vllm.block_events import names_in_vllm
from baton.hosts.vllm.groups import cache_specs_of, groups_of, keep_one_token_more
from tests.connectors.host_views import view_fields

BLOCK, WINDOW, CHUNK = 16, 40, 64
SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)
SLIDING = SlidingWindowSpec(**SHAPE, sliding_window=WINDOW)
TOKENS = list(range(100, 100 + 5 * BLOCK + 3))
LENGTHS = (1, 39, 40, 41, 55, 56, 57, 100, 103, 104, 128, 200, 247, 248)
"""Where `n - WINDOW + 1` is a multiple of BLOCK, an unmodified vLLM keeps one block too few for a reload."""


def request(request_id: str = "r", tokens: Sequence[int] = TOKENS, **fields: Any) -> Request:
    init_none_hash(sha256)
    return Request(
        request_id=request_id,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=2),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
        **fields,
    )


def cache_of(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([str(index)], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=200, kv_cache_tensors=[], kv_cache_groups=groups)


def said_by_vllm(of: Request, num_blocks: int, group: int = 0) -> BlockStored:
    """When its own cache gets the first blocks of the request."""
    pool = BlockPool(
        num_gpu_blocks=8, enable_caching=True, hash_block_size=BLOCK, enable_kv_cache_events=True
    )
    pool.cache_full_blocks(of, pool.get_new_blocks(num_blocks), 0, num_blocks, BLOCK, group)
    (stored,) = pool.take_events()
    assert isinstance(stored, BlockStored)
    return stored


class Host:
    """vLLM's scheduler as far as the half sees it, with a rank that stores what it is asked to."""

    def __init__(self, *specs: Any, blocks_per_chunk: int = 1, num_slots: int = 64) -> None:
        groups = tuple(KVCacheGroup((), getattr(spec, "sliding_window", None)) for spec in specs)
        settings = OffloadSettings(
            cpu_gib=num_slots * blocks_per_chunk * len(groups) / (1 << 20), blocks_per_chunk=blocks_per_chunk
        )
        name_blocks, event_groups = names_in_vllm(cache_of(*specs), BLOCK)
        identity = OffloadIdentity(
            **view_fields(policy=HostPolicy(name_blocks=name_blocks, event_groups=event_groups)),
            settings=settings,
            block_tokens=BLOCK,
            block_bytes=1 << 10,
            groups=groups,
            publishes_events=True,
        )
        self.num_groups = len(groups)
        self.half = OffloadSchedulerHalf(identity)

    def compute(self, of: Request) -> None:
        """Compute all of the prompt in one step and deliver the report."""
        table = list(range(1, 1 + -(-of.num_tokens // BLOCK)))
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = [NewRequestData.from_request(of, tuple([table] * self.num_groups))]
        output.num_scheduled_tokens = {of.request_id: of.num_tokens}
        output.total_num_scheduled_tokens = of.num_tokens
        self.half.on_new_request(of)
        metadata = self.half.build_connector_meta(output)
        assert isinstance(metadata, OffloadMetadata)
        report = OffloadReport(rank=0, stored={store.job for store in metadata.stores})
        # vLLM's own class, which has the fields that the half reads.
        output: Any = KVConnectorOutput(kv_connector_worker_meta=report)  # type: ignore[arg-type]
        self.half.update_connector_output(output)

    def published(self) -> list[Any]:
        """Return events as a subscriber decodes them."""
        batch = KVEventBatch(ts=0.0, events=list(self.half.take_events()))
        events: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch).events
        return events


def as_read(event: BlockStored) -> BlockStored:
    """Tuples are lists on the wire."""
    read: BlockStored = msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=BlockStored)
    return read


@pytest.mark.parametrize("salt", [None, "tenant"])
@pytest.mark.parametrize("hashes", ["bytes", "integers"])
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_a_stored_block_has_the_name_of_vllms_cache(
    monkeypatch: pytest.MonkeyPatch, salt: str | None, hashes: str, blocks_per_chunk: int
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1" if hashes == "integers" else "0")
    of = request(cache_salt=salt)
    host = Host(FULL, blocks_per_chunk=blocks_per_chunk)
    host.compute(of)
    (stored,) = host.published()
    num_blocks = 5 // blocks_per_chunk * blocks_per_chunk
    expected = as_read(said_by_vllm(of, num_blocks))
    assert isinstance(expected.block_hashes[0], int if hashes == "integers" else bytes)
    expected.medium, expected.kv_cache_spec_kind = "CPU", "full_attention"
    assert stored == expected
    host.half.reset_cache()
    removed = host.published()
    assert all(isinstance(event, BlockRemoved) for event in removed)
    assert {(event.medium, event.group_idx) for event in removed} == {("CPU", 0)}
    assert [h for event in removed for h in event.block_hashes] == expected.block_hashes


def test_blocks_after_known_ones_name_their_parent() -> None:
    host, first = Host(FULL), request()
    host.compute(first)
    host.published()
    longer = request("longer", [*TOKENS[: 5 * BLOCK], *range(BLOCK)])
    host.compute(longer)
    (stored,) = host.published()
    assert (stored.parent_block_hash, stored.block_hashes) == (
        said_by_vllm(first, 5).block_hashes[-1],
        said_by_vllm(longer, 6).block_hashes[-1:],
    )
    assert stored.token_ids == list(range(BLOCK))


def test_blocks_of_several_groups_are_told_apart() -> None:
    of = request()
    host = Host(FULL, SLIDING)
    host.compute(of)
    stored = host.published()
    kinds = [
        (event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) for event in stored
    ]
    assert kinds == [(0, "full_attention", None), (1, "sliding_window", WINDOW)]
    for event in stored:
        assert event.block_hashes == said_by_vllm(of, 5, event.group_idx).block_hashes
    host.half.reset_cache()
    assert {event.group_idx for event in host.published()} == {0, 1}


def holes(table: list[int], num_tokens: int) -> list[bool]:
    return [block_id == NULL_BLOCK_ID for block_id in table[: -(-num_tokens // BLOCK)]]


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_what_was_computed_and_what_is_loaded_have_the_blocks_that_a_ticket_names(num_tokens: int) -> None:
    config = cache_of(SLIDING, FULL)
    keep_one_token_more(config)
    pool = KVCacheManager(config, max_model_len=1024, scheduler_block_size=BLOCK, hash_block_size=BLOCK)
    windowed, whole = groups_of(config, BLOCK)
    assert whole.window is None
    first = windowed.first_kept(num_tokens, BLOCK)
    num_blocks = -(-num_tokens // BLOCK)
    expected = [[True] * first + [False] * (num_blocks - first), [False] * num_blocks]

    computed = request("computed", range(num_tokens), cache_salt="computed")
    while computed.num_computed_tokens < num_tokens:
        step = min(CHUNK, num_tokens - computed.num_computed_tokens)
        assert pool.allocate_slots(computed, step) is not None
        computed.num_computed_tokens += step
    pool.remove_skipped_blocks("computed", num_tokens)  # vLLM does the same before it asks a connector.
    assert [holes(table, num_tokens) for table in pool.get_block_ids("computed")] == expected

    loaded = request("loaded", range(num_tokens), cache_salt="loaded")
    assert pool.allocate_slots(loaded, 0, num_external_computed_tokens=num_tokens, delay_cache_blocks=True)
    assert [holes(table, num_tokens) for table in pool.get_block_ids("loaded")] == expected


def test_the_specs_of_vllm_tell_what_each_cache_holds() -> None:
    shape: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    latent = {**shape, "num_kv_heads": 1, "head_size": 576}
    specs = {
        "full": FullAttentionSpec(**shape),
        "fp8": FullAttentionSpec(**shape, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR),
        "int8": FullAttentionSpec(**shape, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD),
        "latent": MLAAttentionSpec(**latent),
        "fp8_ds_mla": MLAAttentionSpec(**latent, cache_dtype_str="fp8_ds_mla"),
        "index": MLAAttentionSpec(**latent, cache_role=SparseCacheRole.INDEXER),
    }
    groups = [
        KVCacheGroupSpec([*specs], UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=specs)),
        KVCacheGroupSpec(["window"], SlidingWindowSpec(**shape, sliding_window=9)),
        KVCacheGroupSpec(["state"], MambaSpec(block_size=BLOCK, shapes=((4,),), dtypes=(torch.float32,))),
    ]
    config = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    assert cache_specs_of(config, 4) == {
        "full": CacheSpec("keys_and_values", "", 4),
        "fp8": CacheSpec("keys_and_values", "", 4, "constant"),
        "int8": CacheSpec("keys_and_values", "", 4, "inline"),
        "latent": CacheSpec("latent", "", 1),
        "fp8_ds_mla": CacheSpec("latent", "", 1, "inline", "vllm latent fp8_ds_mla"),
        "index": CacheSpec("index_keys", "", 1, "inline", "vllm indexer"),
        "window": CacheSpec("keys_and_values", "", 4),
    }


def test_slots_of_several_tokens_are_refused_by_name() -> None:
    """DeepSeek V4 has such slots: its latents are compressed."""
    spec = MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, tokens_per_state=4
    )
    config = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a"], spec)])
    with pytest.raises(ConfigError, match=r"cache 4 tokens in one slot \(MLAAttentionSpec\)"):
        cache_specs_of(config, 1)
