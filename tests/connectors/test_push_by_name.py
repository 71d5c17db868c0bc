"""A decode leg that only names its producer, as proxies of push examples do: it is found, or refused."""

from collections.abc import Iterator
from typing import Any

import pytest

from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.intent import parse_intent
from baton.connectors.push import PushIdentity
from baton.core.errors import BadTransferParams
from baton.protocol.messages import Stranger, Want
from tests.connectors.pull_world import BLOCK, engine_config
from tests.connectors.push_world import PushEngine, PushWorld

P_PEER, NO_PEER = "127.0.0.1:1001", "127.0.0.1:1999"  # The world's first engine, and no engine.
TOKENS = [i % 97 for i in range(3 * BLOCK + 1)]
PREFILL_LEG = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def decode_leg(peer: str = P_PEER, **changes: Any) -> dict[str, Any]:
    host, _, port = peer.rpartition(":")
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": "p",
        "remote_host": host.strip("[]"),
        "remote_port": int(port),
        "tp_size": 1,
        "pp_size": 1,
        "remote_request_id": "a-uuid",
        **changes,
    }


@pytest.fixture
def world() -> Iterator[PushWorld]:
    world = PushWorld()
    yield world
    world.close()


def pair(world: PushWorld) -> tuple[PushEngine, PushEngine]:
    p = world.engine("p", num_blocks=32, tp=2)
    return p, world.engine("d", num_blocks=32, extra={"allowed_peers": [P_PEER, NO_PEER]})


@pytest.mark.parametrize("d_first", [True, False], ids=["d-first", "p-first"])
def test_it_is_found_and_read_while_it_computes(world: PushWorld, d_first: bool) -> None:
    """The two legs have nothing in common but the request's id, to which each engine adds its own ending."""
    p, d = pair(world)
    for number in range(2):  # The second one finds what the first one has found.
        on_p, on_d = f"cmpl-{number}-0-0123abcd", f"cmpl-{number}-0-fedc9876"
        request = d.submit(on_d, TOKENS, decode_leg()) if d_first else None
        if request is not None:
            assert d.admit(request)
            world.settle()
        p.begin(on_p, TOKENS, None)
        p.prefill_in_chunks(on_p, 2 * BLOCK, BLOCK + 1)
        if request is None:
            request = d.submit(on_d, TOKENS, decode_leg())
            assert d.admit(request)
        world.end_delivered(d, request)
    assert d.counted("failures") == {}
    early = [record["early_tokens"] for record in d.counted("transfers")]
    assert early == ([2 * BLOCK, 2 * BLOCK] if d_first else [0, 0])
    producers = {record["producer"] for record in d.counted("transfers")}
    assert producers == {"p"}


def test_an_announcement_that_comes_before_the_producers_layout_is_read_when_it_is_known(
    world: PushWorld,
) -> None:
    p, d = pair(world)
    p.begin("r", TOKENS, "t")
    p.prefill_in_chunks("r", 2 * BLOCK)
    request = d.submit("r", TOKENS, decode_leg(transfer_id="t"))
    world.settle()  # P has announced it, and D knows P; the request waits for blocks.
    assert d.admit(request)
    world.settle()
    p.prefill_in_chunks("r", BLOCK + 1)
    world.end_delivered(d, request)


def test_a_producer_that_restarts_is_found_again(world: PushWorld) -> None:
    p, d = pair(world)
    request = d.submit("r", TOKENS, decode_leg())
    d.admit(request)
    world.settle()
    p.kill()
    successor = world.engine("p", num_blocks=32)
    world.pass_time(3)  # D repeats its Want, and the successor, a stranger, answers.
    assert d.read_out(request).valid_tokens == 0
    again = d.submit("s-0123abcd", TOKENS, decode_leg())
    d.admit(again)
    successor.begin("s-fedc9876", TOKENS, None)
    successor.prefill_in_chunks("s-fedc9876", len(TOKENS))
    world.end_delivered(d, again, is_last=False)


def test_an_aborted_request_lets_go_before_anybody_was_found(world: PushWorld) -> None:
    _, d = pair(world)
    world.wire.is_cut = True
    request = d.submit("r", TOKENS, decode_leg())
    d.admit(request)
    world.settle()
    d.abort(request)
    world.assert_settles_whole()
    assert not any(isinstance(m, Want | Stranger) for e in world.wire.carried for m in e.messages)


# --- Which names are allowed -----------------------------------------------------------------------


def parse(
    params: dict[str, Any], *, allowed: tuple[str, ...] = (P_PEER, "[::1]:9"), push: bool = True
) -> None:
    extra = {"allowed_peers": allowed} if push else {}
    identity = (PushIdentity if push else EngineIdentity).of_engine(engine_config("d", extra=extra))
    parse_intent(params, identity)


@pytest.mark.parametrize("peer", [P_PEER, "[::1]:9"])
def test_what_is_allowed_passes(peer: str) -> None:
    parse(decode_leg(peer))
    parse(decode_leg(peer, transfer_id="t"))
    parse(PREFILL_LEG)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"remote_port": 1002}, r"remote_host: .*127\.0\.0\.1:1002.*allowed_peers"),
        ({"remote_host": "10.0.0.1"}, r"remote_host: .*10\.0\.0\.1:1001.*allowed_peers"),
        ({"remote_host": "127.0.0.1:1001/"}, "remote_host"),
        ({"remote_host": None}, "remote_host"),
        ({"remote_host": ""}, "remote_host"),
        ({"remote_host": ["127.0.0.1"]}, "remote_host"),
        ({"remote_host": "\ud800"}, "remote_host"),
        ({"remote_port": None}, "baton_ticket"),
        ({"remote_port": "1001"}, "remote_port"),
        ({"remote_port": 0}, "remote_port"),
        ({"remote_engine_id": None}, "remote_engine_id"),
        ({"remote_engine_id": "x" * 257}, "remote_engine_id"),
        ({"remote_engine_id": "\udfff"}, "remote_engine_id"),
        ({"transfer_id": "\ud800"}, "transfer_id"),
        ({"tp_size": "1"}, "tp_size"),
        ({"pp_size": 0}, "pp_size"),
        ({"remote_request_id": 1}, "remote_request_id"),
        ({"remote_block_ids": [[1]]}, "baton_ticket"),
    ],
)
def test_a_refusal_names_the_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(BadTransferParams, match=rf"kv_transfer_params\.{field}"):
        parse(decode_leg(**changes))


def test_by_default_no_peer_may_be_named() -> None:
    with pytest.raises(BadTransferParams, match="allowed_peers"):
        parse(decode_leg(), allowed=())
    with pytest.raises(BadTransferParams, match=r"baton_ticket.*does not do"):
        parse(decode_leg(), push=False)


def test_a_name_that_is_not_allowed_is_not_contacted(world: PushWorld) -> None:
    _, d = pair(world)
    with pytest.raises(BadTransferParams, match="allowed_peers"):
        d.submit("r", TOKENS, decode_leg("127.0.0.1:1002"))
    world.settle()
    assert d.counted("refused") == {"params": 1}
    assert not world.wire.carried
