"""Reads between engines that differ in everything: each number ends in its place, and nothing else moves."""

import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.connectors.pull import EngineIdentity, PullSchedulerHalf, PullWorkerHalf
from baton.connectors.pull.metadata import ReadBlocks, ReadEnd
from baton.connectors.pull.reads import link as link_module
from baton.connectors.pull.reads.cache_layout import layout_of
from baton.connectors.pull.reads.link import RETRY_MAX_S
from baton.connectors.pull.reads.links import PeerLinks, RunInBackground
from baton.connectors.pull.reads.slot_memory import convert
from baton.connectors.pull.reads.staging_buffer import Staging
from baton.contract import KVConnectorHandshakeMetadata
from baton.core.errors import TransferError
from baton.core.layout import FORMATS, PLANES, SLOT
from baton.protocol.handshake import decode_ranks
from baton.testing.host.config import model_config
from tests.connectors.pull_world import engine_config
from tests.connectors.topology_world import Engine, Memory, Reader, Shape, Wires

PATIENCE_S = 60.0  # Only reached when something is wrong.

NUM_LAYERS = 3
stages = st.sampled_from([(), (3,), (1, 2), (2, 1), (1, 1, 1)])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@st.composite
def engine_shapes(draw: st.DrawFn, num_heads: int, *, is_latent: bool = False) -> Shape:
    packing = draw(st.sampled_from([SLOT, PLANES]))
    return Shape(
        tp=draw(st.sampled_from([tp for tp in (1, 2, 4) if num_heads % tp == 0 or tp % num_heads == 0])),
        stages=draw(stages),
        block_tokens=draw(st.sampled_from([1, 2, 3, 4, 6, 8])),
        is_token_major=packing == SLOT and draw(st.booleans()),
        has_cross_layer_blocks=draw(st.booleans()),
        is_latent=is_latent,
        packing=packing,
        dtype=draw(dtypes),
        num_heads=num_heads,
        num_layers=NUM_LAYERS,
        num_elements=4,
        num_blocks=24,
    )


@st.composite
def parts_of(draw: st.DrawFn, first: int, last: int) -> list[tuple[int, int, tuple[int, int] | None]]:
    """The tokens [first, last) in parts that do not overlap; some of them layer by layer."""
    cuts = sorted(draw(st.sets(st.integers(first, last), max_size=3)) | {first, last})
    parts: list[tuple[int, int, tuple[int, int] | None]] = []
    for start, end in itertools.pairwise(cuts):
        if draw(st.booleans()):
            cut = draw(st.integers(1, NUM_LAYERS - 1))
            parts += [(start, end, (0, cut)), (start, end, (cut, NUM_LAYERS))]
        else:
            parts.append((start, end, None))
    return parts


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_whatever_both_look_like_every_number_ends_in_its_place(data: st.DataObject) -> None:
    num_heads = data.draw(st.sampled_from([1, 2, 4]))
    is_latent = num_heads == 1 and data.draw(st.booleans())
    theirs, ours = (data.draw(engine_shapes(num_heads, is_latent=is_latent)) for _ in "pd")
    first = data.draw(st.integers(0, 10))
    num_tokens = data.draw(st.integers(first + 1, 20))
    parts = data.draw(parts_of(first, num_tokens))
    draw = random.Random(data.draw(st.integers(0, 1000)))
    network = Memory()
    p, d = Engine("p", theirs, network), Reader("d", ours, network)
    local, remote = d.table(num_tokens, draw), p.table(num_tokens, draw)
    for rank in p.ranks:
        rank.compute(range(num_tokens), remote)
    # Junk may come to lie after the last token, in the blocks at hand; nothing else may change.
    writable = range(first, min(len(local) * ours.block_tokens, len(remote) * theirs.block_tokens))
    before = [rank.elsewhere(writable, local) for rank in d.ranks]
    d.meet(p)
    pairs = d.pairs(p, rotation=data.draw(st.integers(0, 3)))
    for index, (start, end, layers) in enumerate(parts):
        d.order(
            ReadBlocks(
                1,
                p.address,
                pairs,
                start,
                end - start,
                local,
                remote,
                layers,
                index == len(parts) - 1,
                is_tail=end == num_tokens,
            )
        )
    ends = d.take_ended()
    assert {end.pair for end in ends if end.ok} == set(pairs), ends
    assert len(ends) == len(pairs)
    for rank, untouched in zip(d.ranks, before, strict=True):
        tokens = range(first, num_tokens)
        assert torch.equal(rank.numbers(tokens, local), rank.right_numbers(tokens))
        assert torch.equal(rank.elsewhere(writable, local), untouched)
    assert d.is_at_rest
    p.close()
    d.close()


