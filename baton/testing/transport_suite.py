"""Test suite for transports, to be inherited by the tests of a transport.

    class TestMine(TransportSuite):
        @pytest.fixture(scope="class")
        @classmethod
        def rig(cls) -> TransportRig:
            return MyRig()

`transport_rig` documents the rig.
"""

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from baton.core.errors import PeerError, TransferError
from baton.core.ids import Address, EngineId, Epoch
from baton.core.layout import CopySpan
from baton.testing.transport_producers import NUM_REGIONS, REGION_BYTES, pattern
from baton.testing.transport_rig import (
    BLOCK_BYTES,
    BLOCK_SPAN,
    END_TIMEOUT_S,
    NUM_BLOCKS,
    Connection,
    Plan,
    Producer,
    TransportRig,
    assert_reads_fail,
    drain,
    nothing_left_over,
    plans,
)
from baton.transport.base.interface import Completion, OpId, Transport


class TransportSuite:
    """Inherit from this class, name the subclass Test..., and give it a class-scoped fixture `rig`."""

    @pytest.fixture(scope="class")
    @classmethod
    def producer(cls, rig: TransportRig) -> Iterator[Producer]:
        """A producer that no test breaks."""
        producer = rig.producer(seed=1)
        yield producer
        producer.close()

    @pytest.fixture
    def victim(self, rig: TransportRig) -> Iterator[Producer]:
        """A producer for one test, which may break it."""
        producer = rig.producer(seed=2)
        yield producer
        producer.close()

    @pytest.fixture
    def connect(self, rig: TransportRig) -> Iterator[Callable[[Producer], Connection]]:
        opened: list[Transport] = []

        def connect(producer: Producer) -> Connection:
            opened.append(rig.reader())
            return Connection(opened[-1], producer, rig.place)

        yield connect
        for transport in opened:
            transport.close()

    @pytest.fixture(scope="class")
    @classmethod
    def connection(cls, rig: TransportRig, producer: Producer) -> Iterator[Connection]:
        transport = rig.reader()
        yield Connection(transport, producer, rig.place)
        transport.close()

    # Bytes.

    @given(plan=plans())
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    def test_a_read_moves_exactly_the_bytes_of_its_plan(self, connection: Connection, plan: Plan) -> None:
        connection.memory[:] = 7
        expected = connection.memory[:].copy()
        plan.apply(expected, pattern(connection.producer.seed))
        prepared = connection.transport.prepare(connection.peer, plan.spans)
        completion = connection.read(prepared, plan.local_blocks, plan.remote_blocks)
        assert completion.ok, completion.error
        assert completion.nbytes == sum(s.nbytes for s in plan.spans) * len(plan.local_blocks)
        assert np.array_equal(connection.memory[:], expected)

    def test_a_read_larger_than_any_batch_arrives_whole(self, connection: Connection) -> None:
        connection.memory[:] = 0
        spans = [
            CopySpan(region, 0, REGION_BYTES, region, 0, REGION_BYTES, REGION_BYTES)
            for region in range(NUM_REGIONS)
        ]
        assert connection.read(connection.prepare(*spans), [0], [0]).ok
        assert np.array_equal(connection.memory[:], pattern(connection.producer.seed))

    def test_a_read_of_more_blocks_than_any_call_takes_arrives_whole(self, connection: Connection) -> None:
        small = 512
        count = REGION_BYTES // small
        rng = np.random.default_rng(5)
        local, remote = rng.permutation(count), rng.permutation(count)
        prepared = connection.prepare(CopySpan(0, 0, small, 0, 0, small, small))
        assert connection.read(prepared, local.tolist(), remote.tolist()).ok
        source = pattern(connection.producer.seed)[0].reshape(count, small)
        assert np.array_equal(connection.memory[0].reshape(count, small)[local], source[remote])

    def test_a_read_of_no_blocks_ends_well_at_once(self, connection: Connection) -> None:
        completion = connection.read(connection.prepare(), [], [])
        assert (completion.ok, completion.nbytes) == (True, 0)

    def test_two_readers_of_one_producer_read_at_the_same_time(
        self, connect: Callable[[Producer], Connection], producer: Producer
    ) -> None:
        connections = [connect(producer), connect(producer)]
        rng = np.random.default_rng(6)
        orders = [(rng.permutation(NUM_BLOCKS), rng.permutation(NUM_BLOCKS)) for _ in connections]
        ops = [
            [c.transport.post_read(c.prepare(), local.tolist(), remote.tolist()) for _ in range(4)]
            for c, (local, remote) in zip(connections, orders, strict=True)
        ]
        source = pattern(producer.seed)[0].reshape(NUM_BLOCKS, BLOCK_BYTES)
        for connection, (local, remote), posted in zip(connections, orders, ops, strict=True):
            assert all(completion.ok for completion in drain(connection.transport, posted))
            rows = connection.memory[0].reshape(NUM_BLOCKS, BLOCK_BYTES)
            assert np.array_equal(rows[local], source[remote])

    # Refusals.

    @pytest.mark.parametrize("wrong", [-1, NUM_BLOCKS, 2**32, 2**63, 2**70, -(2**70)])
    def test_a_block_outside_the_regions_is_refused_and_nothing_posted(
        self, connection: Connection, wrong: int
    ) -> None:
        prepared = connection.prepare()
        for local, remote in (([0, wrong], [0, 1]), ([0, 1], [0, wrong])):
            with pytest.raises(TransferError, match="block"):
                connection.transport.post_read(prepared, local, remote)
        assert connection.transport.poll() == []

    def test_a_destination_named_twice_is_refused(self, connection: Connection) -> None:
        with pytest.raises(TransferError, match="twice"):
            connection.transport.post_read(connection.prepare(), [3, 4, 3], [0, 1, 2])

    def test_block_lists_of_different_lengths_are_refused(self, connection: Connection) -> None:
        with pytest.raises(TransferError, match="2 local blocks"):
            connection.transport.post_read(connection.prepare(), [3, 4], [0])

    @pytest.mark.parametrize(
        "span",
        [
            CopySpan(NUM_REGIONS, 0, 64, 0, 0, 64, 64),
            CopySpan(0, 0, 64, -1, 0, 64, 64),
            CopySpan(0, 0, 64, 0, REGION_BYTES - 63, 64, 64),
            CopySpan(0, -1, 64, 0, 0, 64, 64),
            CopySpan(0, 0, 64, 0, 2**70, 64, 64),
            CopySpan(0, 0, 64, 0, 0, 63, 64),
            CopySpan(0, 0, -64, 0, 0, 64, 64),
            CopySpan(0, 0, 64, 0, 0, 64, 0),
        ],
    )
    def test_a_span_that_leaves_a_region_is_refused(self, connection: Connection, span: CopySpan) -> None:
        with pytest.raises(PeerError):
            connection.prepare(span)

    def test_an_endpoint_that_makes_no_sense_is_refused(self, connection: Connection) -> None:
        real = connection.producer.endpoint
        for wrong in (
            b"",
            b"\xc1",
            b"\x91\xa2\xff\xfe",
            real[:-1],
            real + b"\0",
            real[1:],
            b"\x91" * 100_000,
        ):
            with pytest.raises(PeerError):
                connection.transport.connect(connection.producer.address, wrong)

    def test_an_endpoint_of_another_incarnation_is_refused(self, connection: Connection) -> None:
        engine_id, epoch = connection.producer.address
        for other in (Address(EngineId("other"), epoch), Address(engine_id, Epoch(epoch ^ 1))):
            with pytest.raises(PeerError):
                connection.transport.connect(other, connection.producer.endpoint)

    # Ends.

    def test_each_of_many_concurrent_reads_ends_once(self, connection: Connection) -> None:
        connection.memory[:] = 0
        prepared = connection.prepare()
        per_thread = NUM_BLOCKS // 4
        ops: list[OpId] = []

        def post(thread: int) -> None:
            for first in range(thread * per_thread, (thread + 1) * per_thread, 8):
                blocks = range(first, first + 8)
                ops.append(connection.transport.post_read(prepared, blocks, blocks))

        threads = [threading.Thread(target=post, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ended = drain(connection.transport, ops)
        assert len(set(ops)) == len(ops) == NUM_BLOCKS // 8
        assert all(completion.ok for completion in ended)
        assert np.array_equal(connection.memory[0], pattern(connection.producer.seed)[0])

    def test_a_cancelled_read_ends_once_and_the_next_is_right(self, connection: Connection) -> None:
        prepared = connection.prepare()
        blocks = np.random.default_rng(3).permutation(NUM_BLOCKS).tolist()
        ops = []
        for _ in range(20):
            ops.append(connection.transport.post_read(prepared, blocks, blocks))
            connection.transport.cancel(ops[-1])
            connection.transport.cancel(ops[-1])
        assert all(c.ok or c.error == "cancelled" for c in drain(connection.transport, ops))
        connection.transport.cancel(ops[0])  # The read is over: nothing happens.
        connection.transport.cancel(OpId(10**9))
        connection.memory[:] = 0
        assert connection.read(prepared, blocks, blocks).ok
        assert np.array_equal(connection.memory[0], pattern(connection.producer.seed)[0])

    def test_once_a_read_has_ended_it_writes_no_more(self, connection: Connection) -> None:
        prepared = connection.prepare()
        for _ in range(10):
            op = connection.transport.post_read(prepared, range(NUM_BLOCKS), range(NUM_BLOCKS))
            connection.transport.cancel(op)
            drain(connection.transport, [op])
            connection.memory[0] = 9
            # A late write would have landed before the end of a further read through the same queues.
            other = connection.prepare(CopySpan(1, 0, BLOCK_BYTES, 0, 0, BLOCK_BYTES, BLOCK_BYTES))
            assert connection.read(other, range(NUM_BLOCKS), range(NUM_BLOCKS)).ok
            assert (connection.memory[0] == 9).all()

    def test_the_completion_hook_is_called_for_each_end(self, rig: TransportRig, producer: Producer) -> None:
        called = threading.Semaphore(0)
        transport = rig.reader(on_completion=lambda: called.release())
        try:
            connection = Connection(transport, producer, rig.place)
            prepared = connection.prepare()
            ops = [transport.post_read(prepared, [block], [block]) for block in range(5)]
            assert all(called.acquire(timeout=END_TIMEOUT_S) for _ in ops)
            assert len(drain(transport, ops)) == 5
        finally:
            transport.close()

    def test_nothing_posted_is_nothing_to_wait_for(self, connection: Connection) -> None:
        assert connection.transport.wait_completion(0.0) is False
        assert connection.transport.poll() == []

    # Deaths.

    def test_reads_from_a_killed_producer_end_not_ok(
        self, connect: Callable[[Producer], Connection], victim: Producer
    ) -> None:
        connection = connect(victim)
        prepared = connection.prepare()
        posted, ended = set[OpId](), list[Completion]()
        under_way = threading.Event()

        def read_until_it_fails() -> None:
            """Keeps several reads under way, so that the kill hits some of them."""
            while all(completion.ok for completion in ended):
                while len(posted) - len(ended) < 4:
                    try:
                        posted.add(connection.transport.post_read(prepared, all_blocks, all_blocks))
                    except TransferError:
                        return
                under_way.set()
                connection.transport.wait_completion(END_TIMEOUT_S)
                ended.extend(connection.transport.poll())

        all_blocks = range(NUM_BLOCKS)
        thread = threading.Thread(target=read_until_it_fails)
        thread.start()
        assert under_way.wait(END_TIMEOUT_S)
        victim.kill()
        thread.join(END_TIMEOUT_S)
        assert not thread.is_alive()
        ended += drain(connection.transport, list(posted - {completion.op for completion in ended}))
        assert sorted(completion.op for completion in ended) == sorted(posted)
        assert_reads_fail(connection, prepared)

    def test_a_killed_producer_cannot_be_connected_to(
        self, connect: Callable[[Producer], Connection], victim: Producer
    ) -> None:
        connection = connect(victim)
        victim.kill()
        with pytest.raises((TransferError, PeerError)):
            connection.transport.connect(victim.address, victim.endpoint)

    def test_a_successor_is_never_read_from(
        self, connect: Callable[[Producer], Connection], victim: Producer
    ) -> None:
        address, endpoint = victim.address, victim.endpoint
        connection = connect(victim)
        prepared = connection.prepare()
        assert connection.read(prepared, [0], [0]).ok
        victim.replace()
        assert_reads_fail(connection, prepared)
        with pytest.raises((TransferError, PeerError)):
            connection.transport.connect(address, endpoint)

    def test_reads_under_way_when_their_producer_is_replaced_bring_no_other_bytes(
        self, connect: Callable[[Producer], Connection], victim: Producer
    ) -> None:
        connection = connect(victim)
        prepared = connection.prepare()
        blocks = np.random.default_rng(4).permutation(NUM_BLOCKS).tolist()
        expected = pattern(victim.seed)[0]
        wrong: list[Completion] = []
        under_way = threading.Event()

        def read_until_it_fails() -> None:
            while True:
                try:
                    completion = connection.read(prepared, blocks, blocks)
                except TransferError:
                    return
                if not completion.ok:
                    return
                if not np.array_equal(connection.memory[0], expected):
                    wrong.append(completion)
                under_way.set()

        thread = threading.Thread(target=read_until_it_fails)
        thread.start()
        assert under_way.wait(END_TIMEOUT_S)
        victim.replace()
        thread.join(END_TIMEOUT_S)
        assert not thread.is_alive()
        assert wrong == []

    def test_withdrawn_memory_is_never_read_from(
        self, connect: Callable[[Producer], Connection], victim: Producer
    ) -> None:
        connection = connect(victim)
        prepared = connection.prepare()
        victim.withdraw()
        assert_reads_fail(connection, prepared)

    def test_the_loss_of_one_producer_is_nothing_to_another(
        self, connect: Callable[[Producer], Connection], producer: Producer, victim: Producer
    ) -> None:
        connection = connect(producer)
        other = connection.transport.connect(victim.address, victim.endpoint)
        prepared = connection.transport.prepare(other, [BLOCK_SPAN])
        victim.kill()
        assert_reads_fail(connection, prepared)
        assert connection.read(connection.prepare(), [1], [2]).ok

    # Leaving.

    def test_disconnecting_ends_all_reads_with_that_peer(
        self, connect: Callable[[Producer], Connection], producer: Producer
    ) -> None:
        connection = connect(producer)
        prepared = connection.prepare()
        ops = [
            connection.transport.post_read(prepared, range(NUM_BLOCKS), range(NUM_BLOCKS)) for _ in range(10)
        ]
        connection.transport.disconnect(connection.peer)
        connection.transport.disconnect(connection.peer)
        assert len(drain(connection.transport, ops)) == 10
        with pytest.raises(TransferError):
            connection.transport.post_read(prepared, [0], [0])
        connection.peer = connection.transport.connect(producer.address, producer.endpoint)
        assert connection.read(connection.prepare(), [0], [0]).ok

    def test_closing_ends_all_reads_and_leaves_nothing_open(
        self, rig: TransportRig, producer: Producer
    ) -> None:
        with nothing_left_over():
            transport = rig.reader()
            connection = Connection(transport, producer, rig.place)
            prepared = connection.prepare()
            ops = [transport.post_read(prepared, range(NUM_BLOCKS), range(NUM_BLOCKS)) for _ in range(10)]
            transport.close()
            transport.close()
            assert len(drain(transport, ops)) == 10
            with pytest.raises(TransferError):
                transport.post_read(prepared, [0], [0])
