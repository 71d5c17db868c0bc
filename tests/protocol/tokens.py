"""A sound ticket and a sound introduction, to be changed by tests."""

from typing import Any

from baton.core.identity import KVIdentity
from baton.core.ids import Address, BlockId, EngineId, Epoch, LoanId, PromptHash, RequestId, TransferId
from baton.protocol.introduction import Introduction
from baton.protocol.ticket import Ticket

P = Address(EngineId("p"), Epoch(2**64 - 1))
MODEL = KVIdentity(
    model="m", weights="r", dtype="bfloat16", num_layers=2, num_kv_heads=4, head_dim=8, hash_seed="s"
)
HASH = PromptHash(bytes(range(32)))


def ticket(**changes: Any) -> Ticket:
    fields: dict[str, Any] = dict(
        producer=P,
        control_url="tcp://127.0.0.1:5555",
        public_key=bytes(32),
        loan_id=LoanId(P.epoch, 3),
        transfer_id=TransferId("t"),
        request_id=RequestId("r"),
        kv_identity=MODEL,
        tp_size=2,
        block_tokens=16,
        block_ids=((BlockId(4), BlockId(9)),),
        num_tokens=20,
        prompt_hash=HASH,
    )
    return Ticket(**{**fields, **changes})


def introduction(**changes: Any) -> Introduction:
    fields: dict[str, Any] = dict(
        address=P,
        control_url="tcp://127.0.0.1:5555",
        public_key=bytes(32),
        kv_identity=MODEL,
        tp_size=2,
        block_tokens=16,
    )
    return Introduction(**{**fields, **changes})