class Pair:
    """P has computed a prompt that D reads."""

    def __init__(
        self, theirs: Shape, ours: Shape, num_tokens: int = 21, wires: Wires | None = None, **reader: Any
    ) -> None:
        self.network = network = wires or Memory()
        self.memory = network if isinstance(network, Memory) else Memory()
        self.p, self.d = Engine("p", theirs, network), Reader("d", ours, network, **reader)
        draw = random.Random(5)
        self.num_tokens = num_tokens
        self.local, self.remote = self.d.table(num_tokens, draw), self.p.table(num_tokens, draw)
        for rank in self.p.ranks:
            rank.compute(range(num_tokens), self.remote)
        self.d.meet(self.p)

    def read(self, claim: int = 1, **order: Any) -> None:
        self.d.order(
            ReadBlocks(
                claim,
                self.p.address,
                self.d.pairs(self.p),
                0,
                order.get("num_tokens", self.num_tokens),
                self.local,
                self.remote,
            )
        )

    def wait_ended(self, count: int) -> list[ReadEnd]:
        ends: list[ReadEnd] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(ends) < count:
            assert time.monotonic() < deadline, "reads do not end"
            ends += self.d.take_ended()
            threading.Event().wait(0.001)
        return ends

    @property
    def is_right(self) -> bool:
        tokens = range(self.num_tokens)
        return all(
            torch.equal(rank.numbers(tokens, self.local), rank.right_numbers(tokens)) for rank in self.d.ranks
        )


@pytest.fixture
def pair() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(theirs: Shape, ours: Shape, **arguments: Any) -> Pair:
        made.append(Pair(theirs, ours, **arguments))
        return made[-1]

    yield make
    for one in made:
        for links in one.d.links:
            links.close()
        one.p.close()
        one.d.close()


BF16 = dataclasses.replace(Shape(), dtype=torch.bfloat16)


def test_engines_that_look_alike_read_in_one_operation_of_one_span_per_layer_and_block(
    pair: Callable[..., Pair],
) -> None:
    alike = pair(Shape(), Shape())
    alike.read()
    (end,) = alike.d.take_ended()
    assert alike.memory.reads == 1
    assert end.num_descriptors == Shape().num_layers * len(alike.local)
    assert alike.is_right


def test_a_block_size_of_another_engine_costs_an_operation_for_each_place_in_a_block(
    pair: Callable[..., Pair],
) -> None:
    for theirs, ours in ((2, 8), (8, 2)):
        other = pair(Shape(block_tokens=theirs), Shape(block_tokens=ours), num_tokens=24)
        other.read()
        assert other.memory.reads == 4
        assert other.is_right


def test_blocks_very_unlike_in_size_go_through_the_staging_buffer(pair: Callable[..., Pair]) -> None:
    one = pair(Shape(block_tokens=1), Shape(block_tokens=64), num_tokens=24)
    one.read()
    (end,) = one.d.take_ended()
    assert end.ok, end.error
    assert one.is_right


