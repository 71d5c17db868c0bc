"""Handshake, and table of peers."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import PeerError
from baton.core.identity import CurrentIdentity, KVIdentity
from baton.core.ids import Address, EngineId, Epoch, LoanId
from baton.core.layout import KEYS_AND_VALUES, CacheSpec, LayerLayout, RankLayout, Region
from baton.core.reasons import FailureCode, FailureReason
from baton.core.timers import Timers
from baton.protocol.effects import PeerEffect, PeerLost, PeerReady, Send
from baton.protocol.handshake import (
    PROTOCOL_VERSION,
    RankCard,
    answer_hello,
    decode_ranks,
    encode_ranks,
    make_hello,
)
from baton.protocol.messages import (
    MAX_FRAME_BYTES,
    WIRE_VERSION,
    Envelope,
    Gone,
    Hello,
    Refused,
    Stranger,
    Welcome,
    encode_envelope,
)
from baton.protocol.peers import HELLOS_MAX, PeerTable, admit

MODEL = KVIdentity(
    model="m", weights="r", dtype="bfloat16", num_layers=2, num_kv_heads=4, head_dim=8, hash_seed="s"
)
TIMERS = Timers()
D, P = Address(EngineId("d"), Epoch(1)), Address(EngineId("p"), Epoch(1))


def card(rank: int = 0, tp: int = 1, num_layers: int = 1) -> RankCard:
    heads = 4 // tp
    spec = CacheSpec(KEYS_AND_VALUES, "bfloat16", 4)
    layers = tuple(
        LayerLayout(f"model.layers.{i}.self_attn.attn", spec, 0, i * 64 * heads, 8 * heads, 8, 8)
        for i in range(num_layers)
    )
    region = Region(4096, num_layers * 64 * heads)
    rank_layout = RankLayout(
        tp_rank=rank,
        tp_size=tp,
        num_blocks=8,
        block_tokens=2,
        regions=(region,),
        layers=layers,
    )
    return RankCard(rank, rank_layout, {"local": b"pid 7", "tcp": b"host"})


PAYLOAD = encode_ranks([card()])


def table(own: Address = D, **changes: Any) -> PeerTable:
    return PeerTable(
        own,
        changes.pop("identity", None) or CurrentIdentity(MODEL),
        TIMERS,
        changes.pop("payload", PAYLOAD),
        **changes,
    )


def ready(peers: PeerTable, address: Address, now: float = 0.0) -> None:
    peers.want(address, now)
    [effect] = peers.receive(address, Welcome(PROTOCOL_VERSION, MODEL, PAYLOAD), now)
    assert isinstance(effect, PeerReady)


def lost(effects: list[PeerEffect]) -> FailureReason:
    [effect] = effects
    assert isinstance(effect, PeerLost)
    return effect.reason


# --- Rank cards -----------------------------------------------------------------------------------


def test_rank_cards_arrive_as_they_were_sent() -> None:
    cards = (card(0, 2), card(1, 2))
    assert decode_ranks(encode_ranks(cards)) == cards


def test_the_largest_engine_fits_into_a_frame() -> None:
    cards = [card(0, 1, num_layers=128)] * 64
    cards = [
        msgspec.structs.replace(c, tp_rank=i, layout=msgspec.structs.replace(c.layout, tp_rank=i, tp_size=64))
        for i, c in enumerate(cards)
    ]
    welcome = Welcome(PROTOCOL_VERSION, MODEL, encode_ranks(cards))
    assert len(encode_envelope(Envelope(WIRE_VERSION, P, D, (welcome,)))) < MAX_FRAME_BYTES / 2


@given(st.binary(max_size=100))
def test_malformed_rank_cards_are_a_peer_error(payload: bytes) -> None:
    with pytest.raises(PeerError):
        decode_ranks(payload)


@pytest.mark.parametrize(
    "cards",
    [
        [],
        [card(1, 2), card(0, 2)],
        [card(0, 2)],
        [msgspec.structs.replace(card(), tp_rank=1)],
        [msgspec.structs.replace(card(), endpoints={"tcp": b"x" * 70_000})],
        [msgspec.structs.replace(card(), endpoints={f"t{i}": b"" for i in range(20)})],
        [msgspec.structs.replace(card(), layout=msgspec.structs.replace(card().layout, num_blocks=9))],
    ],
)
def test_unsound_rank_cards_are_refused_by_the_reader_and_never_sent(cards: list[RankCard]) -> None:
    with pytest.raises(PeerError):
        decode_ranks(msgspec.msgpack.encode(cards))
    with pytest.raises(PeerError):
        encode_ranks(cards)


# --- Compatibility --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "x"),
        ("dtype", "uint8"),
        ("num_layers", 3),
        ("num_kv_heads", 8),
        ("head_dim", 16),
        ("hash_seed", "x"),
    ],
)
def test_a_refusal_names_the_field_that_differs(field: str, value: object) -> None:
    theirs = msgspec.structs.replace(MODEL, **{field: value})
    answer = answer_hello(Hello(PROTOCOL_VERSION, theirs, D), MODEL, PAYLOAD)
    assert answer == Refused((f"{field}: ours {getattr(MODEL, field)!r}, theirs {value!r}",))


def test_a_refusal_names_everything_that_differs() -> None:
    theirs = msgspec.structs.replace(MODEL, dtype="uint8", head_dim=16)
    answer = answer_hello(Hello(PROTOCOL_VERSION + 1, theirs, D), MODEL, PAYLOAD)
    assert isinstance(answer, Refused)
    assert [reason.split(":")[0] for reason in answer.reasons] == ["protocol_version", "dtype", "head_dim"]


def test_a_very_long_name_does_not_make_a_refusal_too_long_to_send() -> None:
    theirs = msgspec.structs.replace(MODEL, model="x" * 100_000)
    answer = answer_hello(Hello(PROTOCOL_VERSION, theirs, D), MODEL, PAYLOAD)
    encode_envelope(Envelope(WIRE_VERSION, P, D, (answer,)))


def test_the_payload_of_an_incompatible_peer_is_not_decoded() -> None:
    peers = table()
    peers.want(P, 0.0)
    other = msgspec.structs.replace(MODEL, model="x")
    reason = lost(peers.receive(P, Welcome(PROTOCOL_VERSION, other, b"not ours to read"), 0.0))
    assert reason == FailureReason(FailureCode.INCOMPATIBLE, "incompatible: model: ours 'm', theirs 'x'")


def test_the_layouts_of_another_release_are_not_decoded() -> None:
    """Version 6 had one dtype and number of heads for all caches of a rank."""
    peers = table()
    peers.want(P, 0.0)
    reason = lost(peers.receive(P, Welcome(6, MODEL, PAYLOAD), 0.0))
    assert reason == FailureReason(
        FailureCode.INCOMPATIBLE, "incompatible: protocol_version: ours 8, theirs 6"
    )


def test_a_kind_of_cache_that_is_not_known_is_named() -> None:
    """A later release of the same version may have added one."""
    peers, newer = table(), card()
    peers.want(P, 0.0)
    layer = newer.layout.layers[0]
    layer = msgspec.structs.replace(layer, spec=msgspec.structs.replace(layer.spec, kind="circular_buffer"))
    newer = msgspec.structs.replace(newer, layout=msgspec.structs.replace(newer.layout, layers=(layer,)))
    payload = msgspec.msgpack.encode((newer,))
    reason = lost(peers.receive(P, Welcome(PROTOCOL_VERSION, MODEL, payload), 0.0))
    assert reason.code is FailureCode.BAD_RANK_CARDS
    assert "kind is 'circular_buffer'; known: keys_and_values, latent, index_keys, scales" in reason.text


# --- The table ------------------------------------------------------------------------------------


def test_a_peer_is_greeted_once() -> None:
    peers = table()
    assert peers.want(P, 0.0) == [Send(P, make_hello(D, MODEL))]
    assert peers.want(P, 0.1) == []
    welcome = Welcome(PROTOCOL_VERSION, MODEL, PAYLOAD)
    assert peers.receive(P, welcome, 0.2) == [PeerReady(P, welcome, (card(),))]
    assert peers.receive(P, welcome, 0.3) == []
    assert peers.want(P, 0.4) == [PeerReady(P, welcome, (card(),))]


def test_a_lost_hello_is_repeated_a_few_times() -> None:
    peers = table()
    num_hellos = len(peers.want(P, 0.0))
    effects: list[PeerEffect] = []
    while not any(isinstance(effect, PeerLost) for effect in effects):
        effects = peers.wake(peers.next_deadline)
        num_hellos += sum(isinstance(effect, Send) for effect in effects)
    assert num_hellos == HELLOS_MAX
    assert lost(effects).code is FailureCode.NO_ANSWER


def test_a_hello_is_repeated_after_a_round_trip_and_counted_anew_after_a_rest() -> None:
    peers, now = table(), 5.0
    for _ in range(2):
        num_hellos = len(peers.want(P, now))
        while True:
            assert peers.next_deadline == now + TIMERS.round_trip_max_s
            now = peers.next_deadline
            [effect] = peers.wake(now)
            if isinstance(effect, PeerLost):
                break
            num_hellos += 1
        assert (num_hellos, effect.address) == (HELLOS_MAX, P)
        now += 60.0


def test_a_refusal_says_whose_and_why() -> None:
    peers = table()
    peers.want(P, 0.0)
    reason = FailureReason(FailureCode.REFUSED, "refused by the peer: no room; no time")
    assert peers.receive(P, Refused(("no room", "no time")), 0.0) == [PeerLost(P, reason)]
    assert peers.want(P, 0.5) == [PeerLost(P, reason)], "answered from the record"
    peers.want(P, 1.0)
    [lost_again] = peers.receive(P, Refused(()), 1.0)
    assert lost_again == PeerLost(
        P, FailureReason(FailureCode.REFUSED, "refused by the peer: no reason given")
    )


def test_two_silent_peers_are_greeted_and_given_up_together() -> None:
    peers, both = table(), [P, Address(EngineId("q"), Epoch(1))]
    for address in both:
        peers.want(address, 0.0)
    for _ in range(HELLOS_MAX - 1):
        assert peers.wake(peers.next_deadline) == [Send(address, make_hello(D, MODEL)) for address in both]
    reason = FailureReason(FailureCode.NO_ANSWER, f"no answer to {HELLOS_MAX} hellos")
    assert peers.wake(peers.next_deadline) == [PeerLost(address, reason) for address in both]


def test_changed_weights_part_each_peer_that_does_not_rest() -> None:
    peers, other = table(), Address(EngineId("q"), Epoch(1))
    peers.want(P, 0.0)
    lost(peers.receive(P, Refused(("no room",)), 0.0))
    peers.want(other, 0.0)
    assert peers.weights_changed() == [PeerLost(other, FailureReason(FailureCode.OTHER_WEIGHTS))]
    assert peers.num_open == 1


def test_the_back_off_doubles_from_one_second_to_a_minute() -> None:
    peers, now, waits = table(), 0.0, []
    for _ in range(9):
        [hello] = peers.want(P, now)
        assert isinstance(hello, Send)
        lost(peers.receive(P, Refused(("no room",)), now))
        since = now
        while isinstance(peers.want(P, now)[0], PeerLost):
            now += 0.5
        waits.append(now - since)
        peers.receive(P, Refused(("no room",)), now)  # Answers the Hello after the wait.
        now += 60.0
    assert waits == [1.0, 4.0, 16.0, *[60.0] * 6], "twice as long after each of the two refusals of a turn"


def test_a_success_resets_the_back_off() -> None:
    peers = table()
    peers.want(P, 0.0)
    peers.receive(P, Refused(()), 0.0)
    ready(peers, P, 1.0)
    reason = FailureReason(FailureCode.GONE, "restarted or gone: another process answers there")
    assert peers.receive(P, Stranger(P), 2.0) == [PeerLost(P, reason)]
    assert peers.want(P, 2.0) == [Send(P, make_hello(D, MODEL))]


def test_a_peer_with_an_unsound_welcome_rests() -> None:
    peers = table()
    peers.want(P, 0.0)
    reason = lost(peers.receive(P, Welcome(PROTOCOL_VERSION, MODEL, b"\x91"), 0.0))
    assert reason.code is FailureCode.BAD_RANK_CARDS
    assert lost(peers.want(P, 0.5)) == reason, "answered from the record"


def test_messages_from_peers_do_not_grow_the_table() -> None:
    peers = table()
    for epoch in range(100):
        sender = Address(EngineId("x"), Epoch(epoch))
        [answer] = peers.receive(sender, make_hello(sender, MODEL), 0.0)
        assert isinstance(answer, Send)
        assert isinstance(answer.message, Welcome)
        for message in (Welcome(PROTOCOL_VERSION, MODEL, PAYLOAD), Refused(()), Stranger(sender)):
            assert peers.receive(sender, message, 0.0) == []
    assert peers.num_open == 0


def test_a_hello_with_another_senders_address_is_not_answered() -> None:
    assert table().receive(P, make_hello(D, MODEL), 0.0) == []


def test_no_hello_is_answered_before_our_memory_is_registered() -> None:
    peers = table(payload=None)
    assert peers.receive(P, make_hello(P, MODEL), 0.0) == []
    peers.announce(PAYLOAD)
    assert peers.receive(P, make_hello(P, MODEL), 0.0) == [Send(P, Welcome(PROTOCOL_VERSION, MODEL, PAYLOAD))]


def test_only_an_idle_peer_is_forgotten() -> None:
    peers = table()
    used = Address(EngineId("p2"), Epoch(1))
    ready(peers, P)
    ready(peers, used)
    peers.want(used, 500.0)
    assert peers.wake(600.0) == [PeerLost(P, FailureReason(FailureCode.PEER_IDLE))]
    assert peers.num_open == 1
    assert peers.next_deadline == 1100.0


def test_a_full_table_drops_resting_peers_then_the_least_recently_used() -> None:
    peers = table(peers_max=2)
    first, second, third, fourth = (Address(EngineId(f"p{i}"), Epoch(1)) for i in range(4))
    ready(peers, first, 0.0)
    peers.want(second, 1.0)
    peers.receive(second, Refused(()), 1.0)
    assert not any(isinstance(effect, PeerLost) for effect in peers.want(third, 2.0))
    assert peers.want(fourth, 3.0)[0] == PeerLost(first, FailureReason(FailureCode.PEERS_MAX))
    assert peers.num_open == 2


# --- Weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"weights": "x"}, {"version": "v2"}, {"weights": "x", "version": "v2"}])
def test_other_weights_are_an_update_under_way(changes: dict[str, str]) -> None:
    """The reader decides, because the KV that it may use is named by tickets."""
    theirs = msgspec.structs.replace(MODEL, **changes)
    answer = answer_hello(Hello(PROTOCOL_VERSION, theirs, D), MODEL, PAYLOAD)
    assert answer == Welcome(PROTOCOL_VERSION, MODEL, PAYLOAD)
    peers = table(identity=CurrentIdentity(theirs))
    peers.want(P, 0.0)
    reason = lost(peers.receive(P, answer, 0.0))
    assert reason.code is FailureCode.OTHER_WEIGHTS
    assert (
        f"weights: ours {theirs.weights!r}" in reason.text or "version: ours 'v2', theirs ''" in reason.text
    )


@pytest.mark.parametrize("changes", [{"model": "x"}, {"dtype": "uint8"}, {"host": "x"}])
def test_other_weights_of_another_model_are_no_update(changes: dict[str, str]) -> None:
    theirs = msgspec.structs.replace(MODEL, version="v2", **changes)
    assert isinstance(answer_hello(Hello(PROTOCOL_VERSION, theirs, D), MODEL, PAYLOAD), Refused)
    peers = table(identity=CurrentIdentity(theirs))
    peers.want(P, 0.0)
    code = lost(peers.receive(P, Welcome(PROTOCOL_VERSION, MODEL, PAYLOAD), 0.0)).code
    assert code is FailureCode.INCOMPATIBLE


def test_other_weights_of_another_release_are_no_update() -> None:
    theirs = msgspec.structs.replace(MODEL, version="v2")
    assert isinstance(answer_hello(Hello(PROTOCOL_VERSION + 1, theirs, D), MODEL, PAYLOAD), Refused)


def test_a_peer_with_other_weights_rests_for_a_second_each_time() -> None:
    peers, welcome = table(), Welcome(PROTOCOL_VERSION, MODEL.updated(None, "v2"), PAYLOAD)
    for now in (0.0, 1.0, 2.0, 3.0):
        assert peers.want(P, now) == [Send(P, make_hello(D, MODEL))]
        reason = lost(peers.receive(P, welcome, now))
        assert reason.code is FailureCode.OTHER_WEIGHTS
        assert lost(peers.want(P, now + 0.5)) == reason
    ready(peers, P, 4.0)


def test_after_an_update_of_our_weights_peers_are_greeted_anew() -> None:
    identity = CurrentIdentity(MODEL)
    peers = table(identity=identity)
    met, asked, other, silent = (Address(EngineId(f"p{i}"), Epoch(1)) for i in range(4))
    ready(peers, met)
    for peer in (asked, other, silent):
        peers.want(peer, 0.0)
    peers.receive(other, Welcome(PROTOCOL_VERSION, MODEL.updated(None, "v2"), PAYLOAD), 0.0)
    peers.receive(silent, Refused(("no room",)), 0.0)
    identity.update(None, "v2")
    reason = FailureReason(FailureCode.OTHER_WEIGHTS)
    assert peers.weights_changed() == [PeerLost(met, reason), PeerLost(asked, reason)]
    for peer in (met, asked, other):
        assert peers.want(peer, 0.1) == [Send(peer, make_hello(D, identity.value))]
    assert lost(peers.want(silent, 0.1)).code is FailureCode.REFUSED, "new weights are no news of its fault"
    late = Welcome(PROTOCOL_VERSION, MODEL, PAYLOAD)  # Answers the Hello of before.
    assert lost(peers.receive(met, late, 0.2)).code is FailureCode.OTHER_WEIGHTS


# --- Incarnations ---------------------------------------------------------------------------------


def test_messages_for_a_predecessor_are_answered_with_stranger() -> None:
    old = Address(EngineId("d"), Epoch(0))
    gone = Gone(LoanId(Epoch(1), 1), 1)
    assert admit(D, Envelope(WIRE_VERSION, P, D, (gone,))) == ((gone,), [])
    assert admit(D, Envelope(WIRE_VERSION, P, old, (gone, gone))) == ((), [Send(P, Stranger(old))])


def test_a_stranger_is_never_answered() -> None:
    old = Address(EngineId("d"), Epoch(0))
    assert admit(D, Envelope(WIRE_VERSION, P, old, (Stranger(P), Stranger(P)))) == ((), [])
    peers = table()
    peers.want(P, 0.0)
    assert not any(isinstance(effect, Send) for effect in peers.receive(P, Stranger(P), 0.0))
