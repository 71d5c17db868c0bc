"""Values of signed tokens and of a configuration, with every field set, for the tests that compare bytes."""

from typing import Any

from baton.connectors.host_view import BATON_POLICY
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.settings import PullSettings
from baton.core.config import (
    CacheConfig,
    ClusterSecret,
    EngineConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
)
from baton.core.identity import CurrentIdentity, KVIdentity
from baton.core.ids import Address, BlockId, EngineId, Epoch, LoanId, PromptHash, RequestId, TransferId
from baton.core.layout import CacheSpec, LayerLayout, RankLayout, Region
from baton.core.prefilled import PrefilledLogprob, PrefilledLogprobs, PrefilledTokens
from baton.protocol.handshake import RankCard
from baton.protocol.introduction import Introduction
from baton.protocol.ticket import Ticket
from baton.transport.base.host_identity import HostProcess

SECRET = b"correct horse battery staple"
HASH = PromptHash(bytes(range(32)))
PUBLIC_KEY = bytes(range(100, 132))
P, D = Address(EngineId("p"), Epoch(2**64 - 1)), Address(EngineId("d"), Epoch(7))
LOAN = LoanId(Epoch(2**64 - 1), 3)
TRANSFER = TransferId("transfer")
MODEL = KVIdentity(
    model="architecture",
    weights="weights",
    dtype="bfloat16",
    num_layers=2,
    num_kv_heads=4,
    head_dim=8,
    hash_seed="seed",
)
REGION = Region(address=4096, nbytes=1 << 20, device="cuda:1")
PROCESS = HostProcess(boot_id="boot", pid_namespace=4026531836, pid=17, start_ticks=12345)

_LIKELIEST = PrefilledLogprob(token_id=7, logprob=-0.25, rank=1)
TICKET = Ticket(
    producer=P,
    control_url="tcp://10.0.0.7:14600",
    public_key=PUBLIC_KEY,
    loan_id=LOAN,
    transfer_id=TRANSFER,
    request_id=RequestId("cmpl-1"),
    kv_identity=MODEL,
    tp_size=2,
    block_tokens=16,
    block_ids=((BlockId(4), BlockId(9)), (BlockId(11),)),
    windows=(None, 16),
    num_tokens=20,
    prompt_hash=HASH,
    prefilled=PrefilledTokens(
        token_ids=(7,),
        logprobs=(PrefilledLogprobs(chosen=_LIKELIEST, top=(_LIKELIEST,)),),
        sampling=b"sampling",
    ),
)
INTRODUCTION = Introduction(
    address=P,
    control_url="tcp://10.0.0.7:14600",
    public_key=PUBLIC_KEY,
    kv_identity=MODEL,
    tp_size=2,
    block_tokens=16,
)
CARD = RankCard(
    tp_rank=0,
    layout=RankLayout(
        tp_rank=0,
        tp_size=1,
        num_blocks=8,
        block_tokens=16,
        regions=(Region(address=4096, nbytes=16384),),
        layers=(
            LayerLayout(
                name="layer",
                spec=CacheSpec(
                    kind="keys_and_values", dtype="bfloat16", num_heads=4, scales="none", packing="slot"
                ),
                region=0,
                offset=0,
                block_stride=2048,
                head_stride=512,
                head_bytes=512,
                token_stride=0,
                group=0,
            ),
        ),
        pp_rank=0,
        pp_size=1,
    ),
    endpoints={"tcp": b"endpoint"},
    epoch=Epoch(5),
)


def pull_identity(**changes: Any) -> EngineIdentity:
    fields: dict[str, Any] = {
        "engine_id": P.engine_id,
        "current": CurrentIdentity(MODEL),
        "tp_size": 1,
        "tp_rank": 0,
        "block_tokens": 16,
        "is_producer": True,
        "is_consumer": True,
        "recomputes_failed_loads": True,
        "raises_user_errors": True,
        "policy": BATON_POLICY,
        "secret": None,
        "settings": PullSettings(),
    }
    return EngineIdentity(**{**fields, **changes})


ENGINE_CONFIG = EngineConfig(
    model_config=ModelConfig(
        model="/model",
        served_model_name="name",
        dtype="bfloat16",
        max_model_len=4096,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_kv_heads=4,
        head_dim=8,
        hidden_size=64,
        vocab_size=512,
        eos_token_ids=(2,),
        bos_token_id=1,
        architecture_digest="architecture",
        weights_digest="weights",
        hf_config={"a": 1},
        generation_config={"b": 2},
        windows=(None, 16),
    ),
    cache_config=CacheConfig(num_gpu_blocks=64),
    parallel_config=ParallelConfig(tensor_parallel_size=2, executor="multiprocess"),
    kv_transfer_config=KVTransferConfig(
        kv_connector="BatonPullConnector",
        kv_role="kv_both",
        engine_id="e",
        kv_connector_extra_config={"port": 14600},
    ),
    cluster_secret=ClusterSecret(SECRET),
    kv_events_config=KVEventsConfig(enable_kv_cache_events=True),
)