def test_tokens_that_no_block_holds_fail_the_read_alone(pair: Callable[..., Pair]) -> None:
    for theirs in (Shape(), BF16):
        one = pair(theirs, Shape())
        one.read(claim=1, num_tokens=200)
        one.read(claim=2)
        bad, good = sorted(one.d.take_ended(), key=lambda end: end.claim)
        assert not bad.ok
        assert "200 tokens do not fit into" in bad.error
        assert good.ok
        assert one.is_right


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_is_read_into_wider_numbers_without_loss_and_back_with_a_declared_one(
    pair: Callable[..., Pair], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    fp8 = dataclasses.replace(Shape(), dtype=getattr(torch, name))
    wider = pair(fp8, Shape())
    wider.read()
    assert wider.d.take_ended()[0].ok
    for ours, theirs in zip(wider.d.ranks, wider.p.ranks, strict=True):
        tokens = range(wider.num_tokens)
        assert torch.equal(ours.numbers(tokens, wider.local), theirs.numbers(tokens, wider.remote))
    assert "lossy" not in caplog.text
    narrower = pair(Shape(), fp8)
    narrower.read()
    assert narrower.d.take_ended()[0].ok
    (rank,) = narrower.d.ranks
    rounded = rank.right_numbers(range(1)).to(fp8.dtype).float()
    assert torch.equal(rank.numbers(range(1), narrower.local), rounded)
    assert f"float32 -> {name}: lossy" in caplog.text


def test_numbers_out_of_range_saturate_and_what_is_no_number_stays_none() -> None:
    inf, nan = float("inf"), float("nan")
    values = torch.tensor([1e30, -1e30, inf, -inf, 0.5, nan])
    for dtype, largest in ((torch.float16, 65504.0), (torch.float8_e4m3fn, 448.0)):
        got = convert(values, dtype).float()
        assert got[:5].tolist() == [largest, -largest, largest, -largest, 0.5]
        assert got[5].isnan()
    assert convert(torch.tensor([70000.0], dtype=torch.bfloat16), torch.float16).item() == 65504.0
    assert convert(torch.tensor([inf]), torch.bfloat16).item() <= FORMATS["bfloat16"].largest


@pytest.mark.parametrize(
    ("theirs", "reader", "error"),
    [
        (BF16, {"converts_dtype": False}, "dtype of layer.0: ours 'float32', theirs 'bfloat16'"),
        # Bytes with scales elsewhere.
        (Shape(dtype=torch.uint8), {}, "dtype of layer.0: ours 'float32', theirs 'uint8'"),
        (Shape(num_elements=4), {}, "slots of layer.0: ours 8 bytes of float32, theirs"),
        (dataclasses.replace(BF16, num_elements=4), {}, "slots of layer.0: ours 8 bytes of float32, theirs"),
        (BF16, {"staging_bytes": 64}, "a block of layer.0 has 64 bytes, the staging buffer 32"),
        (Shape(packing="tiles of another machine"), {}, "packing: ours is 'slot'"),
    ],
)
def test_what_cannot_be_read_is_refused(
    pair: Callable[..., Pair], theirs: Shape, reader: dict[str, Any], error: str
) -> None:
    one = pair(theirs, Shape(), **reader)
    one.read()
    (end,) = one.d.take_ended()
    assert not end.ok
    assert error in end.error


# --- Through the staging buffer, in threads ----------------------------------------------------


def wires_of(name: str) -> Wires | None:
    return None if name == "memory" else Wires(name)


@pytest.fixture
def threads() -> Iterator[RunInBackground]:
    started: list[threading.Thread] = []

    def run(job: Callable[[], None]) -> None:
        started.append(threading.Thread(target=job))
        started[-1].start()

    yield run
    for thread in started:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("wire", "theirs"),
    [
        ("memory", BF16),
        ("local", BF16),
        ("local", Shape(is_token_major=True, tp=2)),
        ("tcp", Shape()),
        ("tcp", Shape(block_tokens=6)),
    ],
)
def test_many_reads_share_a_small_staging_buffer(
    pair: Callable[..., Pair], threads: RunInBackground, wire: str, theirs: Shape
) -> None:
    one = pair(theirs, Shape(), staging_bytes=512, run_in_background=threads, wires=wires_of(wire))
    num_pairs = len(one.d.pairs(one.p))
    for claim in range(4):
        one.read(claim)
    ends = one.wait_ended(4 * num_pairs)
    assert all(end.ok for end in ends), ends
    assert {end.transport.partition(":")[0] for end in ends} == {wire}  # `local` adds its way.
    assert one.is_right
    assert one.d.is_at_rest


def held_in_staging(pair: Callable[..., Pair], threads: RunInBackground) -> Pair:
    """A read of claim 1 fills the staging buffer, and is held."""
    one = pair(BF16, Shape(), staging_bytes=512, run_in_background=threads)
    one.memory.hold()
    one.read(claim=1)
    wait_until(lambda: one.memory.held_count == 2)
    return one


def test_a_staged_read_ends_only_when_nothing_of_it_is_under_way(
    pair: Callable[..., Pair], threads: RunInBackground
) -> None:
    one = held_in_staging(pair, threads)
    assert one.d.take_ended() == []
    assert not one.d.is_at_rest
    one.memory.release()
    assert one.wait_ended(1)[0].ok
    assert one.is_right


def test_a_peer_that_hangs_leaves_room_in_the_buffer_for_others() -> None:
    staging = Staging("cpu", nbytes=64, num_parts=4)
    mine = [staging.borrow_nowait("hangs") for _ in range(3)]
    assert mine[2] is None
    other = staging.borrow_nowait("other")
    assert other is not None
    with pytest.raises(TransferError, match="cancelled"):
        staging.wait_part("hangs", lambda: True)
    assert mine[0] is not None
    staging.give_back(mine[0])
    assert staging.wait_part("hangs", lambda: False) == mine[0]


