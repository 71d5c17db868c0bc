"""Messages between two engines: tags, places, names and types of all fields, and the bytes of one sample.

Engines of one cluster may run different releases of Baton. A change needs another version of the wire, of the
protocol, of the paper or of the transport.
"""

from typing import Any

import msgspec
import pytest

from baton.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from baton.protocol import messages
from baton.protocol.handshake import PROTOCOL_VERSION, RankCard, decode_ranks, encode_ranks
from baton.protocol.introduction import Introduction
from baton.protocol.ticket import Ticket
from baton.transport.cuda_ipc.transport import CudaIpcEndpoint, SharedRegion
from baton.transport.local import transport as local
from baton.transport.local.mapping import SharedMapping
from baton.transport.local.transport import LocalEndpoint
from baton.transport.memory import MemoryEndpoint
from baton.transport.nixl.transport import NixlEndpoint
from baton.transport.tcp.wire import Challenge, TcpEndpoint
from baton.transport.tcp.wire import Hello as TcpHello
from baton.transport.tcp.wire import Welcome as TcpWelcome
from tests.golden.golden import check, check_values, source
from tests.golden.samples import (
    CARD,
    HASH,
    INTRODUCTION,
    LOAN,
    MODEL,
    PROCESS,
    REGION,
    TICKET,
    TRANSFER,
    D,
    P,
)
from tests.golden.shapes import shape

MESSAGES: tuple[messages.Message, ...] = (
    messages.Renew(LOAN, 5, 6),
    messages.Renewed(LOAN, 5, 6, 30.0),
    messages.Released(LOAN, 5),
    messages.Gone(LOAN, 5),
    messages.Want(TRANSFER, 5, HASH, 20),
    messages.Working(TRANSFER, 5),
    messages.Announced(TRANSFER, 5, 1, 16, TICKET.block_ids, 20, 1, (0, 1)),
    messages.Finished(TRANSFER, 5, 1, "ticket"),
    messages.Failed(TRANSFER, 5, "reason"),
    messages.Withdraw(TRANSFER, 5),
    messages.Hello(PROTOCOL_VERSION, MODEL, P),
    messages.Welcome(PROTOCOL_VERSION, MODEL, b"payload"),
    messages.Refused(("reason",)),
    messages.Stranger(P),
)
EVENTS = (
    BlockStored(
        block_hashes=[b"a", 2],
        parent_block_hash=b"p",
        token_ids=[1, 2],
        block_size=1,
        lora_id=3,
        medium="GPU",
        lora_name="lora",
        extra_keys=[("salt",), None],
        group_idx=1,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=16,
        locality="LOCAL",
        ownership="tier",
        session_id="session",
        lookahead_token_ids=[[3], [4]],
    ),
    BlockStored(block_hashes=[b"a"], parent_block_hash=None, token_ids=[1], block_size=1),
    BlockRemoved(block_hashes=[b"a"], medium="GPU", group_idx=1, locality="LOCAL", ownership="tier"),
    BlockRemoved(block_hashes=[b"a"]),
    AllBlocksCleared(),
)
IDENTITY: dict[str, Any] = {"process": PROCESS, "identity_address": 8192, "generation": 9, "nonce": b"nonce"}
OF_P: dict[str, Any] = {"version": 1, "engine_id": P.engine_id, "epoch": P.epoch}
SAMPLES: dict[str, Any] = {
    "ticket": TICKET,
    "ticket, short": Ticket(
        **{**msgspec.structs.asdict(TICKET), "block_ids": ((4, 9),), "windows": (None,), "prefilled": None}
    ),
    "introduction": INTRODUCTION,
    "rank cards": (CARD,),
    "endpoint local": LocalEndpoint(
        **{**OF_P, "version": 2},
        **IDENTITY,
        regions=(REGION,),
        shared=(SharedMapping(address=4096, nbytes=8192, fd=5, inode=6, offset=0),),
    ),
    "endpoint tcp": TcpEndpoint(3, P.engine_id, P.epoch, "10.0.0.7", 14700, b"token", (REGION,)),
    "endpoint cuda_ipc": CudaIpcEndpoint(
        **OF_P,
        **IDENTITY,
        regions=(SharedRegion(handle=b"handle", offset=512, nbytes=4096, device_uuid=b"uuid"),),
    ),
    "endpoint nixl": NixlEndpoint(
        **OF_P,
        agent="agent",
        metadata=b"metadata",
        has_rdma=True,
        **IDENTITY,
        regions=(REGION,),
    ),
    "endpoint memory": MemoryEndpoint(P.engine_id, P.epoch, 1, (REGION,)),
    "tcp challenge": Challenge(b"nonce"),
    "tcp hello": TcpHello(3, (D.engine_id, D.epoch), (P.engine_id, P.epoch), b"nonce", "mac", (b"proof",)),
    "tcp welcome": TcpWelcome("encrypt", b"proof"),
    "KV events": KVEventBatch(ts=1.5, events=list(EVENTS), data_parallel_rank=0),
    "KV events of one engine": KVEventBatch(ts=1.5, events=[]),
}
SHAPES: dict[str, Any] = {
    "envelope": messages.Envelope,
    "ticket": Ticket,
    "introduction": Introduction,
    "rank card": RankCard,
    "endpoint local": LocalEndpoint,
    "endpoint tcp": TcpEndpoint,
    "endpoint cuda_ipc": CudaIpcEndpoint,
    "endpoint nixl": NixlEndpoint,
    "endpoint memory": MemoryEndpoint,
    "tcp challenge": Challenge,
    "tcp hello": TcpHello,
    "tcp welcome": TcpWelcome,
    "KV events": KVEventBatch,
}


def enveloped(message: messages.Message) -> messages.Envelope:
    return messages.Envelope(messages.WIRE_VERSION, D, P, (message,))


def test_the_version_of_the_endpoint_local() -> None:
    endpoint = msgspec.structs.replace(SAMPLES["endpoint local"], nonce=bytes(32))
    assert local._decode_endpoint(P, msgspec.msgpack.encode(endpoint)).version == 2


def test_no_tag_is_the_name_of_a_class() -> None:
    """Then a renamed class would be another message."""
    assert "tag=True" not in source("baton")


def test_fields() -> None:
    check("wire_fields", [line for name, kind in SHAPES.items() for line in (f"# {name}", *shape(kind))])


def test_bytes() -> None:
    envelopes = {f"message {message.__struct_config__.tag}": message for message in MESSAGES}
    assert len(envelopes) == len(MESSAGES)
    frames = {
        name: messages.encode_envelope(messages.Envelope(messages.WIRE_VERSION, D, P, (message,)))
        for name, message in envelopes.items()
    }
    check_values(
        "wire_bytes", frames | {name: msgspec.msgpack.encode(value) for name, value in SAMPLES.items()}
    )


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__struct_config__.tag)
def test_the_sample_of_a_message_is_one_that_a_peer_takes(message: messages.Message) -> None:
    assert messages.decode_envelope(messages.encode_envelope(enveloped(message))) == enveloped(message)


def test_the_sample_of_rank_cards_is_one_that_a_peer_takes() -> None:
    assert decode_ranks(encode_ranks([CARD])) == (CARD,)
    assert encode_ranks([CARD]) == msgspec.msgpack.encode(SAMPLES["rank cards"])


def test_our_readers_of_events_take_the_sample() -> None:
    """So do vLLM's: tests/vllm/test_kv_events.py."""
    batch = SAMPLES["KV events"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch) == batch


def test_every_message_has_a_sample() -> None:
    assert {type(message) for message in MESSAGES} == set(messages.Message.__args__)