def test_a_cancelled_staged_read_gives_its_buffer_back(
    pair: Callable[..., Pair], threads: RunInBackground
) -> None:
    one = held_in_staging(pair, threads)
    one.read(claim=2)  # This read waits for room.
    for links in one.d.links:
        links.cancel(1)
        links.cancel(2)
    ends = one.wait_ended(2)
    assert [end.error for end in ends] == ["cancelled", "cancelled"]
    wait_until(lambda: one.d.is_at_rest)
    one.memory.release()
    one.read(claim=3)
    assert one.wait_ended(1)[0].ok
    assert one.is_right


@pytest.mark.parametrize("theirs", [Shape(), BF16], ids=["straight", "staged"])
def test_an_error_without_words_is_a_failure(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, theirs: Shape
) -> None:
    """A transport of somebody else's may raise a bare TransferError: what was not read must not count."""

    def refuse(*_: Any) -> None:
        raise TransferError

    one = pair(theirs, Shape())
    for rank in one.d.ranks:
        monkeypatch.setattr(rank.transport, "post_read", refuse)
    one.read()
    (end,) = one.wait_ended(1)
    assert not end.ok
    assert end.error == "TransferError"
    assert one.d.is_at_rest


def test_a_peer_that_is_lost_ends_its_staged_reads(
    pair: Callable[..., Pair], threads: RunInBackground
) -> None:
    one = held_in_staging(pair, threads)
    for links in one.d.links:
        links.lose(one.p.address)
    (end,) = one.wait_ended(1)
    assert not end.ok
    wait_until(lambda: one.d.is_at_rest)


def test_straight_reads_are_heard_of_while_a_staged_one_waits(
    pair: Callable[..., Pair], threads: RunInBackground
) -> None:
    one = held_in_staging(pair, threads)
    alike = Engine("alike", Shape(), one.network)
    one.d.meet(alike)
    table = alike.table(8, random.Random(1))
    one.d.order(ReadBlocks(2, alike.address, one.d.pairs(alike), 0, 8, one.local, table))
    wait_until(lambda: one.memory.held_count == 3)
    one.memory.end(lambda reading: reading.peer.address.engine_id == "alike", "enough")
    (end,) = one.wait_ended(1)
    assert (end.claim, end.error) == (2, "enough")
    one.memory.release()
    assert one.wait_ended(1)[0].ok
    alike.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


# --- From tensors to layouts -------------------------------------------------------------------


def test_tensors_of_either_order_and_without_heads_have_a_layout() -> None:
    identity = EngineIdentity.of_engine(engine_config("e"))  # 4 heads, blocks of 4, float32.
    (layer,) = layout_of({"l": torch.zeros(8, 4, 4, 6)}, identity).layers
    assert (layer.head_stride, layer.token_stride, layer.head_bytes) == (4 * 24, 0, 4 * 24)
    (layer,) = layout_of({"l": torch.zeros(8, 4, 4, 6).transpose(1, 2)}, identity).layers
    assert (layer.head_stride, layer.token_stride, layer.head_bytes) == (24, 4 * 24, 4 * 24)
    model = model_config(num_kv_heads=1)
    for tp in (1, 2):
        mla = EngineIdentity.of_engine(engine_config("e", model=model, tp=tp))
        layout = layout_of({"l": torch.zeros(8, 4, 6)}, mla)
        assert layout.layers[0].head_bytes == 4 * 24


def test_a_producer_with_pipeline_stages_introduces_all_of_its_ranks_stage_by_stage() -> None:
    config = engine_config("p", tp=2)
    whole = msgspec.structs.replace(EngineIdentity.of_engine(config), pp_size=2)
    metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata] = {}
    workers = []
    for pp_rank, tp_rank in itertools.product(range(2), range(2)):
        identity = msgspec.structs.replace(whole, pp_rank=pp_rank, tp_rank=tp_rank)
        workers.append(PullWorkerHalf(identity))
        workers[-1].register_kv_caches({f"layer.{pp_rank}": torch.zeros(8, 2, 4, 6)})
        handshake = workers[-1].get_handshake_metadata()
        assert handshake is not None
        metadata[pp_rank, tp_rank] = handshake
    half = PullSchedulerHalf(whole)
    half.set_xfer_handshake_metadata_pp_aware(metadata)
    payload = half._agent.peers._payload
    assert payload is not None
    cards = decode_ranks(payload)
    assert [(card.layout.pp_rank, card.layout.tp_rank) for card in cards] == list(metadata)
    assert [card.layout.layers[0].name for card in cards] == ["layer.0", "layer.0", "layer.1", "layer.1"]
    half.shutdown()
    for worker in workers:
        worker.shutdown()


@pytest.mark.parametrize("packing", [PLANES, "tiles of another machine"], ids=["planes", "unknown"])
def test_equal_packings_go_straight_in_whole_blocks(pair: Callable[..., Pair], packing: str) -> None:
    """Six blocks, each of the three layers of a block in one piece."""
    alike = Shape(packing=packing, num_elements=4)
    moved = pair(alike, alike)
    moved.read()
    [end] = moved.wait_ended(1)
    assert end.ok, end.error
    assert moved.is_right
    assert end.num_descriptors == 6 * 3


def test_a_part_of_a_block_of_an_unknown_packing_is_not_guessed_at(pair: Callable[..., Pair]) -> None:
    unknown = Shape(packing="tiles of another machine")
    moved = pair(unknown, unknown)
    order = ReadBlocks(1, moved.p.address, moved.d.pairs(moved.p), 0, 6, moved.local, moved.remote)
    moved.d.order(dataclasses.replace(order, is_last=False, is_tail=False))
    moved.d.order(dataclasses.replace(order, first_token=6, num_tokens=0))
    [end] = moved.wait_ended(1)
    assert not end.ok
    assert "a part of a block cannot be read" in end.error


# --- Links that are lost -------------------------------------------------------------------------


def break_links(links: PeerLinks) -> None:
    """The transport loses every peer, as it does when a connection is reset."""
    for link in links._links.values():
        assert link.ready is not None
        link.ready.transport.disconnect(link.ready.peer)
        assert link.ready.peer.lost


@pytest.mark.parametrize("wire", ["memory", "local", "tcp"])
def test_a_lost_link_is_replaced_at_once(
    pair: Callable[..., Pair], threads: RunInBackground, wire: str
) -> None:
    one = pair(Shape(), Shape(), run_in_background=threads, wires=wires_of(wire))
    [links] = one.d.links
    one.read(claim=1)
    assert one.wait_ended(1)[0].ok
    assert links.take_lost() == []
    break_links(links)
    one.read(claim=2)
    assert one.wait_ended(1)[0].ok
    assert one.is_right
    assert [lost.producer for lost in links.take_lost()] == [one.p.address.engine_id]
    assert links.take_lost() == []


def test_a_lost_link_is_counted_without_another_read(
    pair: Callable[..., Pair], threads: RunInBackground
) -> None:
    one = pair(Shape(), Shape(), run_in_background=threads)
    [links] = one.d.links
    one.read(claim=1)
    assert one.wait_ended(1)[0].ok
    break_links(links)
    assert links.take_ended() == []
    assert len(links.take_lost()) == 1


def test_a_dead_peer_is_asked_ever_more_rarely(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = pair(Shape(), Shape())
    [links] = one.d.links
    now, attempts = [1000.0], []
    monkeypatch.setattr(links, "_clock", lambda: now[0])

    def choose(*_: object, **__: object) -> object:
        attempts.append(now[0])
        raise TransferError("it does not answer")

    with monkeypatch.context() as broken:
        broken.setattr(link_module, "choose_transport", choose)
        for claim in range(400):
            one.read(claim)
            (end,) = one.wait_ended(1)
            assert not end.ok
            now[0] += 0.1
    assert len(attempts) < 20
    assert attempts[:2] == [1000.0, 1000.1], "the first failure delays nothing"
    assert max(after - before for before, after in itertools.pairwise(attempts)) < RETRY_MAX_S + 0.2
    assert len(caplog.records) < 10
    now[0] += RETRY_MAX_S
    one.read(claim=401)
    assert one.wait_ended(1)[0].ok


def test_a_thread_that_cannot_be_started_costs_one_read(pair: Callable[..., Pair]) -> None:
    failures = ["can't start new thread"]

    def run(job: Callable[[], None]) -> None:
        if failures:
            raise RuntimeError(failures.pop())
        job()

    one = pair(Shape(), Shape(), run_in_background=run)
    one.read(claim=1)
    (end,) = one.wait_ended(1)
    assert end.error == "can't start new thread"
    one.read(claim=2)
    assert one.wait_ended(1)[0].ok


def test_a_fault_in_one_of_the_reads_that_wait_costs_that_read(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Callable[[], None]] = []
    one = pair(Shape(), Shape(), run_in_background=jobs.append)
    [links] = one.d.links
    one.read(claim=1)
    one.read(claim=2)
    begin = links._posting.begin

    def begin_or_fail(link: Any, ready: Any, read: Any) -> Any:
        if read.parts.claim == 1:
            raise ZeroDivisionError("a bug")
        return begin(link, ready, read)

    monkeypatch.setattr(links._posting, "begin", begin_or_fail)
    [connect] = jobs
    connect()
    ends = {end.claim: end.error for end in one.wait_ended(2)}
    assert ends == {1: "a bug", 2: ""}
